"""Contention found again in traces that were simulated with it, and left alone where none tells."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.planner.exchange import Plan
from slipstream.planner.replay import calibrated, fit_contention
from slipstream.planner.simulate import predict, simulate
from slipstream.planner.workload import Workload
from tests.planner.workloads import cluster, random_workload, workload

THIRDS = Plan((4, 8, 12))
OTHERS = (Plan((12,)), Plan((1, 12)), Plan((6, 12), overlap=False))


@pytest.mark.parametrize("slowdown", [0.0, 0.13, 0.8, 2.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_one_trace_tells_how_much_compute_slows_exchanges(slowdown, seed) -> None:
    truth = cluster(latency=0.002, compute_slowdown=0.3, exchange_slowdown=slowdown)
    work = random_workload(seed, 4, 12)
    trace = simulate(work, THIRDS, truth, 2)
    guess = truth.model_copy(update={"exchange_slowdown": 0.5})
    found = calibrated(Workload.from_trace(trace, guess), trace, guess)
    assert found.exchange_slowdown == pytest.approx(slowdown, rel=0.05, abs=0.02)
    assert found.compute_slowdown == 0.3
    for plan in OTHERS:
        assert predict(work, plan, found) == pytest.approx(predict(work, plan, truth), rel=0.01)


def test_two_traces_tell_how_much_exchanges_slow_compute_and_how_slow_the_network_is() -> None:
    truth = cluster(seconds=0.12, compute_slowdown=0.4, exchange_slowdown=0.3)
    work = random_workload(3, 4, 12)
    traces = [simulate(work, plan, truth, 2) for plan in (THIRDS, OTHERS[2])]
    fit = fit_contention(traces, cluster(), wire=True)
    assert fit.cluster.compute_slowdown == pytest.approx(0.4, abs=0.05)
    assert fit.cluster.exchange_slowdown == pytest.approx(0.3, abs=0.05)
    assert fit.wire == pytest.approx(1.2, abs=0.02)
    assert fit.error < 0.005 < fit.error_before
    assert "exchanges x 1.2" in str(fit)
    found = Workload.from_trace(traces[0], fit.cluster)
    for plan in OTHERS:
        seconds = predict(work, plan, truth)
        assert predict(found, plan, fit.cluster) == pytest.approx(seconds, rel=0.01)


def test_a_number_that_a_trace_hardly_tells_does_not_explain_what_the_model_lacks() -> None:
    ready = np.tile([0.1, 0.2, 0.3, 0.4, 0.58, 0.6], (4, 1))  # 0.02 s of 0.5 beside compute
    work, plan = workload(ready=ready), Plan((5, 6))
    trace = simulate(work, plan, cluster(seconds=0.103, exchange_slowdown=0.5), 2)
    guess = cluster(exchange_slowdown=0.5)
    found = calibrated(Workload.from_trace(trace, guess), trace, guess)
    assert found.exchange_slowdown < 1.0  # above 2 would explain the trace, and spoil other plans


def test_what_a_trace_does_not_tell_stays_as_it_was_measured() -> None:
    guess = cluster(compute_slowdown=0.2, exchange_slowdown=0.7)
    apart = simulate(workload(), Plan((6,), overlap=False), cluster(), 2)
    assert calibrated(Workload.from_trace(apart, guess), apart, guess) == guess
    assert fit_contention([apart], guess).error < 1e-6


def test_exchanges_faster_than_alone_are_not_explained_by_less_than_nothing() -> None:
    trace = simulate(workload(), Plan((3, 6)), cluster(seconds=0.05), 2)
    guess = cluster(seconds=0.1, exchange_slowdown=0.5)
    found = calibrated(Workload.from_trace(trace, guess), trace, guess)
    assert found.exchange_slowdown == 0.0
    fitted = calibrated(Workload.from_trace(trace, guess), trace, guess, wire=True)
    assert predict(workload(), Plan((3, 6)), fitted) < predict(workload(), Plan((3, 6)), found)
