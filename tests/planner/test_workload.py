"""Workloads read from traces: contention out, ready times interpolated, bad traces refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from slipstream.errors import ClusterError, TraceError
from slipstream.gradients.layout import Gradient
from slipstream.planner.iteration.model import predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.iteration.traced import workload_of
from slipstream.planner.network.costs import HalfSpeed
from slipstream.trace.event import Event, Trace
from tests.planner.networks import MB, linear_profile
from tests.planner.workloads import random_workload, workload

NAMES = ("data_wait", "forward", "backward", "ready", "optimizer", "other", "samples")
THIRDS = CommPlan((2, 4, 6))


def edited(trace: Trace, change: Callable[[Event], Event | None]) -> Trace:
    """The trace with ``change(event)`` for each event, without those for which it is None."""
    events = tuple(new for event in trace.events if (new := change(event)) is not None)
    return Trace(events, trace.meta)


def without_ready_times(event: Event) -> Event:
    args = {name: value for name, value in event.args.items() if name != "gradients_ready"}
    return replace(event, args=args)


def moved(event: Event, step: int, seconds: float) -> Event:
    args = dict(event.args)
    if "ready" in args:
        args["ready"] += seconds
    return Event(event.name, event.rank, step, event.start + seconds, event.end + seconds, args)


@pytest.mark.parametrize(
    "plan", [THIRDS, CommPlan((6,), overlap=False), CommPlan((1, 6), accumulate=3)]
)
@pytest.mark.parametrize("slowdown", [0.0, 0.7])
def test_what_was_simulated_is_read_back_without_its_contention(plan, slowdown) -> None:
    work = workload(late=0.05, buffers_bytes=4096)
    network = linear_profile(compute_slowdown=slowdown, exchange_slowdown=0.4, latency=0.01)
    read_back = workload_of(simulate(work, plan, network, 3), network)
    assert read_back.gradients == work.gradients
    assert read_back.buffers_bytes == 4096
    for name in NAMES:
        np.testing.assert_allclose(getattr(read_back, name), getattr(work, name), atol=1e-9)


@pytest.mark.parametrize("reading", [[1.7] * 4, [0.0, 0.0, 1.7, 0.0]])
@pytest.mark.parametrize("plan", [THIRDS, CommPlan((1, 6), accumulate=3)])
@pytest.mark.parametrize("slowdown", [0.0, 0.4])
def test_readers_that_cannot_keep_up_are_read_back(plan, reading, slowdown) -> None:
    network = linear_profile(compute_slowdown=slowdown)
    work = workload(reading=np.array(reading))
    trace = simulate(work, plan, network, steps=3)
    found = workload_of(trace, network)
    assert predict(found, plan, network) == pytest.approx(predict(work, plan, network), rel=1e-6)
    faster = linear_profile(
        seconds=0.001, compute_slowdown=slowdown
    )  # brings little: the batches do not come faster
    assert predict(found, plan, faster) == pytest.approx(predict(work, plan, faster), rel=0.05)
    assert predict(found.fed(times=2), plan, network) < 0.8 * predict(found, plan, network)
    no_wait, many = (predict(one, plan, network) for one in (found.fed(), found.fed(times=1e9)))
    assert no_wait <= many <= no_wait + 3 * 0.01 + 1e-9  # handing over still takes its time


@pytest.mark.parametrize(
    ("readers", "queued", "wait", "is_late"),
    [
        (2, 0, 0.05, True),
        (2, 3, 0.5, False),  # they are there: handing over takes the time
        (2, None, 0.5, True),
        (2, None, 0.05, False),  # as handing over takes, maybe
        (0, 0, 0.5, False),  # the training reads itself
    ],
)
def test_who_cannot_keep_up(readers, queued, wait, is_late) -> None:
    args = {"readers": readers} | ({} if queued is None else {"queued": queued})
    work = workload(data_wait=np.full(4, wait))
    trace = simulate(work, THIRDS, linear_profile(), steps=3)
    trace = edited(trace, lambda e: replace(e, args=args) if e.name == "data_wait" else e)
    found = workload_of(trace, linear_profile())
    assert (found.reading is not None) == is_late
    assert found.data_wait == pytest.approx(np.full(4, 0.0 if is_late else wait))


@pytest.mark.parametrize("precision", ["half_weights", {"kind": "half_weights"}, "autocast", None])
def test_a_trace_tells_convolutions_and_the_type_of_weights(precision) -> None:
    trace = simulate(workload(), THIRDS, linear_profile())
    told = {"strategy": {**trace.meta["strategy"], "precision": precision}, "convolutions": 0.25}
    read_back = workload_of(Trace(trace.events, trace.meta | told), linear_profile())
    half = precision not in ("autocast", None)
    assert (read_back.half, read_back.convolutions) == (half, 0.25)
    plan = CommPlan.of_trace(Trace(trace.events, trace.meta | told))
    assert plan.half is half


@pytest.mark.parametrize("asked", [1, 3])
def test_passes_that_a_script_adds_up_by_itself_are_of_one_batch(asked: int) -> None:
    work, network = workload(late=0.05), linear_profile(latency=0.01, compute_slowdown=0.3)
    trace = simulate(work, CommPlan((2, 4, 6), accumulate=6), network, steps=3)
    trace.meta["strategy"]["gradients"]["accumulate"] = asked  # the others in no_sync()
    found, plan = workload_of(trace, network), CommPlan.of_trace(trace)
    assert predict(found, plan, network) == pytest.approx(trace.events[0].duration, rel=1e-6)
    assert found.samples == pytest.approx(6 / asked * work.samples)
    assert found.backward == pytest.approx(work.backward)
    assert found.first_part * found.forward.mean() == pytest.approx(work.forward.mean())


def test_another_contention_gives_another_workload() -> None:
    work, network = workload(), linear_profile(compute_slowdown=1.0)
    trace = simulate(work, THIRDS, network)
    spent = workload_of(trace, linear_profile()).backward
    assert np.all(spent > work.backward + 0.1)


def test_ready_times_are_interpolated_by_bytes_where_a_trace_does_not_tell() -> None:
    even = workload(late=0.1)  # every gradient has the same bytes and takes the same time
    trace = edited(simulate(even, THIRDS, linear_profile()), without_ready_times)
    np.testing.assert_allclose(workload_of(trace, linear_profile()).ready, even.ready, atol=1e-9)
    sizes = (3 * MB, 1 * MB)
    work = workload(gradients=tuple(Gradient(f"{s}", "", s) for s in sizes), count=2)
    trace = simulate(work, CommPlan((1, 2), overlap=False), linear_profile())
    read_back = workload_of(edited(trace, without_ready_times), linear_profile()).ready[0]
    np.testing.assert_allclose(read_back, [0.45, 0.6], atol=1e-6)


def test_one_process_has_no_exchanges_and_serves_a_cluster_of_any_size() -> None:
    alone = simulate(workload(1), CommPlan((6,)), linear_profile(1), 2)
    del alone.meta["segments"]
    read_back = workload_of(edited(alone, without_ready_times), linear_profile(4))
    np.testing.assert_allclose(read_back.ready, workload(1).ready, atol=1e-9)
    assert predict(read_back, CommPlan((6,)), linear_profile(4)) == pytest.approx(0.86 + 0.6)


def test_a_gradient_that_never_came_is_sent_when_backward_is_over() -> None:
    def unused(event: Event) -> Event:
        if event.name != "backward":
            return event
        offsets = event.args["gradients_ready"]
        return replace(event, args={"gradients_ready": [*offsets[:2], None, *offsets[3:]]})

    read_back = workload_of(
        edited(simulate(workload(), THIRDS, linear_profile()), unused), linear_profile()
    )
    np.testing.assert_allclose(read_back.ready[:, 2], read_back.backward)


def test_somebody_is_always_late_though_every_rank_is_in_time_on_most_days() -> None:
    ranks, events = 3, []
    for step in range(9):
        backward = np.where(np.arange(ranks) == step % ranks, 0.9, 0.6)
        work = workload(ranks, backward=backward, ready=backward[:, None] * np.arange(1, 7) / 6)
        trace = simulate(work, CommPlan((6,)), linear_profile(ranks))
        events += [moved(event, step, 9.0 * step) for event in trace.events]
    read_back = workload_of(Trace(tuple(events), trace.meta), linear_profile(ranks))
    assert predict(read_back, CommPlan((6,)), linear_profile(ranks)) == pytest.approx(
        0.86 + 0.3 + 0.6
    )
    assert sorted(read_back.backward) == pytest.approx([0.6, 0.6, 0.9])


def test_an_exchange_that_ends_later_on_a_rank_is_none_of_its_own_work() -> None:
    work, network = workload(), linear_profile()
    trace = simulate(work, THIRDS, network, 4)

    def later(event: Event) -> Event:  # as behind a link whose queue drains last
        return moved(event, event.step, 0.01 * event.rank)

    read_back = workload_of(edited(trace, later), network)
    behind = read_back.backward - work.backward
    assert behind.max() - behind.min() == pytest.approx(0.03)
    np.testing.assert_allclose(read_back.alone(2), work.alone(2))
    np.testing.assert_allclose(read_back.for_ranks(6).alone(1), workload(6).alone(1))
    np.testing.assert_allclose(read_back.evened().alone(1), work.alone(1))
    twice, larger = read_back.slowed(2.0), read_back.with_batch(16)
    np.testing.assert_allclose(twice.alone(1), work.slowed(2.0).alone(1))
    np.testing.assert_allclose(larger.alone(1), work.with_batch(16).alone(1))
    fast = HalfSpeed(dense=4.0, convolutional=4.0)
    np.testing.assert_allclose(
        read_back.computed(True, fast).alone(1), work.computed(True, fast).alone(1)
    )


def test_what_a_script_does_behind_the_exchange_and_the_optimizer_is_no_part_of_backward() -> None:
    """Clipping comes before the optimizer, a schedule and a log line after it."""
    work, network = workload(), linear_profile()
    trace, other = simulate(work, THIRDS, network, 4), float(work.other[0])

    def at_the_end(event: Event) -> Event:
        # simulated iterations begin with it; here each ends with it, on both sides of its optimizer
        shift = {"iteration": other, "optimizer": other / 2}.get(event.name, 0.0)
        return replace(event, start=event.start + shift, end=event.end + shift)

    read_back = workload_of(edited(trace, at_the_end), network)
    np.testing.assert_allclose(read_back.backward, work.backward)
    np.testing.assert_allclose(read_back.ready, work.ready)
    np.testing.assert_allclose(read_back.alone(1), work.alone(1))


def test_a_step_that_not_all_ranks_went_through_is_left_out() -> None:
    trace = simulate(workload(), THIRDS, linear_profile(), 3)
    torn = edited(trace, lambda e: None if (e.rank, e.step) == (2, 1) else e)
    read_back = workload_of(torn, linear_profile())
    np.testing.assert_allclose(read_back.backward, workload().backward)


def shorter(event: Event) -> Event:
    if event.name != "backward" or event.rank != 1:
        return event
    return replace(event, args={"gradients_ready": event.args["gradients_ready"][:-1]})


BAD = {
    "an older version": (lambda e: e, {"gradients": None}, TraceError, "record it again"),
    "a damaged list": (lambda e: e, {"gradients": [{"name": "a"}]}, TraceError, "is damaged"),
    "too few ready times": (shorter, {}, TraceError, "rank 1, step 0: 5 ready times, but 6"),
    "an exchange of one rank is missing": (
        lambda e: None if (e.name, e.rank) == ("allreduce2", 3) else e,
        {},
        TraceError,
        "ranks disagree about what they exchanged in step 0",
    ),
    "no backward": (
        lambda e: None if e.name == "backward" else e,
        {},
        TraceError,
        "no step with a backward pass on every rank",
    ),
    "another group": (lambda e: e, {"world_size": 8}, ClusterError, "measure again with 8 ranks"),
}


@pytest.mark.parametrize(("change", "meta", "error", "text"), BAD.values(), ids=BAD)
def test_bad_traces_are_refused_with_a_reason(change, meta, error, text) -> None:
    trace = edited(simulate(workload(), THIRDS, linear_profile()), change)
    with pytest.raises(error, match=text):
        workload_of(Trace(trace.events, trace.meta | meta), linear_profile())


def test_profiles_repeat_for_other_numbers_of_ranks() -> None:
    work = random_workload(1, 3, 5)
    more = work.for_ranks(7)
    assert more.num_ranks == 7
    np.testing.assert_array_equal(more.ready[3:6], work.ready)
    assert work.for_ranks(3) is work
    assert work.for_ranks(2).num_ranks == 2


def test_borders_are_where_another_dtype_begins() -> None:
    types = ["float32", "float32", "bfloat16", "float32"]
    gradients = tuple(Gradient(f"{i}", "", 4, dtype) for i, dtype in enumerate(types))
    assert workload(gradients=gradients, count=4).borders == (2, 3)
    assert workload().borders == ()


def test_a_batch_of_unknown_size_is_not_scaled() -> None:
    unknown = replace(workload(), samples=np.zeros(4))
    with pytest.raises(TraceError, match="counted from the first tensor of the model's forward"):
        unknown.with_batch(8)
