"""Iterations computed by hand, laws that hold for all of them, and traces like recorded ones."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from rich.console import Console

from slipstream.analysis.breakdown import breakdown
from slipstream.analysis.summary import summary
from slipstream.errors import ClusterError, StrategyError
from slipstream.gradients.layout import Gradient
from slipstream.planner.iteration.model import predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import SHOWN_RANKS, simulate
from slipstream.planner.iteration.traced import workload_of
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.costs import CodecCost
from slipstream.strategy import Strategy
from slipstream.trace import chrome
from slipstream.trace.timeline import timeline
from tests.planner.networks import MB, contention, linear_profile, ring_profile
from tests.planner.workloads import random_workload, workload

ALONE = 0.86  # of the workload made by hand: other, wait, forward, backward, optimizer
PASS = 0.81  # wait, forward, backward
EACH = (1, 2, 3, 4, 5, 6)
SMALLER = CodecCost(ratio=0.5, encode=0.01 / MB, decode=0.02 / MB, startup=0.005)

BY_HAND = {
    "one segment hides nothing": (workload(), CommPlan((6,)), linear_profile(), ALONE + 0.6),
    "a segment each hides all but one": (workload(), CommPlan(EACH), linear_profile(), ALONE + 0.1),
    "without overlap": (workload(), CommPlan(EACH, overlap=False), linear_profile(), ALONE + 0.6),
    "latency is not shared": (
        workload(count=2),
        CommPlan((1, 2), overlap=False),
        linear_profile(latency=0.05),
        ALONE + 0.05 + 0.2,
    ),
    "latency hides, too": (workload(), CommPlan(EACH), linear_profile(latency=0.02), ALONE + 0.12),
    "a network too slow": (
        workload(),
        CommPlan(EACH),
        linear_profile(seconds=0.2),
        ALONE - 0.5 + 1.2,
    ),
    "one rank": (workload(1), CommPlan((6,)), linear_profile(1), ALONE),
    "the last rank counts": (
        workload(late=0.1),
        CommPlan((6,)),
        linear_profile(),
        ALONE + 0.3 + 0.6,
    ),
    "accumulation": (
        workload(),
        CommPlan((6,), accumulate=3),
        linear_profile(),
        ALONE + 2 * PASS + 0.6,
    ),
    "readers that cannot keep up": (
        workload(reading=2.0 * np.ones(4)),
        CommPlan((6,)),
        linear_profile(),
        2.0,
    ),
    "readers that cannot keep up with accumulation": (
        workload(reading=0.9 * np.ones(4)),
        CommPlan((6,), accumulate=4),  # 3.35 without them; the queue fills beside the exchange
        linear_profile(seconds=0.01),
        4 * 0.9,
    ),
    "readers that keep up": (
        workload(reading=ALONE * np.ones(4)),
        CommPlan((6,)),
        linear_profile(),
        ALONE + 0.6,
    ),
    "one rank's readers cannot keep up": (
        workload(reading=np.array([0.0, 0.0, 2.0, 0.0])),
        CommPlan((6,)),
        linear_profile(),
        2.0,
    ),
    "recomputation": (
        workload(),
        CommPlan((6,), recompute_share=0.5),
        linear_profile(),
        ALONE + 0.1 + 0.6,
    ),
    "buffers go first": (
        workload(count=1, buffers_bytes=8 * MB),
        CommPlan((1,)),
        linear_profile(),
        ALONE - 0.6 + 0.8 + 0.1,
    ),
    "compute slowed by an exchange": (
        workload(count=2),
        CommPlan((1, 2)),
        linear_profile(compute_slowdown=1.0),
        ALONE + 0.05 + 0.1,
    ),
    "an exchange slowed by compute": (
        workload(count=2),
        CommPlan((1, 2)),
        linear_profile(seconds=0.2, exchange_slowdown=1.0),
        ALONE + 0.05 + 0.2,
    ),
    "two dtypes are two exchanges": (
        workload(
            count=2,
            gradients=(Gradient("a", "", MB), Gradient("b", "", MB, "bfloat16")),
        ),
        CommPlan((2,)),
        linear_profile(latency=0.05),
        ALONE + 0.05 + 0.2,
    ),
    "a codec": (
        workload(),
        CommPlan((6,), codec=SMALLER),
        linear_profile(),
        ALONE + 0.065 + 0.3 + 0.125,
    ),
    "a codec without overlap": (
        workload(),
        CommPlan((6,), codec=SMALLER, overlap=False),
        linear_profile(),
        ALONE + 0.065 + 0.3 + 0.125,
    ),
    "sharded: parameters come back first": (
        workload(),
        CommPlan((6,), transport="sharded"),
        linear_profile(),
        0.3 + 0.2 + 0.6 + 0.3 + 0.03 / 4,
    ),
    "sharded: the last gather hides": (
        workload(count=3),
        CommPlan((1, 2, 3), transport="sharded"),
        linear_profile(seconds=0.4),
        0.6 + 0.2 / 3 + 0.6 + 0.2 + 0.03 / 4,  # two land at 0.4, the third at 0.6
    ),
}


@pytest.mark.parametrize(("work", "plan", "network", "seconds"), BY_HAND.values(), ids=BY_HAND)
def test_iterations_told_by_hand(work, plan, network, seconds) -> None:
    assert predict(work, plan, network) == pytest.approx(seconds)
    durations = [one.duration for one in timeline(simulate(work, plan, network, 3).events)]
    assert durations == pytest.approx([seconds] * len(durations))


def spans(trace, name, rank=0):
    """Start and end of the spans of one name, from the start of backward."""
    events = [event for event in trace.events if event.rank == rank]
    zero = next(event.start for event in events if event.name == "backward")
    spans = [(e.start - zero, e.end - zero) for e in events if e.name == name]
    return spans[0] if len(spans) == 1 else spans


def test_two_exchanges_share_the_network_and_the_third_waits() -> None:
    trace = simulate(workload(count=3), CommPlan((1, 2, 3), overlap=False), linear_profile())
    assert spans(trace, "allreduce1") == pytest.approx((0.6, 0.8))
    assert spans(trace, "allreduce2") == pytest.approx((0.6, 0.8))
    assert spans(trace, "allreduce3") == pytest.approx((0.8, 0.9))


def test_an_exchange_waits_for_the_last_rank_and_is_slowed_by_those_that_compute() -> None:
    work = workload(2, count=2, late=0.4)  # backward 0.6 and 1.0 s; ready at 0.3 and 0.5
    trace = simulate(work, CommPlan((1, 2)), linear_profile(2, exchange_slowdown=1.0))
    # 0.1 s at half the speed while both compute, then 0.05 s at two thirds
    assert spans(trace, "allreduce1", rank=0) == pytest.approx((0.3, 0.675))
    assert spans(trace, "allreduce1", rank=1) == pytest.approx((0.5, 0.675))
    assert spans(trace, "allreduce2", rank=0) == pytest.approx((0.6, 1.1))


def test_hierarchical_goes_through_both_networks_one_segment_behind_the_other() -> None:
    network = ring_profile(4, 2, compute_slowdown=0.0, exchange_slowdown=0.0)
    intra, inter = network.groups("intra"), network.groups("inter")
    stages = (
        intra.reduce_scatter.seconds(6 * MB),
        inter.all_reduce.seconds(3 * MB),
        intra.all_gather.seconds(6 * MB),
    )
    work = workload(8)
    hierarchical = CommPlan((6,), transport="hierarchical")
    assert predict(work, hierarchical, network) == pytest.approx(ALONE + sum(stages))
    staggered = predict(work, CommPlan((2, 6), False, "hierarchical"), network)
    assert ALONE + stages[1] < staggered < ALONE + sum(stages)
    # where there is nothing to sum inside hosts, and where there is nothing else
    for hosts, ranks_per_host, same in ((8, 1, "direct"), (1, 8, "flat")):
        network = ring_profile(hosts, ranks_per_host)
        plain = predict(work, CommPlan((6,), transport=same), network)
        assert predict(work, hierarchical, network) == plain


def test_gathers_have_cuts_of_their_own() -> None:
    work, network = workload(count=3), linear_profile(seconds=0.4)
    together = predict(work, CommPlan((1, 2, 3), transport="sharded", gather=(3,)), network)
    apart = predict(work, CommPlan((1, 2, 3), transport="sharded", gather=(1, 2, 3)), network)
    assert apart == predict(work, CommPlan((1, 2, 3), transport="sharded"), network)
    assert together == pytest.approx(0.6 + 0.2 + 0.6 + 0.2 + 0.03 / 4)
    trace = simulate(work, CommPlan((3,), transport="sharded", gather=(1, 3)), network)
    gathers = [e for e in trace.events if e.args.get("collective") == "all_gather" and not e.rank]
    assert {(e.name, e.args["bytes"]) for e in gathers} == {
        ("allreduce2", MB),
        ("allreduce3", 2 * MB),
    }
    with pytest.raises(StrategyError, match=r"gather is \(2,\)"):
        CommPlan((3,), transport="sharded", gather=(2,))


DIRECT = contention(exchange=0.25)


def test_direct_sends_have_a_curve_and_a_contention_of_their_own() -> None:
    slowed = linear_profile(exchange_slowdown=1.0)
    world = slowed.networks["world"]
    half = world.model_copy(update={"direct_all_reduce": world.reduce_scatter})
    network = slowed.model_copy(update={"networks": {"world": half}, "direct": DIRECT})
    work, plans = workload(count=2), [CommPlan((1, 2)), CommPlan((1, 2), transport="direct")]
    flat, direct = (simulate(work, plan, network) for plan in plans)
    assert spans(flat, "allreduce1") == pytest.approx((0.3, 0.5))  # 0.1 s, twice as long
    assert spans(direct, "allreduce1") == pytest.approx((0.3, 0.3 + 0.05 * 1.25))
    with pytest.raises(ClusterError, match="direct_all_reduce was not measured"):
        predict(work, plans[1], slowed)


@pytest.mark.parametrize(("crowd", "seconds"), [(0.0, 0.1), (1.0, 0.2)])
def test_a_crowd_of_direct_sends_fills_less_of_the_link(crowd: float, seconds: float) -> None:
    linear = linear_profile()
    world = linear.networks["world"]
    curves = {"direct_all_reduce": world.all_reduce, "all_reduce": world.reduce_scatter}
    twice_as_fast = world.model_copy(update=curves)
    direct = contention().model_copy(update={"crowd_slowdown": crowd})
    network = linear.model_copy(update={"networks": {"world": twice_as_fast}, "direct": direct})
    # two exchanges of 0.1 s, each of which fills half of the link alone
    trace = simulate(
        workload(count=2), CommPlan((1, 2), overlap=False, transport="direct"), network
    )
    start, end = spans(trace, "allreduce2")
    assert end - start == pytest.approx(seconds)


def test_shared_memory_costs_what_was_measured_or_what_flat_does() -> None:
    work, network = workload(), linear_profile(hosts=1, ranks_per_host=4)
    plan = CommPlan((6,), transport="shared_memory")
    assert predict(work, plan, network) == predict(work, CommPlan((6,)), network)
    world = network.networks["world"]
    measured = world.model_copy(update={"shared_memory_all_reduce": world.reduce_scatter})
    faster = network.model_copy(update={"networks": {"world": measured}})
    assert predict(work, plan, faster) == pytest.approx(ALONE + 0.3)
    assert measured.fastest("all_gather") == world.fastest("all_gather")  # no memory is a link


plans = st.tuples(
    st.sets(st.integers(1, 11), max_size=5), st.booleans(), st.sampled_from([1, 1, 1, 3])
)


def a_plan(drawn: tuple[set[int], bool, int], **changes: Any) -> CommPlan:
    cuts, overlap, accumulate = drawn
    return CommPlan((*sorted(cuts), 12), overlap, accumulate=accumulate, **changes)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 5), plans)
def test_without_latency_and_contention_it_is_the_serial_channel(seed, ranks, drawn) -> None:
    work, plan, network = random_workload(seed, ranks, 12), a_plan(drawn), linear_profile(ranks)
    if ranks == 1 or work.buffers_bytes:
        return
    begins = work.optimizer + work.other + plan.accumulate * (work.data_wait + work.forward)
    begins = begins + (plan.accumulate - 1) * work.backward
    ready = work.ready if plan.overlap else np.tile(work.backward[:, None], 12)
    last = np.maximum((begins + work.backward).max(), 0)
    ready = (begins[:, None] + ready).max(axis=0)
    end = 0.0
    for first, stop in pairwise((0, *plan.cuts)):  # one exchange after the other
        size = sum(gradient.num_bytes for gradient in work.gradients[first:stop])
        cost = network.groups("world").all_reduce.seconds(size)
        end = max(end, ready[first:stop].max()) + cost
    assert predict(work, plan, network) == pytest.approx(max(end, last), rel=1e-6)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 5), plans, st.floats(0, 1.5), st.floats(0, 2))
def test_a_trace_read_back_predicts_itself(tmp_path_factory, seed, ranks, drawn, kappa, mu) -> None:
    network = linear_profile(ranks, latency=0.003, compute_slowdown=kappa, exchange_slowdown=mu)
    work, plan = random_workload(seed, ranks, 12), a_plan(drawn)
    seconds = predict(work, plan, network)
    path = tmp_path_factory.getbasetemp() / "predicted.json"
    chrome.write(simulate(work, plan, network, 3), path)
    trace = chrome.read(path)
    assert CommPlan.of_trace(trace) == plan
    again = predict(workload_of(trace, network), plan, network)
    assert again == pytest.approx(seconds, rel=1e-5)
    assert all(one.duration == pytest.approx(seconds, rel=1e-6) for one in timeline(trace.events))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    plans,
    st.sampled_from(["flat", "hierarchical", "sharded"]),
    st.sampled_from([None, SMALLER]),
    st.floats(0, 1),
)
@example(193237, ({1, 2, 3, 4}, True, 1), "hierarchical", SMALLER, 1.0)  # settles after 30 steps
def test_every_plan_takes_at_least_its_compute_and_leaves_sound_events(
    seed, drawn, transport, codec, recompute_share
) -> None:
    network = ring_profile(2, 2)
    work = random_workload(seed, 4, 12)
    plan = a_plan(drawn, transport=transport, codec=codec, recompute_share=recompute_share)
    seconds = predict(work, plan, network)
    passes = work.data_wait + (1 + recompute_share) * work.forward + work.backward
    assert seconds >= (plan.accumulate * passes + work.other).max()
    # ranks that decode late catch up step by step
    trace = simulate(work, plan, network, 2 if codec is None else 12)
    segments = len(plan.cuts) * (2 if transport == "sharded" else 1)
    iterations = timeline(trace.events)
    exact, settled = (1e-6, iterations) if codec is None else (1e-3, iterations[-4:])
    assert max(one.duration for one in settled) == pytest.approx(seconds, rel=exact)
    for one in iterations:
        parts = breakdown(one).parts
        spent = (parts.data_wait, parts.forward, parts.backward, parts.exposed, parts.optimizer)
        assert sum(spent) + parts.other == pytest.approx(one.duration)
        assert sum(e.name.startswith("allreduce") for e in one.exchanges) == segments
        backward = [event for event in one.events if event.name == "backward"]
        assert len(backward) == plan.accumulate
        offsets = backward[-1].args["gradients_ready"]
        assert all(0 <= at <= backward[-1].duration + 1e-9 for at in offsets)
        for event in one.events:
            assert one.start - 1e-9 <= event.start <= event.end <= one.end + 1e-9


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), plans, st.floats(1, 4))
def test_a_slower_network_is_never_better_and_ranks_have_no_order(seed, drawn, factor) -> None:
    work, plan = random_workload(seed, 4, 12), a_plan(drawn)
    seconds = predict(work, plan, linear_profile())
    assert predict(work, plan, linear_profile(seconds=0.1 * factor)) >= seconds - 1e-9
    names = ("data_wait", "forward", "backward", "ready", "optimizer", "other", "samples")
    turned = {name: getattr(work, name)[::-1] for name in names}
    fields = {"gradients": work.gradients, "buffers_bytes": work.buffers_bytes}
    assert predict(Workload(**turned, **fields), plan, linear_profile()) == pytest.approx(seconds)


def test_a_simulated_trace_reads_like_a_recorded_one() -> None:
    plan = CommPlan.of(Strategy.load({"gradients": {"split": "per_layer"}}), workload().gradients)
    trace = simulate(workload(), plan, linear_profile(), 2)
    assert trace.meta["predicted"] is True
    assert trace.meta["segments"] == [{"bytes": MB, "gradients": [f"{i}.weight"]} for i in range(6)]
    strategy = Strategy.load(trace.meta["strategy"])
    assert CommPlan.of(strategy, workload().gradients) == plan
    first = next(event for event in trace.events if event.name == "allreduce1")
    assert first.args["bytes"] == MB
    assert first.args["ready"] == pytest.approx(first.start)
    assert {e.args["samples"] for e in trace.events if e.name == "iteration"} == {8}
    console = Console(width=100, file=io.StringIO())
    console.print(summary(trace, per_rank=True))


def test_thousands_of_ranks_are_simulated_and_the_slowest_is_among_those_shown() -> None:
    work = random_workload(5, 4096, 161)
    slowest = int(
        np.argmax(work.optimizer + work.other + work.data_wait + work.forward + work.backward)
    )
    plan = CommPlan((*range(16, 161, 16), 161), transport="hierarchical")
    trace = simulate(work, plan, ring_profile(512, 8))
    shown = {event.rank for event in trace.events}
    assert trace.meta["world_size"] == len(trace.meta["hosts"]) == 4096
    assert shown == set(trace.meta["ranks"])
    assert len(shown) == SHOWN_RANKS
    assert {0, 1, 2} < shown
    assert slowest in shown or slowest < SHOWN_RANKS


def test_few_profiles_serve_any_number_of_ranks() -> None:
    work = workload(3, late=0.05)
    one_host = [predict(work, CommPlan((6,)), linear_profile(ranks)) for ranks in (3, 6, 4096)]
    assert one_host == pytest.approx([one_host[0]] * 3)


def test_a_plan_for_another_model_or_a_network_not_measured_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"last cut is \(5,\), but there are 6 gradients"):
        predict(workload(), CommPlan((5,)), linear_profile())
    with pytest.raises(ClusterError, match=r"networks\.intra was not measured"):
        predict(
            workload(),
            CommPlan((6,), transport="hierarchical"),
            linear_profile(hosts=2, ranks_per_host=2),
        )
    for wrong in ({"cuts": (3, 2)}, {"cuts": (0, 6)}, {"cuts": (6,), "accumulate": 0}):
        with pytest.raises(StrategyError, match="allowed"):
            CommPlan(**wrong)


def test_cuts_follow_the_segments() -> None:
    sizes = [gradient.num_bytes for gradient in workload().gradients]
    plan = CommPlan.of(
        Strategy.load({"gradients": {"split": {"kind": "by_layers", "layers": 4}}}),
        workload().gradients,
    )
    assert [sum(sizes[i:j]) for i, j in pairwise((0, *plan.cuts))] == [4 * MB, 2 * MB]
