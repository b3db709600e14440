"""The watches of several hosts: one verdict, on all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slipstream.checks.autopsy import Autopsy, RankCase, RankState
from slipstream.checks.board import Board
from slipstream.checks.watch import Watch
from slipstream.checks.watched_host import HostCases, HostState
from slipstream.cli.store import open_store
from slipstream.errors import ClusterError

TIMEOUT = 4.0


class FakeHost:
    """A host with one rank, which shows no sign of life unless it ``lives``."""

    def __init__(self, rank: int, exchange: str = "", lives: bool = False, size: int = 2) -> None:
        self.rank, self.exchange, self.lives, self.size = rank, exchange, lives, size
        self.stopped: dict[int, str] = {}
        self.began = time.monotonic()
        self.asked = self.beat = 0

    def state(self, now: float, ended: bool = False) -> RankState:
        still = 0.0 if self.lives else max(0.0, now - self.began)
        return RankState(
            rank=self.rank,
            host=f"host{self.rank}",
            pid=1,
            step=None,
            line=f"train.py:{self.rank + 1} in main",
            exchange=self.exchange,
            still=still,
            ended="ended its process" if ended else "",
        )

    def look(self, now: float, ended: bool = False) -> HostState:
        self.beat += 1
        return HostState(
            host=f"host{self.rank}",
            beat=self.beat,
            world_size=self.size,
            ranks=(self.state(now, ended),),
            stopped=self.stopped,
            ended=ended,
        )

    def cases(self, now: float) -> HostCases:
        self.asked += 1
        return HostCases(cases={self.rank: RankCase(state=self.state(now))})

    def forget(self) -> None:
        self.began = math.inf


class Hosts:
    """Two hosts whose watches meet in a store of torch."""

    def __init__(self) -> None:
        self.keeper = open_store(0)
        self.boards: list[Board] = []
        self.cut = False

    def watch(self, *hosts: FakeHost) -> list[Watch]:
        self.boards = [Board(self.connect) for _ in hosts]
        return [
            Watch(host, TIMEOUT, board, hosts=len(hosts), host_rank=index)
            for index, (host, board) in enumerate(zip(hosts, self.boards, strict=True))
        ]

    def connect(self) -> TCPStore:
        port = self.keeper.port
        return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    for board in made.boards:
        board.close()


def beaten(watches: Sequence[Watch], seconds: float = 30) -> list[Autopsy | None]:
    """What the watches find in turn, once all have found something, or after a time."""
    found: list[Autopsy | None] = [None] * len(watches)
    until = time.monotonic() + seconds
    while None in found and time.monotonic() < until:
        for index, watch in enumerate(watches):
            found[index] = found[index] or watch.beat(time.monotonic())
        time.sleep(0.05)
    return found


def test_all_end_with_the_same_verdict(hosts):
    first, second = beaten(hosts.watch(FakeHost(0, "backward"), FakeHost(1)))
    assert first is not None
    assert first == second
    assert first.blamed == (1,)
    assert first.verdict.startswith("rank 1 (host host1) never entered backward: it waits in train")
    assert first.world_size == 2


def test_a_watch_that_never_comes_is_told(hosts):
    first, _ = hosts.watch(FakeHost(0, "backward"), FakeHost(1))
    first._began -= 1000
    until = time.monotonic() + 30
    hints: list[str] = []  # another one may come first
    while not any("the watches of hosts 1 yet" in hint for hint in hints):
        assert time.monotonic() < until, hints
        assert first.beat(time.monotonic()) is None
        hints += first.hints()
        time.sleep(0.05)


def test_a_host_that_does_not_answer_is_silent(hosts, monkeypatch):
    one, other = hosts.watch(FakeHost(0, "backward"), FakeHost(1))
    other.beat(time.monotonic())
    (found,) = beaten([one])
    assert found is not None
    assert found.blamed == (1,)
    assert (
        "rank 1 (host host1) is silent: its process is stopped or gone, its host" in found.verdict
    )
    monkeypatch.setattr("slipstream.checks.watch.LEAVE_SECONDS", 1e6)
    one.close()  # nobody waits for it to read the verdict


def test_a_store_that_is_gone_is_host_0(hosts):
    one, other = hosts.watch(FakeHost(0), FakeHost(1, "backward"))
    beaten([one, other], 1.0)
    hosts.boards[1].close()  # as if no call of the store came back
    (found,) = beaten([other])
    assert found is not None
    assert found.blamed == (0,)
    assert "rank 0 (host host0) is silent" in found.verdict
    assert "rank 1 waits in backward" in found.verdict


def test_a_host_whose_command_has_ended_is_to_blame(hosts):
    one, other = hosts.watch(FakeHost(0, "backward"), FakeHost(1))
    other.beat(time.monotonic())
    other.leave(time.monotonic())
    (found,) = beaten([one])
    assert found is not None
    assert found.blamed == (1,)
    assert found.verdict == "rank 1 (host host1) has ended its process; rank 0 waits in backward"


def test_ranks_that_all_sleep_do_not_hang_and_are_looked_at_again(hosts):
    asleep = [FakeHost(0), FakeHost(1)]
    watches = hosts.watch(*asleep)
    assert beaten(watches, 2 * TIMEOUT) == [None, None]
    assert all(host.asked > 1 for host in asleep)
    asleep[0].exchange = "barrier"
    first, second = beaten(watches)
    assert first is not None
    assert first == second
    assert first.blamed == (1,)


def test_a_rank_that_lives_on_another_host_is_no_hang(hosts):
    waiting = FakeHost(0, "backward")
    assert beaten(hosts.watch(waiting, FakeHost(1, lives=True)), TIMEOUT) == [None, None]
    assert not waiting.asked


def test_the_store_of_another_run_is_told_and_left_alone():
    def refuse() -> TCPStore:
        raise ClusterError("the run that meets at node0:1 has a token, and this process has none")

    watch = Watch(FakeHost(1, "backward"), TIMEOUT, Board(refuse), hosts=2, host_rank=1)
    hints: list[str] = []
    until = time.monotonic() + 30
    while not hints and time.monotonic() < until:
        assert watch.beat(time.monotonic()) is None
        hints = watch.hints()
        time.sleep(0.05)
    assert hints == [
        "is alone: the run that meets at node0:1 has a token, and this process has none"
    ]


# Alone.


def test_of_several_hosts_a_watch_alone_judges_stopped_ranks_only():
    host = FakeHost(0, "backward")
    watch = Watch(host, TIMEOUT)
    host.began -= 1000
    assert watch.beat(time.monotonic()) is None
    assert watch.hints() == []  # others may yet start
    watch._all_since -= 1000
    assert watch.beat(time.monotonic()) is None
    (hint,) = watch.hints()
    assert hint.startswith("sees rank 0 of 2: other hosts are not seen")
    assert watch.hints() == []
    host.stopped = {0: "its process is stopped"}
    assert watch.beat(time.monotonic()) is not None


def test_seconds_in_which_the_watch_itself_was_stopped_do_not_count():
    host = FakeHost(0, "backward", size=1)
    watch = Watch(host, TIMEOUT)
    host.began -= 1000
    assert watch.beat(time.monotonic() + 1000) is None
