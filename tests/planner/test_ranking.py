"""Candidates and their ranking, on workloads and networks made by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from slipstream.advisor.trace_stats import trace_stats
from slipstream.errors import ClusterError, TraceError
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.contention_fit import read_trace
from slipstream.planner.iteration.model import predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.iteration.traced import traced_strategy
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.costs import CodecCost, HalfSpeed
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.candidates import (
    coded,
    every,
    exact,
    optimal_gather,
    optimal_split,
)
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import MARGIN, rank, what_if
from slipstream.report.runs import RecordedRun, pairs
from slipstream.strategy import ByIndexConfig, Strategy
from slipstream.trace import Trace
from slipstream.trace.event import OWING_CODEC
from tests.planner.networks import MB, ethernet_profile, ring_profile

HALF = {"gradients": {"codec": "half"}}
SIZES = (2 * MB, 40 * MB, 4096, 9 * MB, 4096, 9 * MB, 4096, 2 * MB, 1 * MB, 4096, 64 * 1024)


def workload(ranks: int = 4, sizes: tuple[int, ...] = SIZES, late: float = 0.0) -> Workload:
    """Backward takes 0.5 s, a gradient an equal share; rank r starts ``r * late`` later."""
    one = np.ones(ranks)
    shares = np.linspace(0.5 / len(sizes), 0.5, len(sizes))
    return Workload(
        gradients=tuple(
            Gradient(f"{i // 2}.{'wb'[i % 2]}", str(i // 2), size) for i, size in enumerate(sizes)
        ),
        data_wait=0.01 * one,
        forward=0.2 * one + late * np.arange(ranks),
        backward=0.5 * one,
        ready=np.tile(shares, (ranks, 1)),
        optimizer=0.05 * one,
        other=0.01 * one,
        samples=8 * one,
    )


_random = random.Random(1)
UNEVEN = (
    workload(sizes=tuple(int(10 ** _random.uniform(3, 7.6)) for _ in range(30))),
    ethernet_profile(gigabits=2, latency=0.06),
)
SITUATIONS = {
    "uneven gradients, slow starts": UNEVEN,
    "four ranks": (workload(), ethernet_profile()),
    "contention": (workload(late=0.02), ethernet_profile(slowdown=0.5)),
    "a fast network": (workload(), ethernet_profile(gigabits=100)),
    "a slow network": (workload(), ethernet_profile(gigabits=0.1)),
    "one gradient": (workload(sizes=(MB,)), ethernet_profile()),
    "two ranks, tiny gradients": (workload(2, (8, 8, 8)), ethernet_profile(2)),
}


@pytest.mark.parametrize(("work", "network"), SITUATIONS.values(), ids=SITUATIONS)
def test_candidates_start_with_the_base_and_are_all_different(work, network) -> None:
    base = Strategy.load({"gradients": {"split": "per_layer"}, "trace": {"steps": 7}})
    strategies = exact(work, network, base)
    assert strategies[0] == base
    assert {strategy.trace.steps for strategy in strategies} == {7}
    assert {strategy.gradients.accumulate for strategy in strategies} == {1}
    does = {
        (plan_segments(work.gradients, s.gradients.split), s.gradients.overlap) for s in strategies
    }
    assert len(does) == len(strategies)
    if len(work.gradients) == 1:
        assert [s.gradients.overlap for s in strategies] == [True, False]
    else:
        kinds = {strategy.gradients.split.kind for strategy in strategies}
        assert kinds >= {"per_layer", "per_gradient", "single"}


@pytest.mark.parametrize(("work", "network"), SITUATIONS.values(), ids=SITUATIONS)
def test_the_optimal_split_is_as_fast_as_any_fixed_one_with_fewer_segments(work, network) -> None:
    predictions = rank(exact(work, network, Strategy()), work, network)
    best = min(predictions, key=lambda one: one.seconds)
    [computed] = rank(
        [Strategy.load({"gradients": {"split": optimal(work, network)}})], work, network
    )
    assert computed.seconds <= best.seconds * 1.002
    no_worse = [one for one in predictions if one.seconds <= computed.seconds]
    assert all(one.segments >= computed.segments for one in no_worse)


def optimal(work: Workload, network: NetworkProfile) -> dict[str, object]:
    return optimal_split(work, network, exact(work, network, Strategy())).document()


@pytest.mark.parametrize(("latency", "is_first"), {0.09: True, 0.01: False}.items())
def test_a_computed_split_comes_first_only_where_it_is_faster_by_the_margin(
    latency: float, is_first: bool
) -> None:
    work, network = UNEVEN[0], ethernet_profile(gigabits=1, latency=latency)
    ranked = rank(exact(work, network, Strategy()), work, network)
    fastest = min(ranked, key=lambda one: one.seconds)
    assert isinstance(fastest.strategy.gradients.split, ByIndexConfig)
    other = min(one.seconds for one in ranked if one.segments != fastest.segments)
    assert (fastest.seconds * (1 + MARGIN) < other) == is_first
    assert (ranked[0] == fastest) == is_first
    assert fastest.strategy == Strategy.from_yaml(fastest.strategy.to_yaml())
    own = rank([one.strategy for one in ranked], work, network, fastest.strategy)
    assert own[0].strategy == fastest.strategy  # in use already


def test_what_changes_the_batch_is_only_among_them_if_asked_for() -> None:
    work, network = SITUATIONS["a slow network"]
    base = Strategy.load({"gradients": {"accumulate": 2}})
    predictions = rank(every(work, network, base), work, network, base)
    told = {(one.strategy.gradients.accumulate, one.exactness) for one in predictions}
    larger = {(4, "reordered, batch x2"), (8, "reordered, batch x4")}
    assert told == {(2, "reordered"), (2, "lossy"), *larger}  # lossy: 16-bit weights
    assert predictions[0].strategy.gradients.accumulate == 8  # least exchange a batch
    for faster, slower in pairwise(predictions):
        assert faster.per_batch <= slower.per_batch * 1.002


def test_a_prediction_says_what_it_takes_and_gives() -> None:
    work, network = SITUATIONS["four ranks"]
    [one] = rank([Strategy.load("sequential")], work, network)
    exchange = network.groups("world").all_reduce.seconds(sum(SIZES))
    assert one.seconds == pytest.approx(0.77 + exchange, rel=0.02)
    assert one.samples_per_second == pytest.approx(32 / one.seconds)
    assert one.efficiency == pytest.approx(0.77 / one.seconds)
    assert one.memory_bytes == sum(SIZES) + 4 * len(SIZES)
    assert (one.segments, one.exactness) == (1, "reordered")


def test_accumulation_is_compute_several_times_and_one_exchange() -> None:
    work, network = SITUATIONS["four ranks"]
    once, twice = (
        rank([Strategy.load({"gradients": {"accumulate": n, "overlap": False}})], work, network)[0]
        for n in (1, 2)
    )
    assert twice.seconds - once.seconds == pytest.approx(0.71)
    assert twice.efficiency == pytest.approx(1.48 / twice.seconds)
    assert twice.samples_per_second == pytest.approx(64 / twice.seconds)


def test_more_nodes_cost_and_more_bandwidth_pays() -> None:
    work, network = SITUATIONS["four ranks"]
    by_nodes = what_if(Strategy(), work, network, nodes=(1, 2, 8, 64, 512))
    assert [point.ranks for point in by_nodes] == [1, 2, 8, 64, 512]
    efficiency = [point.prediction.efficiency for point in by_nodes]
    assert efficiency[0] == pytest.approx(1)
    assert all(fewer >= more for fewer, more in pairwise(efficiency))
    rates = (1e8, 1e9, 1e10, 1e11)
    by_rate = what_if(Strategy(), work, network, nodes=(4,), rates=rates)
    assert [point.rate for point in by_rate] == list(rates)
    speed = [point.prediction.samples_per_second for point in by_rate]
    assert all(slower < faster for slower, faster in pairwise(speed))
    assert speed[1] == pytest.approx(
        rank([Strategy()], work, network)[0].samples_per_second, rel=0.05
    )


def test_a_trace_is_planned_from_as_it_was_recorded() -> None:
    work, network = SITUATIONS["contention"]
    strategy = Strategy.load({"gradients": {"split": "per_layer"}, "trace": {"steps": 3}})
    trace = simulate(work, CommPlan.of(strategy, work.gradients), network, steps=3)
    trace = Trace(trace.events, trace.meta | {"strategy": strategy.document(full=True)})
    assert traced_strategy(trace) == Strategy.load({"gradients": {"split": "per_layer"}})
    read_back, fitted = read_trace(trace, network)
    [replayed] = rank([strategy], read_back, fitted)
    [asked] = rank([strategy], work, network)
    assert replayed.seconds == pytest.approx(asked.seconds, rel=0.02)
    assert replayed.samples_per_second == pytest.approx(asked.samples_per_second, rel=0.02)
    with pytest.raises(ClusterError, match="8 ranks"):
        read_trace(trace, ethernet_profile(8))


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_predicted_trace_says_all_of_its_strategy(codec: str | None) -> None:
    work, network = SITUATIONS["contention"]
    transport = {"kind": "sharded", "replicated": 0.33} if codec is None else "flat"
    base = Strategy.load({"gradients": {"transport": transport}, "precision": "autocast"})
    trace = simulate(work, CommPlan.of(base, work.gradients), network, steps=3)
    traced = Trace(trace.events, trace.meta | {"strategy": base.document(full=True)})
    network = network.model_copy(update={"codecs": {"int8": CodecCost(ratio=0.25)}})
    future = Forecast.of(traced, network).simulated(base.with_gradients(codec=codec), 3)
    measured = RecordedRun.of("measured", traced, predicted=False)
    predicted = RecordedRun.of("predicted", future, predicted=True)
    assert bool(pairs([measured, predicted])) == (codec is None)
    assert (codec or "sharded") in predicted.strategy


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_traces_of_ranks_that_share_a_model_are_refused(axis: str) -> None:
    work, network = SITUATIONS["four ranks"]
    trace = simulate(work, CommPlan.of(Strategy(), work.gradients), network, 2)
    shared = Strategy.load({"parallel": {axis: {"ranks": 2}}}).document(full=True)
    recorded = replace(trace, meta={**trace.meta, "strategy": shared})
    with pytest.raises(TraceError, match=r"ranks that share a model \(parallel\)"):
        Forecast.elsewhere(recorded, network)
    assert trace_stats(recorded, network).what_if is None


def test_a_split_that_was_found_in_the_run_is_the_one_that_its_trace_shows() -> None:
    work, network = SITUATIONS["four ranks"]
    trace = simulate(work, CommPlan((3, 7, len(SIZES))), network)
    meta = trace.meta | {"strategy": {"gradients": {"split": "optimal", "overlap": False}}}
    strategy = traced_strategy(Trace(trace.events, meta))
    assert strategy.gradients.split == ByIndexConfig(last=(2, 6, len(SIZES) - 1))
    assert not strategy.gradients.overlap


def test_the_trace_of_one_process_is_planned_for_all_ranks_of_the_cluster() -> None:
    alone = workload(1)
    trace = simulate(
        alone, CommPlan.of(Strategy(), alone.gradients), ethernet_profile(4).scaled(1, 1, None)
    )
    work, network = read_trace(trace, ethernet_profile(4))
    assert work.num_ranks == network.world_size == 4
    [one] = rank([Strategy.load("sequential")], work, network)
    exchange = network.groups("world").all_reduce.seconds(sum(SIZES))
    assert one.seconds == pytest.approx(0.77 + exchange, rel=0.05)


def test_labels_tell_strategies_apart() -> None:
    work, network = SITUATIONS["four ranks"]
    strategies = every(work, network, Strategy())
    assert len({label(strategy) for strategy in strategies}) == len(strategies)


def test_half_weights_are_a_candidate_that_sends_half() -> None:
    work, network = SITUATIONS["a slow network"]
    network = network.model_copy(update={"codecs": {"half": CodecCost(ratio=0.5)}})
    half, coded = Strategy.load({"precision": "half_weights"}), Strategy.load(HALF)
    strategies = every(work, network, Strategy())
    assert {half, coded} < set(strategies)
    assert half not in exact(work, network, Strategy())
    seconds = {one.strategy: one.seconds for one in rank(strategies, work, network)}
    assert seconds[half] == pytest.approx(seconds[coded])
    own = [replace(g, dtype="bfloat16") if n % 2 else g for n, g in enumerate(work.gradients)]
    [codec] = [CommPlan.of(half, own).codec]
    assert codec is not None
    assert codec.ratio == pytest.approx(0.5 + 0.5 * sum(SIZES[1::2]) / sum(SIZES))
    already = [replace(g, dtype="bfloat16") for g in work.gradients]
    assert CommPlan.of(half, already).codec == CodecCost(ratio=1.0)
    assert all(one.precision == half.precision for one in exact(work, network, half))


def test_half_weights_compute_as_fast_as_was_measured() -> None:
    """Both ways: from a trace in fp32, and from one in 16 bits."""
    work, network = SITUATIONS["a fast network"]
    half = Strategy.load({"precision": "half_weights"})
    speed = HalfSpeed(dense=4.0, convolutional=2.0)
    measured = network.model_copy(update={"half_speed": speed})

    def seconds(strategy: Strategy, work: Workload, network: NetworkProfile) -> float:
        return rank([strategy], work, network)[0].seconds

    convolutions = replace(work, convolutions=1.0)
    parts = {name: getattr(work, name) / 2 for name in ("forward", "backward", "ready")}
    quick = replace(work, **parts)
    assert seconds(half, convolutions, measured) == pytest.approx(seconds(half, quick, network))
    assert seconds(half, work, measured) < seconds(half, convolutions, measured)
    assert seconds(Strategy(), work, measured) == seconds(Strategy(), work, network)
    recorded = replace(convolutions, half=True)
    assert seconds(half, recorded, measured) == seconds(half, convolutions, network)
    mixed = replace(work, convolutions=0.5)
    assert mixed.computed(half=True, speed=speed).forward == pytest.approx(work.forward * 3 / 8)
    back = mixed.computed(half=True, speed=speed).computed(half=False, speed=speed)
    assert back.ready == pytest.approx(mixed.ready)


def test_codecs_are_candidates_and_priced_for_the_whole_training() -> None:
    work, network = SITUATIONS["a slow network"]
    costs = {kind: CodecCost(ratio=0.03) for kind in ("onebit", "dgc")}
    network = network.model_copy(update={"codecs": {**costs, "int8": CodecCost(ratio=0.26)}})
    kinds = {kind: Strategy.load({"gradients": {"codec": kind}}) for kind in network.codecs}
    strategies = every(work, network, Strategy())
    assert set(kinds.values()) < set(strategies)
    single = {"gradients": {"codec": "onebit", "split": "single"}}
    assert Strategy.load(single) in strategies
    assert kinds["dgc"] not in every(replace(work, sgd=False), network, Strategy())
    assert not set(kinds.values()) & set(exact(work, network, Strategy()))
    shardable = replace(work, shardable=True)
    whole = [
        *every(shardable, network, Strategy.load({"gradients": {"transport": "sharded"}})),
        *every(shardable, network, kinds["dgc"]),
    ]
    codecs_of_shards = {
        getattr(one.gradients.codec, "kind", None)
        for one in whole
        if one.gradients.transport.kind == "sharded"
    }
    assert codecs_of_shards == {None, "onebit", "int8"}

    def seconds(updates: int | None) -> dict[str, float]:
        ranked = rank([Strategy(), *kinds.values()], work, network, updates=updates)
        codecs = [one.strategy.gradients.codec for one in ranked]
        pairs = zip(codecs, ranked, strict=True)
        return {codec.kind if codec else "none": one.seconds for codec, one in pairs}

    memory = {
        str(p.strategy.gradients.codec and p.strategy.gradients.codec.kind): p.memory_bytes
        for p in rank([Strategy(), *kinds.values()], work, network)
    }
    whole_bytes = sum(SIZES)
    assert memory["int8"] == memory["None"]  # keeps nothing by default
    assert memory["onebit"] - memory["None"] == pytest.approx(2 * 1.25 * whole_bytes)
    assert memory["dgc"] - memory["None"] == 4 * whole_bytes
    at_work, whole = seconds(None), seconds(4000)
    assert whole["int8"] == at_work["int8"]
    assert whole["onebit"] == pytest.approx(at_work["none"] / 4 + at_work["onebit"] * 3 / 4)
    assert next(iter(seconds(1000))) == "int8"
    assert seconds(1000)["onebit"] == at_work["none"]


def with_faster(transport: str, network: NetworkProfile) -> NetworkProfile:
    """A transport costs half of the backend's all-reduce."""
    world = network.networks["world"]
    priced = world.model_copy(update={f"{transport}_all_reduce": world.reduce_scatter})
    return network.model_copy(update={"networks": {"world": priced}})


def test_transports_whose_cost_is_known_are_candidates() -> None:
    kind = "direct"
    work, network = SITUATIONS["four ranks"]
    assert {one.gradients.transport.kind for one in exact(work, network, Strategy())} == {"flat"}
    faster = with_faster(kind, network)
    strategies = exact(work, faster, Strategy())
    assert strategies[0] == Strategy()
    best = rank(strategies, work, faster)[0]
    assert best.strategy.gradients.transport.kind == kind
    assert label(best.strategy).endswith(f", {kind}")
    base = Strategy.load({"gradients": {"transport": kind}})
    from_faster = exact(work, faster, base)
    assert from_faster[0] == base
    assert {one.gradients.transport.kind for one in from_faster} == {"flat", kind}


def test_what_a_training_has_not_chosen_yet_is_what_it_begins_with() -> None:
    work, network = SITUATIONS["four ranks"]
    searching = Strategy.load({"gradients": {"transport": "auto"}})
    trace = simulate(work, CommPlan.of(searching, work.gradients), network)
    meta = trace.meta | {"strategy": searching.document(full=True)}
    assert traced_strategy(Trace(trace.events, meta)) == Strategy()
    assert CommPlan.of_trace(Trace(trace.events, meta)).transport == "flat"


def test_the_optimal_gathers_are_predicted_to_be_faster() -> None:
    work, network = UNEVEN
    count = len(work.gradients)
    best = tuple(last + 1 for last in optimal_gather(work, network).last)
    seconds = {
        gather: predict(work, CommPlan((count,), transport="sharded", gather=gather), network)
        for gather in (best, (count,), tuple(range(1, count + 1)))
    }
    assert min(seconds, key=lambda gather: seconds[gather]) == best


def test_a_sharded_strategy_is_priced_with_its_own_gathers() -> None:
    work, network = SITUATIONS["four ranks"]
    transport = {"kind": "sharded", "gather": {"kind": "by_index", "last": [4, 10]}}
    strategy = Strategy.load({"gradients": {"transport": transport, "split": "per_layer"}})
    plan = CommPlan.of(strategy, work.gradients)
    assert (plan.transport, plan.gather) == ("sharded", (5, 11))
    trace = simulate(work, plan, network)
    assert CommPlan.of_trace(trace) == plan
    assert exact(work, network, strategy)[0] == strategy


def test_hierarchical_is_proposed_where_hosts_have_several_ranks() -> None:
    for hosts, ranks_per_host, proposed in ((2, 2, True), (4, 1, False), (1, 4, False)):
        network = ring_profile(hosts, ranks_per_host)
        kinds = {s.gradients.transport.kind for s in exact(workload(), network, Strategy())}
        assert kinds == {"flat", "direct"} | ({"hierarchical"} if proposed else set())


def test_what_the_framework_of_a_training_refuses_is_no_candidate() -> None:
    work, network = UNEVEN
    refused = replace(work, not_proposed=frozenset({"gradients.accumulate", "precision"}))
    exacts = {label(one) for one in exact(work, network, Strategy())}
    for one, more in ((work, True), (refused, False)):
        others = [s for s in every(one, network, Strategy()) if label(s) not in exacts]
        assert any(s.gradients.accumulate > 1 for s in others) is more
        assert any(s.precision is not None for s in others) is more


def test_under_a_loss_scale_of_the_framework_no_codec_that_owes_is_a_candidate() -> None:
    work, network = UNEVEN
    costs = {kind: CodecCost(ratio=0.25) for kind in ("int8", "onebit", "powersgd")}
    network = network.model_copy(update={"codecs": costs})
    scaled = replace(work, not_proposed=frozenset({OWING_CODEC}))
    kinds = [
        [s.gradients.codec.kind for s in coded(Strategy(), one, network)] for one in (work, scaled)
    ]
    assert kinds == [[*costs], ["int8"]]
