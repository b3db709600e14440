"""Chains, graphs and compiled blocks on a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

from slipstream.fusion import compile_blocks, fuse_patterns, graph_blocks
from slipstream.fusion.checks import compute_warnings
from slipstream.strategy import ComputeConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


@pytest.fixture(autouse=True)
def _products_in_fp32() -> Iterator[None]:
    """TF32 rounds what two ways to add differ in to a thousandth."""
    cudnn: Any = torch.backends.cudnn
    convolutions = cudnn.conv
    before, convolutions.fp32_precision = convolutions.fp32_precision, "ieee"
    yield
    convolutions.fp32_precision = before


def resnet() -> tuple[nn.Module, Tensor]:
    config = ResNetConfig(hidden_sizes=[32, 64, 64, 64], depths=[2, 2, 2, 2])
    return ResNetModel(config).to("cuda"), torch.randn(8, 3, 96, 96, device="cuda")


def bert() -> tuple[nn.Module, Tensor]:
    config = BertConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    return model.to("cuda"), torch.randint(config.vocab_size, (2, 32), device="cuda")


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], Callable[[nn.Module], Any]]] = {
    "chains": (resnet, fuse_patterns),
    "graphs": (bert, graph_blocks),
    "graphs of a ResNet": (resnet, graph_blocks),
    "graphs under autocast": (bert, graph_blocks),
    "compiled": (bert, compile_blocks),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_same(name: str) -> None:
    torch.manual_seed(0)
    build, fuse = CASES[name]
    model, given = build()
    plain = copy.deepcopy(model)
    handle = fuse(model)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled="autocast" in name):
                outputs = each(given).last_hidden_state
            outputs.square().mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=2e-3, atol=2e-4)
        for one, other in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if name.startswith("graphs"):
        captured, *failed = handle.report_rows()
        assert not failed, failed
        assert not captured.value.startswith("0")
    handle.close()


def test_a_warning_says_that_chains_do_not_pay_on_a_device() -> None:
    model, _ = resnet()
    (text,) = compute_warnings(model, ComputeConfig(fuse_bn_act=True))
    assert "compute.fuse_bn_act" in text
    assert not compute_warnings(model, ComputeConfig(channels_last=True))
    assert not compute_warnings(model.cpu(), ComputeConfig(fuse_bn_act=True))
