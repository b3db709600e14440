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


def test_containers_that_look_at_their_tensors_are_seen() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    assert [tuple(x.shape) for x in tensors([packed])] == [(5, 2), (3,)]
