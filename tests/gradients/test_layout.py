"""Segments: every gradient in exactly one, in ready order, cut where the split says."""

from __future__ import annotations

from itertools import accumulate, groupby

import pytest
from hypothesis import given, strategies as st

from slipstream.errors import ModelError, StrategyError
from slipstream.gradients.layout import MEGABYTE, Gradient, SegmentRange, plan_segments
from slipstream.strategy import (
    ByBytesConfig,
    ByIndexConfig,
    ByLayersConfig,
    ByPercentConfig,
    PerGradientConfig,
    PerLayerConfig,
    SingleConfig,
)

sizes = st.one_of(st.just(0), st.integers(1, 3 * MEGABYTE), st.just(200 * MEGABYTE))
models = st.lists(st.tuples(sizes, st.integers(0, 3)), min_size=1, max_size=40).map(
    lambda facts: [Gradient(f"p{i}", f"l{layer}", n) for i, (n, layer) in enumerate(facts)]
)
megabytes = st.floats(0.01, 8)
by_bytes = st.builds(ByBytesConfig, megabytes=megabytes, first_megabytes=st.none() | megabytes,
                     last_megabytes=st.none() | megabytes)  # fmt: skip
by_percent = st.lists(st.integers(1, 100), min_size=1, max_size=6).map(
    lambda parts: ByPercentConfig(percents=[100 * part / sum(parts) for part in parts])
)
splits = st.one_of(
    by_bytes,
    by_percent,
    st.builds(ByLayersConfig, layers=st.integers(1, 5)),
    st.sampled_from([PerLayerConfig(), PerGradientConfig(), SingleConfig()]),
)


def gradients(*num_bytes: int, layers: str = "") -> list[Gradient]:
    names = layers or "a" * len(num_bytes)
    return [Gradient(str(i), names[i], n) for i, n in enumerate(num_bytes)]


def stops(ready: list[Gradient], split: object) -> list[int]:
    return [segment.stop for segment in plan_segments(ready, split)]


@given(models, splits)
def test_every_gradient_is_in_one_segment_in_order(ready, split):
    segments = plan_segments(ready, split)
    assert [i for s in segments for i in range(s.start, s.stop)] == list(range(len(ready)))
    assert all(len(segment) > 0 for segment in segments)
    assert plan_segments(list(ready), split.model_copy()) == segments


@given(models, by_bytes)
def test_by_bytes_closes_a_segment_as_soon_as_it_is_full(ready, split):
    *full, last = [
        [g.num_bytes for g in ready[s.start : s.stop]] for s in plan_segments(ready, split)
    ]
    joined = not full and split.first_megabytes is not None
    if split.last_megabytes is not None and joined:
        tail = max(split.last_megabytes * MEGABYTE, last[-1])
        assert sum(last) - tail < split.first_megabytes * MEGABYTE
    elif split.last_megabytes is not None:
        # The one before the tail ends where the tail begins, full or not.
        assert sum(last) <= split.last_megabytes * MEGABYTE or len(last) == 1
        before = ready[len(ready) - len(last) - 1].num_bytes if full else 0
        assert not full or sum(last) + before > split.last_megabytes * MEGABYTE
        *full, last = full or [[]]
    if joined:
        return
    for number, segment in enumerate([*full, last]):
        first = number == 0 and split.first_megabytes
        limit = (split.first_megabytes if first else split.megabytes) * MEGABYTE
        assert sum(segment[:-1]) < limit
        assert sum(segment) >= limit or segment is last


@given(models, by_percent)
def test_by_percent_cuts_at_the_nearest_border(ready, split):
    borders = [0, *accumulate(g.num_bytes for g in ready)]
    cuts = {0, *stops(ready, split)}
    for mark in list(accumulate(split.percents))[:-1]:
        wanted = borders[-1] * mark / 100
        nearest = min(abs(border - wanted) for border in borders)
        assert any(abs(borders[cut] - wanted) == nearest for cut in cuts)
    assert len(cuts) - 1 <= len(split.percents)


@given(models, st.integers(1, 5))
def test_by_layers_holds_that_many_layers(ready, layers):
    runs = [
        len(list(groupby(ready[s.start : s.stop], key=lambda g: g.layer)))
        for s in plan_segments(ready, ByLayersConfig(layers=layers))
    ]
    assert all(run == layers for run in runs[:-1])
    assert 1 <= runs[-1] <= layers


@given(models, st.data())
def test_by_index_ends_at_its_indices(ready, data):
    inner = data.draw(st.sets(st.integers(0, len(ready) - 1)))
    last = sorted(inner | {len(ready) - 1})
    assert stops(ready, ByIndexConfig(last=last)) == [index + 1 for index in last]


@pytest.mark.parametrize(
    "split",
    [ByBytesConfig(), ByPercentConfig(), PerLayerConfig(), PerGradientConfig(), SingleConfig()],
)
def test_one_gradient_is_one_segment(split):
    for num_bytes in (0, 4, 200 * MEGABYTE):
        assert plan_segments(gradients(num_bytes), split) == (SegmentRange(0, 1),)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (ByBytesConfig(megabytes=2, first_megabytes=None, last_megabytes=None), [1, 3, 5]),
        (ByBytesConfig(megabytes=2, first_megabytes=9, last_megabytes=None), [3, 5]),
        (ByBytesConfig(megabytes=2, first_megabytes=None, last_megabytes=1), [1, 3, 4, 5]),
        (ByBytesConfig(megabytes=99, first_megabytes=None, last_megabytes=2), [3, 5]),
        (ByBytesConfig(megabytes=99, first_megabytes=None, last_megabytes=99), [5]),
        (ByBytesConfig(megabytes=99, first_megabytes=3, last_megabytes=2), [1, 3, 5]),
        (ByBytesConfig(megabytes=99, first_megabytes=99, last_megabytes=2), [5]),
        (ByPercentConfig(percents=(20, 80)), [1, 5]),
        (ByPercentConfig(percents=(1, 98, 1)), [5]),
        (ByPercentConfig(percents=(45, 1, 54)), [2, 5]),
        (ByIndexConfig(last=(1, 4)), [2, 5]),
        (ByLayersConfig(layers=2), [4, 5]),
        (PerLayerConfig(), [2, 4, 5]),
        (PerGradientConfig(), [1, 2, 3, 4, 5]),
        (SingleConfig(), [5]),
    ],
)
def test_cuts_by_hand(split, expected):
    ready = gradients(*(m * MEGABYTE for m in (3, 1, 8, 1, 1)), layers="aabbc")
    assert stops(ready, split) == expected


def test_gradients_without_bytes():
    assert stops(gradients(0, 0, 0), ByBytesConfig()) == [3]
    assert stops(gradients(0, 0, 0), ByPercentConfig()) == [3]


def test_what_cannot_be_split():
    with pytest.raises(ModelError, match="requires_grad=True"):
        plan_segments([], SingleConfig())
    for last in ((0, 1), (0, 7)):
        with pytest.raises(StrategyError, match="last index must be 2"):
            plan_segments(gradients(1, 1, 1), ByIndexConfig(last=last))
