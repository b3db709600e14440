"""``accelerate()``: where the strategy comes from, and how a session starts and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from tests.harness.ranks import Ranks
from tests.session.training import accelerate_and_close, sgd, small

# Where the strategy comes from.

SETTINGS = "gradients: {accumulate: 3}"
SOURCES: dict[str, tuple[Any, str | None, int]] = {  # argument, variable -> accumulate
    "nothing": (None, None, 1),
    "the variable": (None, "{file}", 3),
    "an empty variable": (None, "", 1),
    "a preset in the variable": (None, "sequential", 1),
    "an argument before the variable": ({"gradients": {"accumulate": 2}}, "{file}", 2),
    "an empty argument, too": ({}, "{file}", 1),
    "a value": (slipstream.Strategy(), "{file}", 1),
}


@pytest.mark.parametrize(("argument", "variable", "accumulate"), SOURCES.values(), ids=SOURCES)
def test_the_strategy_is_the_argument_or_what_the_variable_names(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argument: Any,
    variable: str | None,
    accumulate: int,
) -> None:
    file = tmp_path / "strategy.yaml"
    file.write_text(SETTINGS)
    monkeypatch.delenv("SLIPSTREAM_STRATEGY", raising=False)
    if variable is not None:
        monkeypatch.setenv("SLIPSTREAM_STRATEGY", variable.format(file=file))
    model = small()
    with slipstream.accelerate(model, sgd(model), strategy=argument) as session:
        assert session.strategy.gradients.accumulate == accumulate
        assert session.strategy.gradients.overlap == (variable != "sequential")


# What accelerate() leaves as it was, and what it makes equal.


def test_close_leaves_the_model_as_it_was() -> None:
    model = small()
    before = [m.__dict__.keys() | m.__class__.__mro__ for m in model.modules()]
    names = list(model.state_dict())
    with slipstream.accelerate(model, sgd(model), strategy={"trace": {"steps": 1}}) as session:
        assert session.model is model
        assert list(model.state_dict()) == names
    assert [m.__dict__.keys() | m.__class__.__mro__ for m in model.modules()] == before
    assert not model._forward_pre_hooks
    accelerate_and_close(model)  # a closed session leaves it free for the next one


def start_values() -> tuple[list[float], list[float], bool]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(dist.get_rank() + 1.0)  # type: ignore[union-attr]
    index = nn.Parameter(torch.tensor([dist.get_rank() + 5]), requires_grad=False)
    model.register_parameter("index", index)
    first_values = [float(v) for p in model.state_dict().values() for v in p.flatten()]
    accelerate_and_close(model)
    values = [float(v) for p in model.state_dict().values() for v in p.flatten()]
    hooks = any(p._post_accumulate_grad_hooks for p in model.parameters())
    return first_values, values, hooks


def test_all_ranks_start_from_the_values_of_the_first(two: Ranks) -> None:
    (first_before, first_after, _), (second_before, second_after, hooks) = two.run(start_values)
    assert first_before != second_before
    assert first_after == second_after == first_before
    assert not hooks
