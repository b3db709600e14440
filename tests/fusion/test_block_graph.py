"""Recording the forward of a block: what is refused, and that it leaves no trace."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slipstream.fusion.block_graph import Untraceable, record


class Block(nn.Module):
    """Its forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor, self.seen = nn.Linear(4, 4), 2.0, [0]
        self.nested = nn.Sequential(nn.ReLU())
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.ones(4))


def block_with(forward: Callable[..., Any]) -> Block:
    return type("Given", (Block,), {"forward": forward})()  # type: ignore[no-any-return]


def branches(self: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def asks_for_type(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) if isinstance(x, Tensor) else x  # type: ignore[no-any-return]


def makes_a_tensor(self: Any, x: Tensor) -> Tensor:
    return x + torch.rand(4)


def counts(self: Any, x: Tensor) -> Tensor:
    self.factor += 1
    return x


def appends(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x)
    return x


def takes_nothing(self: Any, *, x: Tensor | None = None) -> None:
    return None


def takes_names(self: Any, x: Tensor, *, y: Tensor) -> Tensor:
    return x + y


def iterates(self: Any, x: Tensor) -> Tensor:
    return sum(self.layer(row) for row in x)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (branches, "control flow"),
        (asks_for_type, "asks for the type of a value"),
        (makes_a_tensor, "makes a tensor of its own"),
        (counts, "sets self.factor"),
        (appends, "reads self.seen"),
        (takes_nothing, "no argument by position"),
        (takes_names, "needs y by name"),
        (iterates, "cannot be iterated"),
    ],
)
def test_what_could_differ_in_a_later_call_is_refused(
    forward: Callable[..., Any], reason: str
) -> None:
    block = block_with(forward)
    before = dict(vars(block)), list(block.seen)
    with pytest.raises(Untraceable, match=reason):
        record(block)
    assert (dict(vars(block)), list(block.seen)) == before


def usual(self: Any, x: Tensor, other: Tensor | None = None, sign: int = 1) -> Tensor:
    y = self.layer(x) * self.scale + self.offset
    if other is not None:
        y = y + other
    return sign * self.factor * y if self.training else y


def test_children_are_calls() -> None:
    graph = record(block_with(usual))
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["layer"]


def draws(self: Any, x: Tensor) -> Tensor:
    return x * random.random() * float(np.random.rand()) + float(torch.rand(()))


def test_random_states_stay() -> None:
    block = block_with(draws)
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    record(block)
    assert random.getstate() == before[0]
    assert np.random.get_state()[2] == before[1]
    assert torch.get_rng_state().equal(before[2])


def test_a_block_is_recorded_as_in_training() -> None:
    graph = record(block_with(usual).eval())
    assert any(node.target is operator.mul for node in graph.nodes)


def padded(x: Tensor, layer: nn.Module, by: int) -> Tensor:
    return nn.functional.pad(x, (0, int(x.shape[1]) % by)) @ layer.weight


def calls_a_helper(self: Any, x: Tensor) -> Tensor:
    return torch.relu(padded(x, self.layer, 4))


def test_a_function_that_torch_cannot_follow_stays_a_call() -> None:
    graph = record(block_with(calls_a_helper))
    assert any(node.target is padded for node in graph.nodes)
