"""Ranks that meet rarely, on CUDA: two share one GPU by gloo, and train as the reference does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.strategy import LocalConfig, Strategy
from tests.harness.ranks import Ranks
from tests.local.reference import Reference, flat
from tests.local.test_training import SETTINGS, UPDATES, adamw, batch, build

pytestmark = pytest.mark.gpu


def on_gpu() -> nn.Module:
    return build().cuda()


def loss_of(model: nn.Module, rank: int, update: int) -> Tensor:
    words = batch(rank, update).cuda()
    logits = model(words[:, :-1]) * model.scale
    return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def trained(settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """This rank's parameters, and the outer ones."""
    model = on_gpu()
    with slipstream.accelerate(model, adamw(model), None, {"local": settings}) as session:
        for update in range(1, UPDATES + 1):
            session.backward(loss_of(session.model, session.rank, update))
            session.step()
        own = flat(model.parameters()).cpu()
        with session.evaluating():
            outer = flat(model.parameters()).cpu()
    return own, outer


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_on_one_gpu_train_as_the_reference(two: Ranks, name: str) -> None:
    found = two.run(trained, SETTINGS[name])
    config = Strategy.load({"local": SETTINGS[name]}).local
    assert isinstance(config, LocalConfig)
    reference = Reference(on_gpu, adamw, config, 2)
    with torch.no_grad(), torch.enable_grad():
        reference.train(loss_of, UPDATES)
    assert torch.equal(found[0][1], found[1][1])  # to the bit, on all ranks
    close = {"rtol": 1e-2, "atol": 1e-3} if name == "half" else {"rtol": 1e-7, "atol": 1e-9}
    for rank, (own, _) in enumerate(found):
        torch.testing.assert_close(own, reference.parameters(rank).cpu(), **close)
