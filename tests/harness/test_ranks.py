"""The harness itself: real ranks, every failure seen, nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import PerRank, RankFailure, Ranks, free_port


def _sum(value: int) -> int:
    t = torch.tensor(value)
    dist.all_reduce(t)
    return int(t)


def _raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("boom")


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def _stop_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def _hang() -> None:
    time.sleep(60)


def test_ranks_collect_garbage(two: Ranks) -> None:
    """The server of which they are forks does not while it imports."""
    assert two.run(gc.isenabled, connect=False) == [True, True]


def test_values_come_back_by_rank(two):
    assert two.run(_sum, PerRank(1, 2)) == [3, 3]
    assert two.run(_sum, 5) == [10, 10]


def test_failures_are_named(two):
    with pytest.raises(RankFailure, match="rank 1: ValueError"):
        two.run(_raise_on_one)
    with pytest.raises(RankFailure, match="died"):
        two.run(_die_on_one)
    with pytest.raises(RankFailure, match="hangs"):
        two.run(_hang, timeout=0.5)
    with pytest.raises(RankFailure, match="rank 1: 'no answer"):
        two.run(_stop_on_one, timeout=900)  # longer than a test may take: it is seen at once
    assert two.run(_sum, 1) == [2, 2]  # a new pool replaced the broken one


def test_a_port_is_none_that_others_get_who_ask_for_any():
    assert all(1024 <= free_port() < 32768 for _ in range(20))  # Linux gives those from there on


def test_no_process_is_left():
    with Ranks(2) as ranks:
        ranks.run(_sum, 1)
        pids = [process.pid for process, _ in ranks._workers]
    assert not any(psutil.pid_exists(pid) for pid in pids)
