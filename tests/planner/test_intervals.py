"""Intervals: what widens them, what cancels in a ratio, and what is recommended."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest

from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.model import predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.iteration.traced import workload_of
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.ranking import (
    DEVIATIONS,
    Bounds,
    Prediction,
    rank,
    recommended,
)
from slipstream.strategy import Strategy
from slipstream.trace.event import Event, Trace
from tests.planner.networks import MB, ring_profile
from tests.planner.workloads import workload

PAIRS = {"kind": "by_bytes", "megabytes": 2}
BASE = Strategy.load({"gradients": {"split": PAIRS}})
OTHERS = [
    BASE,
    Strategy.load({"gradients": {"split": PAIRS, "overlap": False}}),
    Strategy.load({"gradients": {"split": "single"}}),
    Strategy.load({"gradients": {"split": PAIRS, "transport": "direct"}}),
]
WORK = workload()


def network(noise: float = 0.0) -> NetworkProfile:
    """What is measured scatters by so much, everywhere."""
    clean = ring_profile(2)
    curves = {
        name: curve.model_copy(update={"noise": noise})
        for name, curve in clean.networks["world"].curves.items()
    }
    world = clean.networks["world"].model_copy(update=curves)
    return clean.model_copy(update={"noise": noise, "networks": {"world": world}})


def traced(spread: float = 0.0, steps: int = 12) -> Trace:
    """A trace whose later half takes ``1 + spread`` times as long."""
    whole = simulate(WORK, CommPlan.of(BASE, WORK.gradients), network(), steps)
    begins = {e.step: e.start for e in whole.events[::-1] if e.name == "iteration"}

    def stretched(event: Event) -> Event:
        factor, zero = 1 + spread * (event.step >= steps / 2), begins[event.step]
        start, end = (zero + (at - zero) * factor for at in (event.start, event.end))
        return replace(event, start=start, end=end)

    meta = {**whole.meta, "strategy": BASE.document(full=True)}
    return Trace(tuple(map(stretched, whole.events)), meta)


def predicted(
    trace: Trace, measured: NetworkProfile, **elsewhere: int
) -> dict[Strategy, Prediction]:
    forecast = Forecast.elsewhere(trace, measured, **elsewhere)
    return {one.strategy: one for one in forecast.rank(OTHERS)}


def width(interval: Bounds) -> float:
    low, high = interval
    return log(high / low)


STEADY = traced()
CERTAIN = predicted(STEADY, network())


def test_every_prediction_lies_in_its_intervals() -> None:
    for strategy, one in CERTAIN.items():
        assert one.interval[0] < one.seconds < one.interval[1]
        assert one.ratio == pytest.approx(one.seconds / CERTAIN[BASE].seconds)
        if strategy == BASE:
            assert one.ratio_interval == (1.0, 1.0)
        else:
            assert one.ratio_interval[0] < one.ratio < one.ratio_interval[1]


def test_a_machine_that_drifts_makes_seconds_less_sure_and_no_ratio() -> None:
    """The least noise of all collectives counts for it."""
    drifting = predicted(STEADY, network(noise=0.3))
    before, after = (width(one[BASE].interval) / 2 / DEVIATIONS for one in (CERTAIN, drifting))
    assert after**2 - before**2 == pytest.approx(0.3**2, rel=0.05)
    assert drifting[BASE].ratio_interval == CERTAIN[BASE].ratio_interval


def test_a_trace_that_scatters_makes_seconds_less_sure_and_ratios_less_so() -> None:
    noisy = predicted(traced(spread=0.5), network())
    for strategy, one in CERTAIN.items():
        assert width(noisy[strategy].interval) > 2 * width(one.interval)
        assert width(noisy[strategy].ratio_interval) < width(noisy[strategy].interval)


def test_measurements_that_scatter_make_ratios_less_sure() -> None:
    doubtful = predicted(STEADY, network(noise=0.3))
    for strategy in OTHERS[1:]:
        before, after = CERTAIN[strategy].ratio_interval, doubtful[strategy].ratio_interval
        assert width(after) > width(before)


def test_other_ranks_and_larger_exchanges_are_less_sure() -> None:
    far = predicted(STEADY, network(), nodes=32)
    for strategy, one in CERTAIN.items():
        assert width(far[strategy].interval) > width(one.interval)
    gradients = tuple(replace(gradient, num_bytes=64 * MB) for gradient in WORK.gradients)
    larger = replace(WORK, gradients=gradients)
    [within], [beyond] = (rank([OTHERS[2]], work, network(), BASE) for work in (WORK, larger))
    assert width(beyond.ratio_interval) > width(within.ratio_interval)


def test_only_what_is_surely_faster_is_recommended() -> None:
    ranked = list(CERTAIN.values())
    sure = replace(CERTAIN[OTHERS[1]], ratio=0.9, ratio_interval=(0.85, 0.95))
    doubtful = replace(CERTAIN[OTHERS[2]], ratio=0.8, ratio_interval=(0.6, 1.01))
    baseline = CERTAIN[BASE]
    assert recommended([doubtful, sure, baseline], BASE) is sure
    assert recommended([doubtful, baseline, sure], BASE) is baseline
    assert recommended([baseline, sure, doubtful], BASE) is baseline
    assert recommended([replace(one, ratio_interval=(0.9, 1.1)) for one in ranked], BASE).strategy


def test_the_fit_to_a_trace_moves_the_contention_of_other_transports_half_as_far() -> None:
    direct = ring_profile(2)
    guess = direct.model_copy(update={"direct": ring_profile(2, latency_slowdown=1.0)})
    truth = guess.model_copy(update={"exchange_slowdown": 2.0, "latency_slowdown": 2.0})
    work = workload(2, gradients=tuple(replace(g, num_bytes=8 * MB) for g in WORK.gradients))
    trace = simulate(work, CommPlan((2, 4, 6)), truth, 2)
    fitted = Forecast.of(trace, guess).network
    for name in ("exchange_slowdown", "latency_slowdown"):
        assert guess.direct is not None
        assert fitted.direct is not None
        moved = log((1 + getattr(fitted, name)) / (1 + getattr(guess, name)))
        other = log((1 + getattr(fitted.direct, name)) / (1 + getattr(guess.direct, name)))
        assert other == pytest.approx(moved / 2, abs=1e-6)
    assert fitted.exchange_slowdown > 1.0


def test_sharded_computes_for_every_gradient_and_its_trace_says_so() -> None:
    costly = network().model_copy(update={"sharding_seconds": 1e-3})
    gather = {"gradients": {"split": "single", "transport": "sharded"}}
    sharded = CommPlan.of(Strategy.load(gather), WORK.gradients)
    more = predict(WORK, sharded, costly) - predict(WORK, sharded, network())
    assert more == pytest.approx(len(WORK.gradients) * 1e-3, rel=0.05)
    plain = CommPlan.of(BASE, WORK.gradients)
    assert predict(WORK, plain, costly) == predict(WORK, plain, network())
    trace = simulate(WORK, sharded, costly, 3)
    read = workload_of(trace, costly)
    assert np.allclose(read.optimizer, WORK.optimizer[:2], rtol=0.02)
