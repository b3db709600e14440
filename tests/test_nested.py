"""Tensors in containers: every container that models use comes back as its own kind, copied."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple

import torch

from slipstream.nested import mapped, tensors

Pair = namedtuple("Pair", "left right")


def test_containers_stay_what_they_are_and_are_copied() -> None:
    given = [
        Pair(torch.ones(1), {"a": torch.ones(1)}),
        OrderedDict(b=(torch.ones(1), "text")),
        UserDict(c=[torch.ones(1), None]),
    ]
    found = mapped(given, lambda x: x + 1)
    assert [type(x) for x in found] == [Pair, OrderedDict, UserDict]
    assert [float(x) for x in tensors(found)] == [2.0] * 4
    assert [float(x) for x in tensors(given)] == [1.0] * 4
    assert found[1]["b"][1] == "text"
    assert found[2]["c"][1] is None
