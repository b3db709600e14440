"""What is open, how many updates a search takes, and which choice it keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from slipstream.cluster.connect import Cluster
from slipstream.cluster.environment import Environment
from slipstream.strategy import ByBytes, Direct, Flat, Optimal, Strategy
from slipstream.transport.transport import EXACT
from slipstream.tuner.online_search import promising
from slipstream.tuner.search_space import MOST, SETTLING, TURNS, Choice, SearchSpace, fastest


def ranks(device: str = "cpu") -> Cluster:
    environment = Environment.read({}, "here")
    return Cluster(environment, torch.device(device), None, ("here",), owns_world=False)


TENSOR = {"tensor": {"ranks": 2, "plan": {"0": "column"}}}
SPACES = {
    "nothing": ({}, "cpu", (Flat(),), False),
    "a named transport": ({"gradients": {"transport": "direct"}}, "cpu", (Direct(),), False),
    "the transport": ({"gradients": {"transport": "auto"}}, "cpu", tuple(EXACT), True),
    "the transport on a GPU": ({"gradients": {"transport": "auto"}}, "cuda", (Flat(),), False),
    "the transport of a shared model": (
        {"gradients": {"transport": "auto"}, "parallel": TENSOR},
        "cpu",
        (Flat(),),
        False,
    ),
    "the split": ({"gradients": {"split": "optimal"}}, "cpu", (Flat(),), True),
    "both": ({"gradients": {"split": "optimal", "transport": "auto"}}, "cpu", tuple(EXACT), True),
}


@pytest.mark.parametrize(
    ("settings", "device", "transports", "is_open"), SPACES.values(), ids=SPACES
)
def test_what_is_open(settings, device, transports, is_open) -> None:
    space = SearchSpace.of(Strategy.load(settings), ranks(device))
    assert space.transports == transports
    assert space.is_open == is_open
    rows = [(row.setting, row.value) for row in space.report_rows()]
    given_up = not is_open and settings.get("gradients", {}).get("transport") == "auto"
    assert rows == ([("auto", "flat")] if given_up else [])


@given(st.integers(24, 300), st.integers(2, MOST), st.booleans(), st.integers(1, 50))
def test_a_search_ends_within_its_updates(updates, choices, with_split, steps) -> None:
    transports = tuple(Flat() for _ in range(choices))
    space = SearchSpace(transports, Optimal(steps=steps) if with_split else None, updates)
    done, window = 0, space.first_window
    for number in range(1, TURNS * choices + 1):
        assert window >= 1
        done += SETTLING + window
        window = space.window(choices, number, done)
    assert done <= updates
    if not with_split:  # and uses them
        assert done > updates - TURNS * choices


def test_a_split_alone_takes_the_steps_it_asks_for() -> None:
    space = SearchSpace((Flat(),), Optimal(steps=7))
    assert [space.first_window, space.window(4, 1, 9), space.window(2, 3, 99)] == [7, 7, 7]


TIMES = {
    "the default is fastest": ([[[1.0], [1.0]], [[2.0], [2.0]]], 0),
    "another is faster": ([[[2.0], [2.0]], [[1.0], [1.0]]], 1),
    "the fastest of two": ([[[2.0], [2.0]], [[1.5], [1.5]], [[1.0], [1.2]]], 2),
    "faster in one turn alone": ([[[2.0], [1.0]], [[0.5], [1.1]]], 0),
    "equal": ([[[1.0], [1.0]], [[1.0], [1.0]]], 0),
    "the machine slows down": ([[[1.0], [3.0]], [[0.9], [2.9]]], 1),
    "one iteration hung": ([[[1.0] * 3, [1.0] * 3], [[0.9, 9.0, 0.9], [0.9] * 3]], 1),
}


@pytest.mark.parametrize(("seconds", "kept"), TIMES.values(), ids=TIMES)
def test_the_default_stays_unless_another_is_faster_in_every_turn(seconds, kept) -> None:
    assert fastest(seconds) == kept


def test_the_best_of_each_transport_is_measured() -> None:
    flat = [Choice(Flat(), ByBytes(megabytes=size)) for size in (8, 1, 2, 4, 16)]
    direct = [Choice(Direct(), ByBytes(megabytes=size)) for size in (8, 1)]
    predicted = [
        *zip(flat, (9.0, 1.0, 2.0, 3.0, 4.0), strict=True),
        (direct[0], 8.0),
        (direct[1], 7.0),
    ]
    assert promising(predicted) == (flat[0], flat[1], flat[2], direct[1])
    assert promising(predicted[:1]) == (flat[0],)
