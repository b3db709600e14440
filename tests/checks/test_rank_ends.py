"""Which rank ended first, and how, as its kernel tells it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from slipstream.checks.rank_ends import RankEnd, RankEnds


@pytest.fixture
def waiting() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that end with code 3 once their input does; their parent takes no note of it."""
    argv = ["sh", "-c", "read _; exit 3"]
    processes = [subprocess.Popen(argv, stdin=subprocess.PIPE) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()


def until(ends: RankEnds, count: int) -> list[RankEnd]:
    limit = time.monotonic() + 30
    while len(ends.ends) < count and time.monotonic() < limit:
        time.sleep(0.01)
    return ends.ends


def test_the_first_end_is_told_with_its_reason(waiting):
    ends = RankEnds("node0")
    ends.follow({rank: process.pid for rank, process in enumerate(waiting)})
    assert ends.words == ""
    waiting[1].kill()
    until(ends, 1)
    assert ends.words == "rank 1 (host node0) ended first, by SIGKILL"
    time.sleep(0.05)
    waiting[2].stdin.write(b"\n")
    waiting[2].stdin.flush()
    assert [(end.rank, end.how) for end in until(ends, 2)] == [
        (1, "by SIGKILL"),
        (2, "with code 3"),
    ]
    told = r"rank 1 \(host node0\) ended first, by SIGKILL; rank 2 \d+\.\d\d s later"
    assert re.fullmatch(told, ends.words)


def test_ranks_that_are_started_anew_are_other_ranks(waiting):
    ends = RankEnds("node0")
    ends.follow({0: waiting[0].pid, 1: waiting[1].pid})
    waiting[1].kill()
    until(ends, 1)
    ends.follow({0: waiting[0].pid, 1: waiting[2].pid})
    assert ends.ends == []
    waiting[2].kill()
    assert [end.rank for end in until(ends, 1)] == [1]


def test_a_process_that_is_gone_is_left_out(waiting):
    waiting[0].kill()
    waiting[0].wait()
    ends = RankEnds("node0")
    ends.follow({0: waiting[0].pid, 1: os.getpid()})
    assert ends.ends == []


def test_what_the_clock_cannot_tell_apart_is_not_ordered():
    ends = RankEnds("node0")
    ends._ends = {0: RankEnd(0, 1.004, "with code 1"), 1: RankEnd(1, 1.0, ""), 2: RankEnd(2, 2, "")}
    assert ends.words == (
        "ranks 0 and 1 (host node0) ended within 4 ms of each other, so that it is uncertain which "
        "was first: rank 1, rank 0 with code 1"
    )


def test_the_only_rank_of_a_host_is_not_blamed_for_an_end_that_nobody_saw():
    ends = RankEnds("node0")
    ends._ends = {1: RankEnd(1, 1.0, "")}
    assert ends.words == ""


def test_a_rank_that_was_told_to_end_is_not_blamed():
    ends = RankEnds("node0")
    ends._ends = {0: RankEnd(0, 1.0, "by SIGTERM"), 1: RankEnd(1, 1.1, "with code 1")}
    assert ends.words.startswith("SIGTERM ended rank 0 (host node0) first: its sender, a launcher,")


def test_ranks_that_are_done_are_not_told():
    ends = RankEnds("node0")
    ends._ends = {rank: RankEnd(rank, 1.0 + rank, "with code 0") for rank in range(2)}
    assert ends.words == ""
