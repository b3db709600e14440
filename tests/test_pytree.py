"""Tensors in containers: every container that models use comes back as its own kind, copied."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from slipstream.pytree import mapped, tensors

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    values: Tensor
    size: int = field(init=False)
    unset: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.values)


@dataclass(frozen=True, slots=True)
class Frozen:
    batch: Batch


@dataclass
class Output(ModelOutput):
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class Layer(nn.Module):
    weight: Tensor

    def __post_init__(self) -> None:
        super().__init__()


def test_containers_stay_what_they_are_and_are_copied() -> None:
    given: list[Any] = [
        Pair(torch.ones(1), {"a": torch.ones(1)}),
        OrderedDict(b=(torch.ones(1), "text")),
        UserDict(c=[torch.ones(1), None]),
        Frozen(Batch(torch.ones(1))),
        Output(logits=torch.ones(1), hidden=(torch.ones(1),)),
    ]
    found = mapped(given, lambda x: x + 1)
    assert [type(x) for x in found] == [Pair, OrderedDict, UserDict, Frozen, Output]
    assert [float(x) for x in tensors(found)] == [2.0] * 7
    assert [float(x) for x in tensors(given)] == [1.0] * 7
    assert found[1]["b"][1] == "text"
    assert found[2]["c"][1] is None
    assert type(found[3].batch) is Batch
    assert found[3].batch.size == 1
    assert not hasattr(found[3].batch, "unset")
    assert found[4].logits is found[4]["logits"] is found[4][0]


def test_containers_without_a_changed_tensor_stay_the_same_object() -> None:
    """A model may write into a dataclass that its caller reads."""
    kept = [Batch(torch.ones(1)), Batch, Layer(torch.ones(1)), Frozen(Batch(torch.ones(1)))]
    found = mapped(kept, lambda x: x)
    assert all(a is b for a, b in zip(kept, found, strict=True))
    assert mapped(kept[2], lambda x: x + 1) is kept[2]


class Node:
    """An object of a script's own."""


def test_other_objects_are_replaced_where_they_stand_and_once() -> None:
    node = Node()
    found = mapped(
        {"a": node, "b": [node, 1], "pair": Pair(node, 2)},
        lambda tensor: tensor,
        others=lambda one: ("instead of", type(one)),
    )
    instead = ("instead of", Node)
    assert found == {"a": instead, "b": [instead, 1], "pair": Pair(instead, 2)}
    assert found["a"] is found["b"][0] is found["pair"].left


def test_a_dataclass_in_which_nothing_changes_counts_as_another_object() -> None:
    batch = Batch(torch.ones(2))
    assert mapped(batch, lambda tensor: tensor) is batch
    assert mapped(batch, lambda tensor: tensor, others=lambda one: "other") == "other"
    assert mapped(batch, lambda tensor: 2 * tensor, others=lambda one: "other").size == 2
