"""Mistakes and failures in a pipeline: errors on every rank, and nobody waits for ever."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from slipstream.errors import (
    ExchangeError,
    MismatchError,
    ModelError,
    StrategyError,
    UsageError,
)
from slipstream.parallel import Pipeline
from tests.harness.ranks import PerRank

# Errors.


def refused(settings: dict[str, Any], call: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Tanh())
    pipeline = Pipeline(model, **{"cut": ["1"], "micro_batches": 2, **settings})
    given = {"loss_fn": F.mse_loss, "args": (torch.ones(4, 3),), "target": torch.ones(4, 1)}
    pipeline.forward_backward(**given | call)


class Weird(nn.Module):
    """A loss that is none, by a name that is its value."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, output: Any, target: Any) -> Any:
        if self.kind == "raises":
            raise ValueError("no such label")
        return {"vector": output, "number": 3.0, "constant": torch.ones(())}[self.kind]


@pytest.mark.parametrize(
    ("settings", "call", "error", "message"),
    [
        ({"cut": ["7"]}, {}, ModelError, r"cut at '7', but Sequential has no module .* allowed"),
        (
            {"cut": ["1", "2"]},
            {},
            StrategyError,
            "cut at 2 modules makes 3 stages, on 2 ranks; allowed: 1 mo",
        ),
        ({"cut": ["1", "2", "3"]}, {}, StrategyError, "1f1b runs one stage a rank, not 2"),
        ({"schedule": "zb"}, {}, StrategyError, "schedule 'zb'; allowed: gpipe, 1f1b, interl"),
        ({"micro_batches": 1}, {}, StrategyError, "1 micro-batches on 2 stages; .* 2 or more"),
        ({"micro_batches": 0, "schedule": "gpipe"}, {}, StrategyError, "allowed: 1 or more"),
        (
            {"micro_batches": 5, "schedule": "zero_bubble"},
            {},
            StrategyError,
            "5 micro-batches on 2 ranks; allowed by zero_bubble: a multiple of the ranks, e.g. 4",
        ),
        ({}, {"args": (torch.ones(5, 3),)}, StrategyError, "batch of 5 samples in 2 micro-batches"),
        ({}, {"args": (), "target": None}, StrategyError, "a batch without a tensor"),
        ({}, {"args": torch.ones(4, 3)}, StrategyError, r"args is a Tensor; allowed: .* \(x,\)"),
        ({}, {"loss_fn": Weird("vector")}, ModelError, r"stage 1 on rank 1: .* shape \[2, 1\]"),
        ({}, {"loss_fn": Weird("number")}, ModelError, "loss_fn returned a float; allowed: a fl"),
        ({}, {"loss_fn": Weird("constant")}, ModelError, "the loss requires no gradient"),
        ({}, {"loss_fn": Weird("raises")}, ModelError, "stage 1 on rank 1: ValueError: no such la"),
        (
            {},
            {"args": (torch.ones(4, 5),)},
            ModelError,
            "stage 0 on rank 0: RuntimeError: (addmm: )?mat1",
        ),
    ],
)
def test_mistakes_are_errors_on_every_rank(two, settings, call, error, message) -> None:
    for rank, actual in two.fail(refused, settings, call).items():
        if isinstance(actual, MismatchError):  # the others name the rank that has the error
            assert rank
            assert "cannot go on" in str(actual)
            continue
        with pytest.raises(error, match=message):
            raise actual


class ReadsAhead(nn.Sequential):
    """Uses a parameter of the last stage in the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x * self[1].weight))  # type: ignore[no-any-return]


def reads_ahead() -> None:
    pipeline = Pipeline(ReadsAhead(nn.Linear(3, 3), nn.Linear(3, 1)), cut=["1"], micro_batches=2)
    given = {"args": (torch.ones(4, 3),), "target": torch.ones(4, 1)}
    pipeline.forward_backward(F.mse_loss, **given)


def test_a_parameter_of_a_later_stage_is_refused(two) -> None:
    first, *_ = two.fail(reads_ahead).values()
    assert isinstance(first, ModelError)
    assert "comes out of stage 0: either a parameter of a module behind '1' is used" in str(first)


def hooked(kind: str, schedule: str) -> int:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipeline = Pipeline(model, cut=["1"], schedule=schedule, micro_batches=2)
    calls: list[int] = []
    getattr(model[1].weight, kind)(lambda _: calls.append(1))
    given = {"args": (torch.ones(4, 3),), "target": torch.ones(4, 3)}
    pipeline.forward_backward(F.mse_loss, **given)
    pipeline.close()
    return len(calls)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("register_hook", "zero_bubble"), ("register_post_accumulate_grad_hook", "1f1b")],
)
def test_hooks_are_called_once_a_micro_batch(two, kind, schedule) -> None:
    assert two.run(hooked, kind, schedule) == [0, 2]


def test_hooks_that_zero_bubble_does_not_call_are_refused(two) -> None:
    errors = two.fail(hooked, "register_post_accumulate_grad_hook", "zero_bubble")
    assert isinstance(errors[1], ModelError)
    assert str(errors[1]).startswith("1.weight has a hook of register_post_accumulate_grad_hook()")
    assert isinstance(errors[0], MismatchError)
    assert "cannot go on" in str(errors[0])


class Counts(nn.Sequential):
    """Keeps numbers in buffers of the model itself, of before its second layer and behind it."""

    def __init__(self, where: str) -> None:
        super().__init__(*(nn.Linear(3, 3) for _ in range(4)))
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self[0](x)
        if self.where in ("calls", "first"):
            self.count += 1 if self.where == "calls" else first.detach().mean(0)
        last: torch.Tensor = self[3](self[2](self[1](first)))
        self.cache.copy_(last.detach().mean(0))
        if self.where == "last":
            self.count += last.detach().mean(0)
        elif self.where == "assigned":
            self.count = self.count + last.detach().mean(0)
        return last


def counts(where: str, schedule: str, cut: list[str]) -> torch.Tensor:
    torch.manual_seed(0)
    model = Counts(where)
    pipeline = Pipeline(model, cut=cut, schedule=schedule, micro_batches=2)
    pipeline.forward_backward(F.mse_loss, (torch.ones(4, 3),), target=torch.ones(4, 3))
    pipeline.close()
    return model.count


@pytest.mark.parametrize(
    ("where", "schedule", "cut", "stages"),
    [
        ("last", "1f1b", ["1"], "[1] of [0, 1]"),
        ("assigned", "gpipe", ["1"], "[1] of [0, 1]"),
        ("calls", "interleaved_1f1b", ["1", "2", "3"], "[0, 1, 2, 3] of [0, 1, 2, 3]"),
    ],
)
def test_a_buffer_that_ranks_update_apart_is_refused(two, where, schedule, cut, stages) -> None:
    for error in two.fail(counts, where, schedule, cut).values():
        assert isinstance(error, ModelError)
        assert f"the buffer count is updated in stages {stages}, which hold it" in str(error)
        assert "that of rank 0 of the pipeline is the one that is saved; move it" in str(error)


@pytest.mark.parametrize("where", ["calls", "first"])
def test_a_buffer_that_its_owner_updates_is_kept(two, where) -> None:
    torch.manual_seed(0)
    model = Counts(where)
    for _ in range(2):
        model(torch.ones(2, 3))
    for found in two.run(counts, where, "1f1b", ["1"]):
        torch.testing.assert_close(found, model.count)


def settings_differ(cut: list[str]) -> None:
    Pipeline(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), cut=cut)


def test_ranks_must_give_the_same_settings(two) -> None:
    for error in two.fail(settings_differ, PerRank(["1"], ["2"])).values():
        assert isinstance(error, MismatchError)
        assert "rank 1 differs from rank 0 in cut: ['2'] on rank 1, ['1'] on rank 0" in str(error)


def test_ranks_must_give_the_same_shapes(two) -> None:
    calls = PerRank(*({"args": (torch.ones(n, 3),), "target": torch.ones(n, 1)} for n in (4, 6)))
    for error in two.fail(refused, {}, calls).values():
        assert "rank 1 differs from rank 0 in the first micro-batch: float32[3, 3]" in str(error)


class Fails(nn.Module):
    """Raises when it gets a number above 100."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().max()) > 100:
            raise ValueError("too large")
        return x * 1


def fails_later(schedule: str, where: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    layers.insert(2 * where, Fails())
    model = nn.Sequential(*layers)
    pipeline = Pipeline(model, group, cut=[str(2 - where)], schedule=schedule, micro_batches=2)
    x, y = torch.ones(4, 3), torch.ones(4, 3)
    pipeline.forward_backward(F.mse_loss, (x,), target=y)
    try:
        pipeline.forward_backward(F.mse_loss, (x * 1e6,), target=y)
    finally:
        with pytest.raises(UsageError, match=r"of the stages was left by .* out of step since"):
            pipeline.forward_backward(F.mse_loss, (x,), target=y)


@pytest.mark.parametrize(("schedule", "where"), [("1f1b", 0), ("zero_bubble", 0), ("gpipe", 0)])
def test_an_error_in_a_stage_blocks_no_rank(two, schedule, where) -> None:
    errors = two.fail(fails_later, schedule, where)
    assert isinstance(errors[0], ValueError)  # the model's own, as a script expects it
    assert str(errors[0]) == "too large"
    assert errors[0].__notes__ == ["(rank 0: stage 0 in the forward of micro-batch 0)"]
    assert isinstance(errors[1], ExchangeError)
    assert "rank 1, which runs stages [1], cannot continue" in str(errors[1])
