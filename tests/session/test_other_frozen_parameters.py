"""A run in stages: the state of a session is loaded by one that trains other parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import slipstream
from tests.harness.models import MODELS
from tests.harness.ranks import Ranks
from tests.harness.reference import OPTIMIZERS, build, digest

INT8 = {"gradients": {"codec": {"kind": "int8", "error_feedback": True}}}


def train(
    model: nn.Module,
    optimizer: Any,
    strategy: dict[str, Any],
    steps: range,
    *,
    frozen: bool,
    loaded: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A stage of training, with the first parameter frozen or not; its checkpoint."""
    next(model.parameters()).requires_grad_(not frozen)
    with slipstream.accelerate(model, optimizer, None, strategy) as session:
        if loaded is not None:
            session.restore(loaded)
        for step in steps:
            session.backward(session.model(*MODELS["mlp"].batch(dist.get_rank(), step)))
            session.step()
        return copy.deepcopy(session.checkpoint())


def in_stages(strategy: dict[str, Any], frozen: tuple[bool, bool]) -> tuple[bool, int, int]:
    """Whether a second script goes on as the first one does, with other parameters frozen; its
    updates, and the parameters of which its codec keeps something."""
    first, second = (build(MODELS["mlp"], seed=seed) for seed in (0, 7))
    mine, theirs = (OPTIMIZERS["sgd"](model) for model in (first, second))
    saved = train(first, mine, strategy, range(2), frozen=frozen[0])
    train(first, mine, strategy, range(2, 4), frozen=frozen[1])
    state = train(second, theirs, strategy, range(2, 4), frozen=frozen[1], loaded=saved)["session"]
    return digest(first) == digest(second), state["steps"], len([*state["codecs"], {}][0])


@pytest.mark.parametrize("frozen", [(True, False), (False, True)], ids=["thawed", "frozen"])
def test_a_second_stage_loads_the_state_of_the_first(two: Ranks, frozen: tuple[bool, bool]) -> None:
    assert two.run(in_stages, {}, frozen) == [(True, 4, 0)] * 2
    assert all(kept for _, _, kept in two.run(in_stages, INT8, frozen))
