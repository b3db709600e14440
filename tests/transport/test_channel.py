"""Exchanges run in one order on all ranks, whatever delays them; a failure is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from slipstream.errors import ExchangeError
from slipstream.strategy import FlatConfig
from slipstream.trace.recorder import Recorder
from slipstream.transport.channel import Channel, Label
from slipstream.transport.requests import AllGather, AllReduce, Broadcast, ExchangeSteps, Request
from slipstream.transport.transport import Transport, make_transport
from tests.harness.counters import collectives
from tests.harness.ranks import PerRank, Ranks

CPU = torch.device("cpu")


def label(span: str = "allreduce1", **args: object) -> Label:
    return Label(span, lambda: f"the exchange {span}", args)


def flat() -> Transport:
    return make_transport(FlatConfig(), dist.new_group())


def opened(recorder: Recorder | None = None, *, stages: int = 1) -> Channel:
    return Channel(flat(), [flat() for _ in range(stages)], CPU, recorder)


def met() -> ExchangeSteps:
    """Staged; ends once all ranks have come to it."""
    yield AllReduce(torch.zeros(1))


def stage_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "slipstream-stage"]


def mixed(delays: Sequence[float], stages: int) -> list[float]:
    """Twelve exchanges, two of three staged in two collectives each; some delayed on this rank."""
    channel = opened(stages=stages)
    tensors = [torch.full((number + 1,), float(number + 1)) for number in range(12)]
    ran: list[int] = []

    def two_collectives(number: int) -> ExchangeSteps:
        time.sleep(delays[number % len(delays)])
        total = tensors[number].sum()
        yield AllReduce(total)
        time.sleep(delays[-1 - number % len(delays)])
        rows = torch.empty(3, number + 1)
        yield AllGather(tensors[number], rows)
        tensors[number] = rows.sum(0)
        assert total == tensors[number].sum()
        ran.append(number)

    assert not channel.in_flight
    for number, tensor in enumerate(tensors):
        if number % 3 == 0:
            channel.start(label(), AllReduce(tensor))
        else:
            channel.start(label(), two_collectives(number))
        assert channel.in_flight
    channel.wait()
    assert not channel.in_flight
    staged = [n for n in range(12) if n % 3]
    for turn in range(stages):
        assert [n for n in ran if n in staged[turn::stages]] == staged[turn::stages]
    assert len(ran) == len(staged)
    channel.wait()  # nothing more to wait for
    channel.close()
    return [float(t.sum()) for t in tensors]


@pytest.mark.parametrize("stages", [1, 2])
def test_delays_bring_no_rank_out_of_order(three: Ranks, stages: int) -> None:
    expected = [3.0 * (n + 1) ** 2 for n in range(12)]
    delays = PerRank((0.0, 0.0, 0.02), (0.02, 0.0, 0.0), (0.0, 0.01, 0.0))
    assert three.run(mixed, delays, stages) == [expected] * 3


def one_codes_while_the_other_sends() -> list[str]:
    """Of two stages neither waits for the other."""
    channel, may_end = opened(stages=2), threading.Event()
    ran: list[str] = []

    def held_up() -> ExchangeSteps:
        assert may_end.wait(60)
        yield from met()
        ran.append("first")

    def passes() -> ExchangeSteps:
        yield from met()
        ran.append("second")
        may_end.set()

    channel.start(label(), held_up())
    channel.start(label(), passes())
    channel.wait()
    channel.close()
    return [*ran, *stage_threads()]


def test_two_stages_run_beside_one_another(three: Ranks) -> None:
    assert three.run(one_codes_while_the_other_sends) == [["second", "first"]] * 3


def told_as_they_land() -> list[str]:
    """What is to follow an exchange follows it, while a later one is held up."""
    channel, first_done, told = opened(stages=2), threading.Event(), list[str]()

    def held_up() -> ExchangeSteps:
        assert first_done.wait(60)
        yield from met()

    def after_first() -> None:
        told.append("first")
        first_done.set()

    channel.start(label(), AllReduce(torch.ones(1)), after_first)
    channel.start(label(), held_up(), lambda: told.append("second"))
    channel.start(label(), met())
    channel.wait()
    channel.close()
    return told


def test_what_follows_an_exchange_does_not_wait_for_the_next(three: Ranks) -> None:
    assert three.run(told_as_they_land) == [["first", "second"]] * 3


def stumbles() -> list[str]:
    """What follows an exchange raises; the next one is waited for all the same."""
    channel, ran = opened(), list[str]()

    def noted() -> ExchangeSteps:
        yield from met()
        ran.append("ran")

    def out_of_memory() -> None:
        raise MemoryError("no room")

    channel.start(label(), AllReduce(torch.ones(1)), out_of_memory)
    channel.start(label(), noted(), lambda: ran.append("told"))
    with pytest.raises(ExchangeError, match="no room"):
        channel.wait()
    channel.close()
    return ran


def test_what_raises_after_an_exchange_leaves_none_in_flight(three: Ranks) -> None:
    assert three.run(stumbles) == [["ran"]] * 3


def told_until_one_fails() -> list[str]:
    channel, told = opened(), list[str]()

    def breaks() -> ExchangeSteps:
        raise RuntimeError("out of memory")
        yield

    channel.start(label(), met(), lambda: told.append("first"))
    channel.start(label(), breaks(), lambda: told.append("broken"))
    channel.start(label(), AllReduce(torch.ones(1)), lambda: told.append("third"))
    with pytest.raises(ExchangeError, match="out of memory"):
        channel.wait()
    channel.close()
    return told


def test_nothing_follows_a_failed_exchange(three: Ranks) -> None:
    assert three.run(told_until_one_fails) == [["first"]] * 3


def started_before_the_stage_ends() -> bool:
    """A staged exchange that waits for its peers does not hold up a single collective."""
    channel, may_end = opened(), threading.Event()
    tensor = torch.ones(1)

    def held_up() -> ExchangeSteps:
        assert may_end.wait(60)
        yield from met()

    channel.start(label(), held_up())
    with collectives() as log:
        channel.start(label(), AllReduce(tensor))
    assert log[0].work is not None
    log[0].work.wait()
    arrived = not may_end.is_set() and float(tensor) == 3.0
    may_end.set()
    channel.wait()
    channel.close()
    return arrived


def test_single_collectives_pass_staged_ones(three: Ranks) -> None:
    assert three.run(started_before_the_stage_ends) == [True] * 3


def threads_before_and_after() -> list[int]:
    channel = opened()
    counts = [len(stage_threads())]
    channel.start(label(), AllReduce(torch.ones(1)))
    channel.wait()
    counts.append(len(stage_threads()))
    channel.start(label(), met())
    channel.wait()
    counts.append(len(stage_threads()))
    channel.close()
    channel.close()
    return [*counts, len(stage_threads())]


def test_a_thread_lives_from_the_first_staged_exchange_to_close(three: Ranks) -> None:
    assert three.run(threads_before_and_after) == [[0, 0, 1, 0]] * 3


def staged_failure(failing: bool) -> list[object]:
    """An exchange that raises here and, as its peer is silent, is never met elsewhere."""
    channel = opened()
    ran: list[str] = []

    def ends_at_once(name: str, failing: bool = False) -> ExchangeSteps:
        ran.append(name)
        if failing:
            raise RuntimeError("out of memory")
        yield from ()

    channel.start(label("allreduce1"), ends_at_once("first", failing))
    channel.start(label("allreduce2"), ends_at_once("second"))
    told = ""
    try:
        channel.wait()
    except ExchangeError as error:
        told = f"{error}|{type(error.__cause__).__name__}"
    still = channel.in_flight
    channel.start(label("allreduce3"), ends_at_once("third"))
    later = ""
    try:
        channel.wait()
    except ExchangeError as error:
        later = str(error)
    channel.close()
    return [told, still, later, ran, stage_threads()]


def test_after_a_staged_failure_no_staged_exchange_is_begun(three: Ranks) -> None:
    fine, failed, _ = three.run(staged_failure, PerRank(False, True, False))
    assert fine == ["", False, "", ["first", "second", "third"], []]
    first = "the exchange allreduce1: out of memory|RuntimeError"
    third = "the exchange allreduce3: an earlier exchange failed"
    assert failed == [first, False, third, ["first"], []]


class Refuses:
    """A transport whose requests fail at their start, as long as ``broken``."""

    def __init__(self) -> None:
        self.transport, self.broken = flat(), True

    def prepare(self, requests: Sequence[Request]) -> None:
        self.transport.prepare(requests)

    def start(self, request: Request) -> Sequence[dist.Work]:
        if self.broken:
            raise RuntimeError("Connection reset by peer")
        return self.transport.start(request)

    def close(self) -> None:
        self.transport.close()


def single_failure() -> list[str]:
    transport = Refuses()
    channel, told = Channel(transport, [], CPU), []
    for transport.broken in (True, False):
        channel.start(label("buffers"), AllReduce(torch.ones(1)))
        transport.broken = False
        channel.start(label("allreduce1"), AllReduce(torch.ones(1)))
        assert channel.in_flight
        try:
            channel.wait()
            told.append("went well")
        except ExchangeError as error:
            told.append(str(error))
    return told


def test_a_collective_that_cannot_begin_is_told_by_wait(three: Ranks) -> None:
    told = ["the exchange buffers: Connection reset by peer", "went well"]
    assert three.run(single_failure) == [told] * 3


def failure_seen_inside() -> list[str]:
    """A staged exchange whose request fails sees the error at its yield."""
    transport = Refuses()
    channel, seen = Channel(flat(), [transport], CPU), list[str]()

    def exchange() -> ExchangeSteps:
        try:
            yield AllReduce(torch.ones(1))
        except RuntimeError as error:
            seen.append(str(error))
            raise

    channel.start(label(), exchange())
    with pytest.raises(ExchangeError, match="the exchange allreduce1: Connection reset"):
        channel.wait()
    channel.close()
    return seen


def test_an_exchange_sees_its_request_fail(three: Ranks) -> None:
    assert three.run(failure_seen_inside) == [["Connection reset by peer"]] * 3


def peer_is_gone() -> str:
    """All but rank 0 leave; its exchange ends, and says which one it was."""
    channel = opened()
    dist.barrier()
    if dist.get_rank() != 0:
        del channel  # the last reference to its groups: their connections close
        dist.destroy_process_group()
        return "left"
    channel.start(label("allreduce1"), AllReduce(torch.ones(1)))
    try:
        channel.wait()
    except ExchangeError as error:
        return str(error).partition(":")[0]
    return "nobody was missed"


def test_a_peer_that_left_ends_the_exchange(three: Ranks) -> None:
    assert three.run(peer_is_gone) == ["the exchange allreduce1", "left", "left"]


def recorded() -> list[tuple[str, int, dict[str, object], bool]]:
    """The exchanges of the middle one of three steps, and whether they lie inside it."""
    recorder = Recorder(dist.get_rank(), first_step=1, num_steps=1)
    channel = opened(recorder)
    for step in range(3):
        recorder.begin_step(step)
        channel.start(label("allreduce1", bytes=4 * step), AllReduce(torch.ones(1000)))
        channel.start(label("buffers"), Broadcast(torch.ones(3)))
        channel.start(label("allreduce2", rows=step), met())
        channel.wait()
        recorder.end_step()
    channel.close()
    *parts, whole = recorder._events()
    assert whole.name == "iteration"
    inside = [whole.start <= e.start <= e.end <= whole.end for e in parts]
    return [(e.name, e.step, dict(e.args), i) for e, i in zip(parts, inside, strict=True)]


def test_every_exchange_of_a_recorded_step_is_a_span(three: Ranks) -> None:
    spans = [
        ("allreduce1", 1, {"bytes": 4}, True),
        ("buffers", 1, {}, True),
        ("allreduce2", 1, {"rows": 1}, True),
    ]
    assert three.run(recorded) == [spans] * 3
