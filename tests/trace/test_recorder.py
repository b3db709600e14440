"""The recorder: which steps, from which threads, and on whose clock."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch

from slipstream.trace.event import Trace
from slipstream.trace.recorder import Recorder
from tests.harness.ranks import PerRank


def _ticks():
    """A clock that shows 0, 1, 2 ... seconds."""
    return map(float, range(10**6)).__next__


@pytest.mark.parametrize(("first", "count"), [(0, 1), (2, 3), (5, 1), (4, 9), (7, 2)])
def test_only_the_asked_steps_are_recorded(first, count):
    recorder = Recorder(0, first, count, clock=_ticks())
    asked, done = [], []
    for step in range(6):
        recorder.begin_step(step)
        asked.append(recorder.active)
        recorder.add("forward", 0.0, 1.0)
        recorder.end_step()
        recorder.add("late", 0.0, 1.0)
        done.append(recorder.done)
    steps = [step for step in range(6) if first <= step < first + count]
    assert asked == [step in steps for step in range(6)]
    assert done == [step >= first + count - 1 for step in range(6)]
    trace = recorder.gather()
    assert Counter((e.name, e.step) for e in trace.events) == Counter(
        (name, step) for step in steps for name in ("iteration", "forward")
    )


def test_a_span_keeps_its_times_and_arguments():
    recorder = Recorder(3, 0, 1, clock=_ticks())
    recorder.begin_step(0)
    start = recorder.stamp(torch.device("cpu"))
    recorder.add("allreduce1", start, recorder.now(), bytes=12, ready=0.5)
    recorder.end_step()
    iteration, exchange = recorder.gather().events
    assert (iteration.name, iteration.rank, iteration.start, iteration.end) == (
        ("iteration", 3, 0.0, 3.0)
    )
    assert (exchange.start, exchange.end) == (1.0, 2.0)
    assert exchange.args == {"bytes": 12, "ready": 0.5}


def test_the_trace_says_how_much_cpu_time_an_iteration_took():
    recorder = Recorder(0, 0, 3)
    for step in range(3):
        recorder.begin_step(step)
        begun = time.thread_time()
        while time.thread_time() - begun < 1e-3:
            pass
        recorder.end_step()
    [seconds] = recorder.gather().meta["cpu_seconds"]
    assert seconds >= 1e-3


def test_bounds_of_the_iteration_can_be_given():
    recorder = Recorder(0, 0, 1)
    recorder.begin_step(0, start=3.0)
    recorder.end_step(end=4.5)
    [iteration] = recorder.gather().events
    assert (iteration.start, iteration.end) == (3.0, 4.5)


def test_threads_lose_no_span():
    recorder = Recorder(0, 0, 1)
    recorder.begin_step(0)

    def work(name: str) -> None:
        for _ in range(2000):
            recorder.add(name, recorder.now(), recorder.now())

    threads = [threading.Thread(target=work, args=(f"allreduce{n}",)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.end_step()
    counts = Counter(event.name for event in recorder.gather().events)
    assert counts == {"iteration": 1} | {f"allreduce{n}": 2000 for n in range(1, 5)}


def test_what_the_owner_says_of_the_run_wins():
    recorder = Recorder(0, 0, 1)
    recorder.meta |= {"model": "tiny", "hosts": ["north"]}
    meta = recorder.gather().meta
    assert (meta["model"], meta["hosts"], meta["world_size"]) == ("tiny", ["north"], 1)
    assert (meta["clock_error"], meta["versions"]["torch"]) == ([0.0], torch.__version__)


def _run_with_odd_clock(rank: int, shift: float, drift: float, align: bool) -> Trace | None:
    """Spans whose argument ``truth`` is their time on the clock that all processes share."""
    recorder = Recorder(rank, 0, 5, clock=lambda: time.perf_counter() * (1 + drift) + shift)
    if align:
        recorder.align()
    for step in range(5):
        recorder.begin_step(step)
        truth = time.perf_counter()
        start = truth * (1 + drift) + shift
        recorder.add("forward", start, start, truth=truth, ready=start)
        recorder.end_step()
        time.sleep(0.04)
    return recorder.gather()


@pytest.mark.parametrize(
    ("shift", "drift", "align"), [(0.0, 0.0, True), (-4000.0, 0.0, False), (1e5, 0.5, True)]
)
def test_all_ranks_come_out_on_the_clock_of_rank_0(two, shift, drift, align):
    zero = 700.0  # rank 0 differs from the shared clock, too
    trace, nothing = two.run(
        _run_with_odd_clock, PerRank(0, 1), PerRank(zero, shift), PerRank(0.0, drift), align
    )
    assert nothing is None
    own, other = trace.meta["clock_error"]
    assert own == 0.0
    assert 0.0 < other < 0.04  # else the next lines would prove nothing
    marks = [event for event in trace.events if event.name == "forward"]
    assert Counter(event.rank for event in marks) == {0: 5, 1: 5}
    for event in marks:
        truth = zero + event.args["truth"]
        error = trace.meta["clock_error"][event.rank] + 1e-9
        assert event.start == pytest.approx(truth, rel=0, abs=error)
        assert event.args["ready"] == event.start
    assert [event.start for event in trace.events] == sorted(e.start for e in trace.events)


def _gather_on(group_of: list[int]) -> tuple[int, list[int]] | None:
    group = torch.distributed.new_group(group_of)
    recorder = Recorder(torch.distributed.get_rank(), 0, 1)
    recorder.begin_step(0)
    recorder.end_step()
    trace = recorder.gather(group)
    return trace and (trace.meta["world_size"], [event.rank for event in trace.events])


def test_the_first_rank_of_the_group_gathers(two):
    (size, ranks), nothing = two.run(_gather_on, [0, 1])
    assert (size, sorted(ranks), nothing) == (2, [0, 1], None)
