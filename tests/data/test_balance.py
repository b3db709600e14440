"""Samples dealt by cost: nothing lost or doubled, little waiting, the same gradient, resumption."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from torch.utils.data import DataLoader

from slipstream.data.balance import BalancedBatches, LengthCost, deal, deal_padded, fit_cost
from slipstream.errors import UsageError

costs = st.lists(st.floats(0, 100), max_size=40)
speeds = st.lists(st.sampled_from([1.0, 1.0, 0.5, 3.0]), min_size=1, max_size=6)
LENGTHS = np.random.default_rng(0).lognormal(4.5, 0.8, 4096).astype(int).clip(1, 2000).tolist()


@given(costs, speeds)
@example([0.0] * 6 + [68.93357197035137], [3.0])  # rounded, 7 items do not fit their own time
def test_every_item_is_dealt_once(costs: list[float], speeds: list[float]) -> None:
    parts = deal(costs, speeds)
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert len(parts) == len(speeds)
    assert all(parts) or len(costs) < len(speeds)
    if len(costs) >= len(speeds):
        runs = deal_padded(costs, speeds)
        assert sorted(item for part in runs for item in part) == list(range(len(costs)))
        assert all(runs)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=9))
def test_padded_runs_are_the_best_there_are(costs: list[int]) -> None:
    """Against all ways to cut the sorted items in two."""
    parts = deal_padded(costs, [1, 1])
    falling = sorted(costs, reverse=True)
    best = min(
        max(cut * falling[0], (len(costs) - cut) * falling[cut]) for cut in range(1, len(costs))
    )
    assert max(len(part) * max(costs[i] for i in part) for part in parts) == best


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.sampled_from([2.0, 3.0]))
def test_a_faster_rank_gets_more(costs: list[int], speed: float) -> None:
    """Graham: the longest first is at most 2 - 1 / ranks times as long as the best deal."""
    parts = deal(costs, [speed, 1.0])
    times = [sum(costs[i] for i in part) / s for part, s in zip(parts, (speed, 1.0), strict=True)]
    fluid = sum(costs) / (1 + speed)
    assert max(times) <= fluid + max(costs)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("cost", [LengthCost(), LengthCost(1.0, 1 / 512)])
def test_hardly_any_rank_waits(ranks: int, cost: LengthCost) -> None:
    """Lengths like those of functions: predicted idle time of at most 1 %; a plain deal has 20."""
    batches = BalancedBatches(LENGTHS, rank=0, ranks=ranks, batch_size=16 * ranks, cost=cost)
    assert batches.idle() <= 0.01
    shuffled = np.random.default_rng(1).permutation(LENGTHS).reshape(-1, ranks, 16)
    sums = cost(shuffled).sum(2)
    assert 1 - sums.mean(1).sum() / sums.max(1).sum() > 0.1


def test_a_slow_rank_gets_its_share() -> None:
    speeds = [1.0, 1.0, 1.0, 0.5]
    batches = BalancedBatches(LENGTHS, rank=3, ranks=4, batch_size=64, speeds=speeds)
    assert batches.idle() <= 0.02
    tokens = sum(LENGTHS[sample] for batch in batches for sample in batch)
    assert tokens / sum(LENGTHS) == pytest.approx(0.5 / 3.5, rel=0.02)


def test_padding_is_dealt_in_runs() -> None:
    every = {"ranks": 4, "batch_size": 64}
    batches = [BalancedBatches(LENGTHS, rank=r, pads=True, **every) for r in range(4)]  # type: ignore[arg-type]
    ours = sum(
        max(len(part) * max(LENGTHS[i] for i in part) for part in parts)
        for parts in zip(*batches, strict=True)
    )
    shuffled = np.random.default_rng(1).permutation(LENGTHS).reshape(-1, 4, 16)
    theirs = int((16 * shuffled.max(2)).max(1).sum())
    assert theirs / ours > 1.8
    longest = Counter(
        max(range(4), key=lambda r: max(LENGTHS[i] for i in parts[r]))
        for parts in zip(*batches, strict=True)
    )
    assert min(longest.values()) > 5, "the longest samples go round"


few = LENGTHS[:400]
SETTINGS: dict[str, dict[str, Any]] = {
    "batches": {"batch_size": 24},
    "a rest smaller than the ranks": {"batch_size": 133},
    "tokens": {"max_tokens": 2500},
    "padded tokens": {"max_tokens": 2500, "pads": True},
    "padded": {"batch_size": 24, "pads": True},
    "in order": {"batch_size": 24, "shuffle": False},
    "unequal": {"batch_size": 24, "speeds": [1.0, 0.25, 1.0, 2.0]},
    "unequal tokens": {"max_tokens": 2500, "speeds": [3.0, 0.5, 0.5, 0.5]},
    "a shifted loss": {"batch_size": 24, "loss_lengths": [length - 1 for length in few]},
}
all_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def of_all_ranks(settings: dict[str, Any], ranks: int = 4, epoch: int = 0) -> list[Any]:
    """By step: the samples of each rank, and its weights."""
    found = []
    for rank in range(ranks):
        batches = BalancedBatches(few, rank=rank, ranks=ranks, **settings)
        batches.set_epoch(epoch)
        samples = list(batches)
        assert len(samples) == len(batches)
        weights = [
            [batches.weight(s, per=p) for s in range(len(samples))] for p in ("samples", "tokens")
        ]  # type: ignore[arg-type]
        found.append(list(zip(samples, *weights, strict=True)))
    return list(zip(*found, strict=True))


@all_settings
def test_an_epoch_has_every_sample_once(settings: dict[str, Any]) -> None:
    counted = Counter(
        sample
        for step in of_all_ranks(settings)
        for samples, weight, _ in step
        for sample in samples
        if weight
    )
    assert counted == Counter(range(len(few)))


@all_settings
def test_weights_make_the_mean_over_all(settings: dict[str, Any]) -> None:
    values = np.random.default_rng(3).normal(size=len(few))
    counted = np.array(settings.get("loss_lengths", few))
    for step in of_all_ranks(settings):
        samples = [s for part, weight, _ in step for s in part if weight]
        ours = [sum(w * values[part].mean() for part, w, _ in step) / 4]
        ours += [
            sum(w * np.average(values[part], weights=counted[part]) for part, _, w in step) / 4
        ]
        theirs = values[samples].mean(), np.average(values[samples], weights=counted[samples])
        assert np.allclose(ours, theirs)


def test_no_rank_has_more_tokens_than_allowed() -> None:
    for pads in (False, True):
        settings = {"max_tokens": 2500, "pads": pads}
        for step in of_all_ranks(settings):
            for samples, *_ in step:
                lengths = [few[i] for i in samples]
                assert (len(lengths) * max(lengths) if pads else sum(lengths)) <= 2500
        used = sum(few) / (4 * 2500 * len(of_all_ranks(settings)))
        assert used > (0.55 if pads else 0.8)
    settings = {"ranks": 4, "max_tokens": 2500, "speeds": [3.0, 0.5, 0.5, 0.5]}
    batches = BalancedBatches([2000] * 6, rank=0, **settings)
    assert [len(batch) for batch in batches] == [1, 1, 1], "the fast rank takes no two at the end"


@pytest.mark.parametrize("settings", [SETTINGS["batches"], SETTINGS["padded"]])
def test_the_order_of_samples_does_not_depend_on_the_ranks(settings: dict[str, Any]) -> None:
    def updates(ranks: int, epoch: int) -> list[set[int]]:
        return [
            {s for samples, *_ in step for s in samples}
            for step in of_all_ranks(settings, ranks, epoch)
        ]

    assert updates(1, 2) == updates(3, 2) == updates(4, 2)
    assert updates(1, 2) != updates(1, 3)


def test_a_training_goes_on_in_the_middle_of_an_epoch() -> None:
    def sampler(ranks: int = 2) -> BalancedBatches:
        return BalancedBatches(few, rank=0, ranks=ranks, batch_size=16, seed=7)

    whole = sampler()
    whole.set_epoch(3)
    loader = DataLoader(range(len(few)), batch_sampler=whole, collate_fn=list)  # type: ignore[arg-type]
    every = list(loader)
    state = whole.state_dict(taken=5)
    later = sampler()
    later.load_state_dict(state)
    assert len(later) == len(every) - 5
    assert list(later) == every[5:]
    later.set_epoch(4)
    assert len(list(later)) == len(every), "only the first epoch is a part"
    other = BalancedBatches(few, rank=0, ranks=2, batch_size=16, seed=8)
    other.set_epoch(3)
    assert list(other) != every
    other.load_state_dict(state)
    assert list(other) == every[5:], "the epoch goes on with its own seed"


@given(st.floats(0.1, 9), st.floats(0, 0.1), st.floats(0, 50))
def test_a_cost_is_found_in_measurements(linear: float, quadratic: float, rest: float) -> None:
    rows = np.split(np.array(LENGTHS[:160]), 20)
    seconds = [rest + linear * row.sum() + quadratic * np.square(row).sum() for row in rows]
    cost = fit_cost([row.tolist() for row in rows], seconds)
    expected = LengthCost(linear, quadratic)(LENGTHS[:50])
    assert np.allclose(cost(LENGTHS[:50]), expected, rtol=1e-3)


def build(**changes: Any) -> BalancedBatches:
    settings: dict[str, Any] = {"lengths": [3, 1, 2], "rank": 0, "ranks": 2, "batch_size": 2}
    return BalancedBatches(**{**settings, **changes})


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no samples": (lambda: build(lengths=[]), "0 samples for 2 ranks"),
    "fewer samples than ranks": (lambda: build(lengths=[1]), "1 samples for 2 ranks"),
    "an empty sample": (lambda: build(lengths=[3, 0, 1]), "sample 1 has length 0"),
    "a long sample": (
        lambda: build(batch_size=None, max_tokens=2),
        "sample 0 has 3 tokens, max_tokens is 2; cut or leave out",
    ),
    "both sizes": (lambda: build(max_tokens=9), "batch_size is 2, max_tokens 9; allowed: one"),
    "no size": (lambda: build(batch_size=None), "batch_size is None, max_tokens None"),
    "a small batch": (lambda: build(batch_size=1), "batch_size is 1, for 2 ranks together"),
    "a loss of others": (
        lambda: build(loss_lengths=[1, 2]),
        "loss_lengths has 2 numbers, the smallest 1; allowed: one for each of 3 samples",
    ),
    "a loss below 0": (lambda: build(loss_lengths=[1, 2, -1]), "the smallest -1; allowed"),
    "no such rank": (lambda: build(rank=2), "rank 2 of 2"),
    "a rank that stands still": (lambda: build(speeds=[1, 0]), "a speed above 0 for each"),
    "a cost below 0": (lambda: deal([1, -1], [1, 1]), "a cost is below 0"),
    "no number": (lambda: deal([math.nan], [1]), "not a number"),
    "no speed": (lambda: deal([1], []), "allowed: more than 0"),
    "few to pad": (lambda: deal_padded([1], [1, 1]), "1 items for 2 ranks"),
    "no cost": (lambda: LengthCost(0.0, 0.0), "more than 0 for one"),
    "few batches": (lambda: fit_cost([[1], [2]], [1, 2]), "2 batches and 2 times"),
    "equal batches": (lambda: fit_cost([[1]] * 4, [1, 1, 1, 1]), "of different lengths"),
    "shorter takes longer": (
        lambda: fit_cost([[1], [2], [3]], [3, 2, 1]),
        "longer samples took no more time",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        make()


def test_batches_feed_a_loader_with_workers() -> None:
    batches = BalancedBatches(few[:32], rank=1, ranks=2, batch_size=8)
    expected = list(batches)
    loader = DataLoader(torch.arange(32), batch_sampler=batches, num_workers=0)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == expected
