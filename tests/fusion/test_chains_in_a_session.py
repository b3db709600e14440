"""Fused chains between ranks, beside what else wraps the layers of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import slipstream
from slipstream.errors import ModelError
from tests.fusion.uncompiled import uncompiled
from tests.harness.ranks import Ranks
from tests.harness.reference import digest

CHAINS = {"fuse_bn_act": True, "fuse_add_act": True, "fuse_relu_depthwise": True}
RESNET = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 3])
RESNET.num_labels = 3
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "flat": ({}, 1e-4),
    "sharded": ({"gradients": {"transport": "sharded"}}, 1e-4),
    "per layer": ({"gradients": {"transport": {"kind": "sharded", "gather": "per_layer"}}}, 1e-4),
    "recompute": ({"memory": {"recompute": {"every": 1}}}, 1e-4),
    "channels last": ({"compute": {"channels_last": True}}, 1e-4),
    "autocast": ({"precision": "autocast"}, 0.1),
    "half weights": ({"precision": {"kind": "half_weights", "exchange": "fp32"}}, 0.1),
}


def trained(strategy: dict[str, Any]) -> tuple[nn.Module, str]:
    torch.manual_seed(0)
    model = ResNetForImageClassification(RESNET)
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with uncompiled(), slipstream.accelerate(model, update, None, strategy) as session:
        for step in range(3):
            random = torch.Generator().manual_seed(10 * step + session.rank)
            images = torch.randn(4, 3, 32, 32, generator=random)
            labels = torch.randint(3, (4,), generator=random)
            session.backward(session.model(images, labels=labels).loss)
            session.step()
        report = session.report()
    return model, report


def compare(name: str) -> str:
    strategy, tolerance = SETTINGS[name]
    plain, _ = trained(strategy)
    compute = {**strategy.get("compute", {}), **CHAINS}
    fused, report = trained({**strategy, "compute": compute})
    assert "in 13 blocks" in report
    for key, value in plain.state_dict().items():
        ours = fused.state_dict()[key]
        size = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(ours, value, rtol=tolerance, atol=tolerance * size, msg=key)
    parameters: str = digest(fused)
    return parameters


@pytest.mark.parametrize("name", SETTINGS)
def test_it_trains_as_without(two: Ranks, name: str) -> None:
    assert len(set(two.run(compare, name))) == 1, "ranks differ"


def test_a_model_without_chains_is_refused_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    wish = {"compute": {"fuse_bn_act": True, "fuse_add_act": True}}
    with pytest.raises(ModelError, match="Sequential has no such chain of operations; leave out"):
        slipstream.accelerate(model, update, None, wish)
    with slipstream.accelerate(model, update) as session:
        assert "fused" not in session.report(full=True)
