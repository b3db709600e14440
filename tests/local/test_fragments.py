"""Fragments hold every value once; the schedule has every fragment meet once a round."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st
from torch import nn

from slipstream.codecs import Ranks
from slipstream.gradients.segments import parameters_of
from slipstream.local.fragments import cut, sent_after
from slipstream.local.island import Island
from slipstream.local.meeting import Meeting
from slipstream.strategy import LocalConfig

shapes = st.lists(st.sampled_from([(), (1,), (3, 5), (40, 2), (7, 2, 3)]), min_size=1, max_size=9)


@given(shapes, st.integers(1, 6))
def test_every_value_is_in_one_fragment(shapes: list[tuple[int, ...]], count: int) -> None:
    model = nn.Module()
    for number, shape in enumerate(shapes):
        layer = nn.Module()
        layer.register_parameter("weight", nn.Parameter(torch.zeros(shape)))
        model.add_module(f"layer{number}", layer)
    fragments = cut(model, parameters_of(model, trainable=True), count)
    assert 1 <= len(fragments) <= count
    with torch.no_grad():
        for fragment in fragments:
            for piece in fragment.pieces:
                piece.values.add_(1)
    assert all(bool((p == 1).all()) for p in model.parameters())


def test_layers_of_one_size_take_turns_and_a_large_one_is_cut() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    found = cut(model, parameters_of(model, trainable=True), 2)
    assert [piece.name for piece in found[0].pieces][::2] == ["0.weight", "2.weight", "4.weight"]
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    found = cut(model, parameters_of(model, trainable=True), 4)
    sizes = [fragment.num_values for fragment in found]
    assert len(sizes) == 4
    assert max(sizes) < 1.7 * min(sizes)
    assert sum(len(fragment.buffers) for fragment in found) == 2  # counters are no averages


def test_a_fragment_without_values_meets() -> None:
    model = nn.Module()
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
    (fragment,) = cut(model, parameters_of(model, trainable=True), 2)
    alone = Island((0,), Ranks(0, 1))
    meeting = Meeting(model, fragment, LocalConfig(), alone, 0, {})
    meeting.send(1, due=1)
    meeting.landed()
    with torch.no_grad():
        meeting.merge(lambda parameter: None)
    assert meeting.done == 1


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 5))
def test_each_fragment_meets_once_a_round(steps: int, fragments: int, rounds: int) -> None:
    fragments = min(steps, fragments)
    updates = range(1, (rounds + 1) * steps + 1)
    sent = [sent_after(update, steps, fragments) for update in updates]
    assert [fragment for some in sent for fragment in some] == [*range(fragments)] * (rounds + 1)
    assert all(len(some) <= 1 for some in sent)
