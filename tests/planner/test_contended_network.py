"""How two exchanges in flight, and computing beside them, stretch one another."""

from __future__ import annotations

import pytest

from slipstream.planner.iteration.contended_network import Job, NetworkClock, run
from slipstream.planner.iteration.tasks import Phase
from tests.planner.networks import contention


def latency(seconds: float) -> Phase:
    return Phase(None, seconds, 0.0)


def transfer(seconds: float, demand: float = 1.0, network: str = "world") -> Phase:
    return Phase(network, seconds, demand)


# Phases of exchanges that are ready at once, and when each of them ends.
SHARING = {
    "alone": ([[transfer(1.0)]], [1.0]),
    "full ones share": ([[transfer(1.0)], [transfer(1.0)]], [2.0, 2.0]),
    "small ones do not": ([[transfer(1.0, 0.5)], [transfer(1.0, 0.5)]], [1.0, 1.0]),
    "only what is too much": ([[transfer(1.0, 0.8)], [transfer(1.0, 0.7)]], [1.5, 1.5]),
    "two networks": ([[transfer(1.0)], [transfer(1.0, network="intra")]], [1.0, 1.0]),
    "latency asks for nothing": ([[latency(1.0)], [transfer(1.0)]], [1.0, 1.0]),
    "alone at more than its share": ([[transfer(1.0, 1.4)]], [1.0]),
    "more than its share beside little": (
        [[transfer(1.0, 1.4)], [transfer(0.2, 0.14)]],
        [1.028, 0.308],
    ),
    "the third waits": ([[transfer(1.0, 0.1)]] * 3, [1.0, 1.0, 2.0]),
    "latency under a transfer": (
        [[latency(0.5), transfer(1.0)], [latency(1.0), transfer(1.0)]],
        [2.0, 2.5],  # 0.5 alone, then 1 s together: the first is half, half of it is left
    ),
}


@pytest.mark.parametrize(("phases", "ends"), SHARING.values(), ids=SHARING)
def test_exchanges_share_the_network_as_far_as_they_fill_it(phases, ends) -> None:
    jobs = [Job(0.0, tuple(one)) for one in phases]
    completions = run(jobs, NetworkClock(), lambda completed: [0.0], contention())
    assert [one.end for one in completions] == pytest.approx(ends)


# Phases of direct sends that are ready at once, and when each of them ends.
IN_ORDER = {
    "alone": ([[transfer(1.0)]], [1.0]),
    "one behind the other": ([[transfer(1.0)]] * 3, [1.0, 2.0, 3.0]),
    "what the first leaves": ([[transfer(1.0, 0.75)], [transfer(1.0, 0.5)]], [1.0, 1.5]),
    "two networks": ([[transfer(1.0)], [transfer(1.0, network="intra")]], [1.0, 1.0]),
    "alone at more than its share": ([[transfer(1.0, 1.4)]], [1.0]),
    "the second round queues behind what was sent meanwhile": (
        [[transfer(0.5), latency(0.1), transfer(0.5)], [transfer(2.0)]],
        [3.0, 2.5],
    ),
    "two latencies at a time": ([[latency(1.0)]] * 3, [1.0, 1.0, 2.0]),
    "latency waits for nothing else": (
        [[transfer(2.0)], [latency(0.5), transfer(0.5)]],
        [2.0, 2.5],
    ),
}


@pytest.mark.parametrize(("phases", "ends"), IN_ORDER.values(), ids=IN_ORDER)
def test_the_bytes_of_direct_sends_queue(phases, ends) -> None:
    jobs = [Job(0.0, tuple(one)) for one in phases]
    queue = contention(queue_share=1.0, queue_seconds=9.0)  # which speaks of collectives
    completions = run(jobs, NetworkClock(), lambda completed: [0.0], queue, in_order=True)
    assert [one.end for one in completions] == pytest.approx(ends)


# A latency of 1 s and a transfer of 1 s, beside computing that takes so many seconds alone.
BESIDE = {
    "nothing computes": (0.0, contention(9.0, 9.0, 9.0), 2.0),
    "latency slowed": (100.0, contention(0.0, 0.0, 4.0), 6.0),
    "bytes slowed": (100.0, contention(0.0, 0.5, 0.0), 2.5),
    "both": (100.0, contention(0.0, 0.5, 4.0), 6.5),
    "computing ends under the latency": (2.0, contention(0.0, 0.0, 3.0), 3.5),
    "computing is slowed, too": (1.0, contention(1.0, 0.0, 3.0), 3.5),
}


@pytest.mark.parametrize(("computing", "slowdowns", "end"), BESIDE.values(), ids=BESIDE)
def test_computing_slows_latency_and_bytes_each_by_its_own_factor(
    computing, slowdowns, end
) -> None:
    job = Job(0.0, (latency(1.0), transfer(1.0)))
    (completion,) = run([job], NetworkClock(), lambda completed: [computing], slowdowns)
    assert completion.end == pytest.approx(end)


# Share, most seconds, and when a latency of 0.1 s ends beside a transfer of 1 s.
QUEUES = {
    "nothing queues": (0.0, 0.0, 0.1),
    "a share of the other": (0.5, 9.0, 0.5),
    "as much as there is": (1.0, 9.0, 1.0),
    "at most so long": (0.9, 0.3, 0.3),
    "never sooner than alone": (0.05, 9.0, 0.1),
}


@pytest.mark.parametrize(("share", "most", "end"), QUEUES.values(), ids=QUEUES)
def test_latency_waits_behind_what_another_exchange_sends(share, most, end) -> None:
    jobs = [Job(0.0, (transfer(1.0),)), Job(0.0, (latency(0.1),))]
    queue = contention(queue_share=share, queue_seconds=most)
    large, small = run(jobs, NetworkClock(), lambda completed: [0.0], queue)
    assert small.end == pytest.approx(end)
    assert large.end == pytest.approx(1.0)


def test_nothing_waits_behind_a_transfer_that_is_over() -> None:
    jobs = [Job(0.0, (transfer(0.4),)), Job(0.2, (latency(0.1),))]
    queue = contention(queue_share=1.0, queue_seconds=9.0)  # half of it when the transfer is over
    _, small = run(jobs, NetworkClock(), lambda completed: [0.0], queue)
    assert small.end == pytest.approx(0.4 + 0.05)
