"""Contention is recovered from traces simulated with it; what a trace does not show stays."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.planner.iteration.contention_fit import fit_contention
from slipstream.planner.iteration.model import predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.iteration.traced import workload_of
from tests.planner.networks import linear_profile
from tests.planner.workloads import random_workload, workload

THIRDS = CommPlan((4, 8, 12))
OTHERS = (CommPlan((12,)), CommPlan((1, 12)), CommPlan((6, 12), overlap=False))


@pytest.mark.parametrize("slowdown", [0.0, 0.13, 0.8, 2.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_one_trace_tells_how_much_compute_slows_exchanges(slowdown, seed) -> None:
    truth = linear_profile(latency=0.002, compute_slowdown=0.3, exchange_slowdown=slowdown)
    work = random_workload(seed, 4, 12)
    trace = simulate(work, THIRDS, truth, 2)
    guess = truth.model_copy(update={"exchange_slowdown": 0.5})
    fitted = fit_contention(workload_of(trace, guess), trace, guess)
    assert fitted.exchange_slowdown == pytest.approx(slowdown, rel=0.05, abs=0.02)
    assert fitted.compute_slowdown == 0.3
    for plan in OTHERS:
        assert predict(work, plan, fitted) == pytest.approx(predict(work, plan, truth), rel=0.01)


@pytest.mark.parametrize("slowdown", [0.0, 3.0, 8.0])
def test_one_trace_tells_how_much_compute_slows_latency(slowdown) -> None:
    known = {"compute_slowdown": 0.3, "exchange_slowdown": 0.2}
    truth = linear_profile(latency=0.05, latency_slowdown=slowdown, **known)
    work, many = random_workload(2, 4, 12), CommPlan(tuple(range(1, 13)))
    trace = simulate(work, many, truth, 2)
    guess = truth.model_copy(update={"latency_slowdown": 2.0})
    fitted = fit_contention(workload_of(trace, guess), trace, guess)
    assert abs(fitted.latency_slowdown - slowdown) < abs(guess.latency_slowdown - slowdown)
    for plan in (*OTHERS, THIRDS):
        assert predict(work, plan, fitted) == pytest.approx(predict(work, plan, truth), rel=0.02)


def test_a_number_that_a_trace_hardly_tells_does_not_explain_what_the_model_lacks() -> None:
    ready = np.tile([0.1, 0.2, 0.3, 0.4, 0.58, 0.6], (4, 1))  # 0.02 s of 0.5 beside compute
    work, plan = workload(ready=ready), CommPlan((5, 6))
    trace = simulate(work, plan, linear_profile(seconds=0.103, exchange_slowdown=0.5), 2)
    guess = linear_profile(exchange_slowdown=0.5)
    fitted = fit_contention(workload_of(trace, guess), trace, guess)
    assert fitted.exchange_slowdown < 1.0  # above 2 would explain the trace, and spoil other plans


def test_what_a_trace_does_not_tell_stays_as_it_was_measured() -> None:
    guess = linear_profile(compute_slowdown=0.2, exchange_slowdown=0.7)
    apart = simulate(workload(), CommPlan((6,), overlap=False), linear_profile(), 2)
    assert fit_contention(workload_of(apart, guess), apart, guess) == guess


def test_exchanges_faster_than_alone_are_not_explained_by_less_than_nothing() -> None:
    trace = simulate(workload(), CommPlan((3, 6)), linear_profile(seconds=0.05), 2)
    guess = linear_profile(seconds=0.1, exchange_slowdown=0.5)
    fitted = fit_contention(workload_of(trace, guess), trace, guess)
    assert fitted.exchange_slowdown == 0.0
