"""A pipeline of real ranks against one process: the same losses, gradients and weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F

from slipstream.errors import (
    ExchangeError,
    MismatchError,
    ModelError,
    StrategyError,
    UsageError,
)
from slipstream.parallel import Pipeline, ideal_bubble, measured_bubble
from slipstream.trace import chrome
from slipstream.trace.event import STAGE_BACKWARD, STAGE_FORWARD, STAGE_WEIGHT
from slipstream.trace.recorder import Recorder
from tests.harness.ranks import PerRank, Ranks
from tests.parallel.staged import CASES, SAMPLES, Case

STEPS = 20
TWO = [
    ("gpipe", 1, 2),
    ("gpipe", 4, 2),
    ("1f1b", 2, 2),
    ("1f1b", 4, 2),
    ("interleaved_1f1b", 4, 4),
    ("zero_bubble", 4, 2),
    ("zero_bubble", 2, 4),
]
FOUR = [
    ("gpt2", "1f1b", 4, 4),
    ("gpt2", "gpipe", 2, 4),
    ("positions", "zero_bubble", 4, 4),
    ("resnet", "interleaved_1f1b", 4, 8),
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, timeout=60.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, timeout=100.0) as ranks:
        yield ranks


def make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.build()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def one_process(name: str, parts: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The whole batch at once, but where its statistics matter."""
    case = CASES[name]
    model, optimizer = make(case)
    losses = []
    parts = parts if case.batch_statistics else 1
    for step in range(STEPS):
        args, kwargs, target = case.batch(step)
        chunks = [x.chunk(parts) for x in (*args, *kwargs.values(), target)]
        total = 0.0
        for *inputs, y in zip(*chunks, strict=True):
            given = dict(zip(kwargs, inputs[len(args) :], strict=True))
            loss = case.loss(model(*inputs[: len(args)], **given), y) / parts
            loss.backward()
            total += loss.detach()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def pipelined(name: str, schedule: str, parts: int, stages: int) -> tuple[Any, Any, Any]:
    case = CASES[name]
    model, optimizer = make(case)
    names = list(model.state_dict())
    pipeline = Pipeline(model, cut=case.cuts[stages], schedule=schedule, micro_batches=parts)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        args, kwargs, target = case.batch(step)
        losses.append(pipeline.forward_backward(case.loss, args, kwargs, target))
        optimizer.step()
        optimizer.zero_grad()
    full = pipeline.full_state_dict()
    assert list(model.state_dict()) == names
    pipeline.close()
    return losses, full, model.state_dict()


def check(team: Ranks, name: str, schedule: str, parts: int, stages: int) -> None:
    losses, state = one_process(name, parts)
    for own, full, closed in team.run(pipelined, name, schedule, parts, stages):
        torch.testing.assert_close(own, losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(full, state, rtol=1e-8, atol=1e-10)
        assert closed.keys() == full.keys() == state.keys()
        assert all(torch.equal(closed[key], full[key]) for key in full)
    assert losses[-1] != losses[0]


@pytest.mark.parametrize(("schedule", "parts", "stages"), TWO)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(two, name, schedule, parts, stages) -> None:
    check(two, name, schedule, parts, stages)


@pytest.mark.parametrize(("name", "schedule", "parts", "stages"), FOUR)
def test_four_ranks_train_as_one_process(four, name, schedule, parts, stages) -> None:
    check(four, name, schedule, parts, stages)
