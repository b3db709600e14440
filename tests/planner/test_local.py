"""Training that meets rarely is priced by its formula, and proposed where it pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.errors import StrategyError, TraceError
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.local_cost import codec_cost, local_seconds
from slipstream.planner.iteration.transport_cost import ExchangeCurve
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.search.candidates import ENOUGH, local
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import rank
from slipstream.strategy import LocalConfig, Strategy
from tests.harness.traces import by_hand
from tests.planner.networks import ethernet_profile
from tests.planner.workloads import workload

SLOW = ethernet_profile(4).scaled(4, 1, 30e6)
WORK = workload(count=24)


def of(**settings: object) -> Strategy:
    return Strategy.load({"local": settings})


def test_a_round_is_its_updates_and_what_no_delay_hides() -> None:
    alone = float(WORK.alone(1).max())
    num_bytes = sum(g.num_bytes for g in WORK.gradients)
    curve = ExchangeCurve.of("flat", SLOW)
    whole, quarter = (float(curve.seconds_of(np.array([b]))[0]) for b in (num_bytes, num_bytes / 4))
    assert local_seconds(of(steps=10), WORK, SLOW) == pytest.approx(alone + whole / 10)
    streamed = of(steps=8, fragments=4, delay=1)
    stolen = SLOW.compute_slowdown * min(quarter, alone)
    exposed = max(0, quarter - alone)
    expected = alone + 4 * (exposed + stolen) / 8
    assert local_seconds(streamed, WORK, SLOW) == pytest.approx(expected)


def test_a_codec_costs_its_bytes_and_its_time() -> None:
    network = SLOW.model_copy(update={"codecs": {"int8": CodecCost(ratio=0.26, encode=1e-9)}})
    dense, coded = (of(steps=8, codec=codec) for codec in (None, "int8"))
    assert local_seconds(coded, WORK, network) < local_seconds(dense, WORK, network)
    few = codec_cost(LocalConfig.model_validate({"codec": "int4"}), network.codecs)
    assert few.ratio == pytest.approx((0.5 + 4 / 64) / 4)
    with pytest.raises(StrategyError, match="onebit: its cost was not measured"):
        local_seconds(of(codec="onebit"), WORK, network)


def test_the_fewest_steps_that_hide_the_exchange_are_proposed() -> None:
    codecs = {"int8": CodecCost(ratio=0.26)}
    network = SLOW.model_copy(update={"codecs": codecs, "compute_slowdown": 0.0})
    [chosen] = local(WORK, network, Strategy())
    alone = float(WORK.alone(1).max())
    assert local_seconds(chosen, WORK, network) * ENOUGH <= alone
    fewer = chosen.local
    assert fewer is not None
    assert "local, " in label(chosen)
    first, *_ = rank([Strategy(), chosen], WORK, network)
    assert first.strategy == chosen
    assert first.exactness == "lossy"


def test_a_run_that_meets_rarely_is_no_base_for_predictions() -> None:
    trace = by_hand()
    meta = {**trace.meta, "strategy": {"local": {"steps": 4}}}
    with pytest.raises(TraceError, match="under local"):
        Forecast.of(replace(trace, meta=meta), ethernet_profile(2))
    base = Strategy()
    forecast = Forecast(trace, base, WORK, SLOW, SLOW)
    with pytest.raises(StrategyError, match="local"):
        forecast.simulated(of(steps=4), steps=1)
    assert any(one.strategy.local for one in forecast.all())


def test_it_is_not_proposed_where_it_does_not_pay() -> None:
    fast = ethernet_profile(4).scaled(4, 1, 100e9)
    assert local(workload(count=1), fast, Strategy()) == []
    assert local(WORK, SLOW, Strategy(), updates=300) == []  # too few meetings
    assert local(WORK, SLOW, of(steps=4)) == []  # it is that already
