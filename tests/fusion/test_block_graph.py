"""Recording the forward of a block: what is refused, and for which calls a record stands."""

from __future__ import annotations

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


def draws(self: Any, x: Tensor) -> Tensor:
    return x * random.random()


def draws_from_numpy(self: Any, x: Tensor) -> Tensor:
    return x * float(np.random.rand())


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
        (draws, "draws random numbers in Python"),
        (draws_from_numpy, "draws random numbers in Python"),
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


def test_a_record_computes_the_same() -> None:
    block, x = block_with(usual), torch.randn(3, 4)
    graph = record(block)
    assert graph.function()(block, x).equal(block(x))
    with torch.no_grad():
        block.scale.mul_(3)
        block.get_buffer("offset").mul_(3)
    assert graph.function()(block, x).equal(block(x)), "parameters are read anew"


def test_hooks_of_children_fire() -> None:
    block, seen = block_with(usual), []
    block.layer.register_forward_hook(lambda *given: seen.append(given))
    record(block).function()(block, torch.randn(3, 4))
    assert len(seen) == 1


def test_a_record_stands_for_calls_of_tensors_with_the_defaults() -> None:
    x, graph = torch.zeros(3, 4), record(block_with(usual))
    for args, kwargs in ([(x,), {}], [(), {"x": x}], [(x, None), {"sign": 1}]):
        assert graph.tensors_of(args, kwargs) == [x]
    others: Any = ([(x, x), {}], [(x,), {"sign": 2}], [(x,), {"sign": True}], [(3,), {}], [(), {}])
    for args, kwargs in others:
        assert graph.tensors_of(args, kwargs) is None


def change_factor(block: Block) -> None:
    block.factor = 3.0


def change_child(block: Block) -> None:
    block.layer = nn.Linear(4, 4)


def change_grandchild(block: Block) -> None:
    block.nested[0] = nn.Tanh()


def drop_factor(block: Block) -> None:
    del block.factor


@pytest.mark.parametrize(
    "change", [change_factor, change_child, change_grandchild, drop_factor, nn.Module.eval]
)
def test_a_record_ends_with_what_it_read(change: Callable[[Any], object]) -> None:
    block = block_with(usual)
    graph = record(block)
    block.seen = [7]  # was not read
    assert graph.holds()
    change(block)
    assert not graph.holds()


def test_a_block_is_recorded_as_in_training() -> None:
    graph = record(block_with(usual).eval())
    assert graph.read["training"] is True
    assert not graph.holds()


def padded(x: Tensor, layer: nn.Module, by: int) -> Tensor:
    return nn.functional.pad(x, (0, int(x.shape[1]) % by)) @ layer.weight


def calls_a_helper(self: Any, x: Tensor) -> Tensor:
    return torch.relu(padded(x, self.layer, 4))


def test_a_function_that_torch_cannot_follow_stays_a_call() -> None:
    block, x = block_with(calls_a_helper), torch.randn(3, 4)
    graph = record(block)
    assert any(node.target is padded for node in graph.graph.nodes)
    assert graph.function()(block, x).equal(block(x))
