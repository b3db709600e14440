"""Training that meets rarely is priced by its formula, and proposed where it pays."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import NormalDist, fmean

import numpy as np
import pytest

from slipstream.errors import StrategyError, TraceError
from slipstream.gradients.layout import Gradient
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.local_cost import VARIES, WEIGHTS, codec_cost, local_seconds
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.iteration.transport_cost import ExchangeCurve
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.network.curve import Curve
from slipstream.planner.network.profile import Network, NetworkProfile
from slipstream.planner.search.ranking import rank
from slipstream.planner.search.rare_meetings import HARMLESS, RareMeetings, choose_meetings
from slipstream.strategy import LocalConfig, Strategy
from slipstream.strategy.local import ENOUGH
from tests.harness.traces import by_hand
from tests.planner.networks import MB, ethernet_profile, profile
from tests.planner.workloads import workload

SLOW = ethernet_profile(4).scaled(4, 1, 30e6)
WORK = workload(count=24)


def of(**settings: object) -> Strategy:
    return Strategy.load({"local": settings})


def test_a_round_is_its_updates_and_what_no_delay_hides() -> None:
    alone = float(WORK.alone(1).max())
    num_bytes = sum(g.num_bytes for g in WORK.gradients)
    curve = ExchangeCurve.of("flat", SLOW)
    whole, quarter = (
        float(curve.seconds_of(np.array([b, WEIGHTS])).sum()) for b in (num_bytes, num_bytes / 4)
    )
    assert local_seconds(of(steps=10), WORK, SLOW) == pytest.approx(alone + whole / 10)
    streamed = of(steps=8, fragments=4, delay=1)
    lengths = NormalDist(quarter, VARIES * quarter)
    drawn = [lengths.inv_cdf((i + 0.5) / 10_000) for i in range(10_000)]
    exposed = fmean(max(0.0, seconds - alone) for seconds in drawn)
    assert exposed > max(0, quarter - alone)  # some take longer
    slow = SLOW.model_copy(update={"compute_slowdown": 0.3, "merging": 1e-9})
    expected = alone + 4 * (exposed + 0.3 * (quarter - exposed) + 1e-9 * num_bytes / 4) / 8
    assert local_seconds(streamed, WORK, slow) == pytest.approx(expected, rel=1e-4)


def test_codes_of_parts_travel_to_each_rank_before_their_sums_go_around() -> None:
    cost = {"ratio": 0.26, "encode": 1e-9}
    codecs = {kind: CodecCost(**cost) for kind in ("int8", "topk")}
    fine = SLOW.model_copy(update={"codecs": codecs})
    world = fine.networks["world"]
    assert world.reduce_scatter is not None
    slowed = world.reduce_scatter.slowed(1.0, 3.0)
    jammed = fine.model_copy(
        update={"networks": {"world": world.model_copy(update={"reduce_scatter": slowed})}}
    )
    int8, topk, direct = (
        Strategy.load({"local": {"codec": kind}, "gradients": {"transport": transport}})
        for kind, transport in (("int8", "flat"), ("topk", "flat"), ("int8", "shared_memory"))
    )
    assert local_seconds(int8, WORK, jammed) > local_seconds(int8, WORK, fine)
    for other in (topk, direct):
        assert local_seconds(other, WORK, jammed) == local_seconds(other, WORK, fine)
    unknown = world.model_copy(update={"reduce_scatter": None})
    old = fine.model_copy(update={"networks": {"world": unknown}})
    assert local_seconds(int8, WORK, old) == pytest.approx(local_seconds(int8, WORK, fine), rel=0.2)


def test_a_change_is_dense_and_in_fp32() -> None:
    whole = local_seconds(of(steps=8), workload(count=2), SLOW)
    given = (Gradient("0.weight", "0", MB // 2, "bfloat16"), Gradient("table", "table", 0))
    sparse = workload(count=2, gradients=given, change_bytes=2 * MB)
    assert local_seconds(of(steps=8), sparse, SLOW) == whole


def test_a_codec_costs_its_bytes_and_its_time() -> None:
    network = SLOW.model_copy(update={"codecs": {"int8": CodecCost(ratio=0.26, encode=1e-9)}})
    dense, coded = (of(steps=8, codec=codec) for codec in (None, "int8"))
    assert local_seconds(coded, WORK, network) < local_seconds(dense, WORK, network)
    few = codec_cost(LocalConfig.model_validate({"codec": "int4"}), network.codecs)
    assert few.ratio == pytest.approx((0.5 + 4 / 64) / 4)
    with pytest.raises(StrategyError, match="onebit: its cost was not measured"):
        local_seconds(of(codec="onebit"), WORK, network)


def chosen(network: NetworkProfile, updates: int | None = None) -> RareMeetings:
    exchanges = rank([Strategy()], WORK, network, Strategy())
    return choose_meetings(WORK, network, Strategy(), exchanges, updates)


def test_the_setting_that_keeps_most_and_hides_the_exchange_is_chosen() -> None:
    codecs = {"int8": CodecCost(ratio=0.26)}
    network = SLOW.model_copy(update={"codecs": codecs, "compute_slowdown": 0.0})
    found = chosen(network)
    assert found.strategy is not None
    assert found.strategy.local is not None
    alone = float(WORK.alone(1).max())
    assert local_seconds(found.strategy, WORK, network) * ENOUGH <= alone
    config = found.strategy.local
    lag = config.delay / config.steps if config.steps <= HARMLESS else 1.0
    for steps in (8, 16):
        for delay in range(steps // 4 + 1):
            for codec in (None, "int8", "int4"):
                other = of(steps=steps, fragments=4, delay=delay, codec=codec)
                if delay / steps < lag:
                    assert local_seconds(other, WORK, network) * ENOUGH > alone
    assert re.search(r"local, .* predicted .* MB an update, \d+% of the speed", found.reason)
    first, *_ = rank([Strategy(), found.strategy], WORK, network)
    assert first.strategy == found.strategy
    assert first.exactness == "lossy"


@pytest.mark.parametrize(
    ("rate", "slowdown", "steps", "reason"),
    [
        (15e6, 0.3, 16, "94% of the .*; 32 steps would reach 97%, at meetings 2 times as rare;"),
        (3e6, 0.6, 128, "93% of the speed without any exchange; by_bytes"),
    ],
    ids=["a little slower", "much slower"],
)
def test_meetings_beyond_harmless_steps_become_no_rarer_for_a_little_speed(
    rate: float, slowdown: float, steps: int, reason: str
) -> None:
    network = ethernet_profile(4).scaled(4, 1, rate)
    codecs = {"int8": CodecCost(ratio=0.26)}
    found = chosen(network.model_copy(update={"codecs": codecs, "compute_slowdown": slowdown}))
    assert found.strategy is not None
    assert found.strategy.local is not None
    assert found.strategy.local.steps == steps
    assert re.search(reason, found.reason)


def test_a_run_that_meets_rarely_is_no_base_for_predictions() -> None:
    trace = by_hand()
    meta = {**trace.meta, "strategy": {"local": {"steps": 4}}}
    with pytest.raises(TraceError, match="under local"):
        Forecast.of(replace(trace, meta=meta), ethernet_profile(2))
    exchanged = simulate(WORK, CommPlan.of(Strategy(), WORK.gradients), SLOW, 2)
    forecast = Forecast.of(exchanged, SLOW)
    with pytest.raises(StrategyError, match="local"):
        forecast.simulated(of(steps=4), steps=1)
    assert any(one.strategy.local for one in forecast.all())


@pytest.mark.parametrize(
    ("rate", "updates", "reason"),
    [
        (30e6, 300, "300 updates are fewer than 100 meetings of 8 updates"),
        (100e9, None, r"by_bytes 4 .* exchanges gradients at \d+% of the speed"),
    ],
)
def test_it_is_not_chosen_where_it_does_not_pay(
    rate: float, updates: int | None, reason: str
) -> None:
    found = chosen(ethernet_profile(4).scaled(4, 1, rate), updates)
    assert found.strategy is None
    assert re.search(reason, found.reason)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "half_weights"}, "local with precision half_weights"),
        ({"data": {"balance": {}}}, r"local with data\.balance"),
    ],
    ids=["half_weights", "balance"],
)
def test_it_is_not_chosen_beside_what_it_does_not_go_with(
    settings: dict[str, object], words: str
) -> None:
    base = Strategy.load(settings)
    found = choose_meetings(WORK, SLOW, base, rank([base], WORK, SLOW, base))
    assert found.strategy is None
    assert re.search(words, found.reason)


def test_one_rank_meets_nobody() -> None:
    alone = ethernet_profile(2).model_copy(update={"world_size": 1})
    assert choose_meetings(WORK, alone, Strategy(), []).strategy is None


PUBLIC = {
    ("ddp", 1): (0.0, 11.32107),
    ("diloco", 1): (0.0, 8.27935),
    ("diloco", 8): (0.0253, 8.29037),
    ("diloco", 32): (0.02527, 8.29808),
    ("diloco", 128): (0.02534, 8.52587),
    ("localsgd", 1): (0.0, 8.24764),
    ("localsgd", 8): (0.02467, 8.24086),
    ("localsgd", 32): (0.02461, 8.30403),
    ("localsgd", 128): (0.02459, 8.77275),
}
"""Seconds of an update, and of one with an exchange, at 200 Mbit/s: medians of up to three runs on
4 machines with one L40S each, 30,846,720 parameters, NCCL over TCP that tc shapes (Adnan082,
diloco-measured, 2026, Apache-2.0)."""
PARAMETERS, UPDATE, EXCHANGE = 30_846_720, 0.02534, 0.3182
"""Seconds at 5 Gbit/s."""


def test_public_measurements_on_a_slow_link_are_predicted_from_those_on_a_fast_one() -> None:
    fast = Curve.fit([(1024, 3e-4), (4 * PARAMETERS, EXCHANGE)])
    measured = profile({"world": Network(kind="world", ranks=4, all_reduce=fast)})
    none = np.zeros(4)
    work = workload(
        gradients=(Gradient("all", "all", 4 * PARAMETERS),),
        **dict.fromkeys(("data_wait", "other", "forward", "optimizer"), none),
        backward=UPDATE + none,
        ready=UPDATE + np.zeros((4, 1)),
    )
    slow = measured.scaled(4, 1, 200e6)
    errors = []
    for (_, steps), (update, exchange) in PUBLIC.items():
        found = local_seconds(of(steps=steps), work, slow)
        expected = update + (exchange - update) / steps
        errors.append(abs(found / expected - 1))
    assert np.median(errors) < 0.1
