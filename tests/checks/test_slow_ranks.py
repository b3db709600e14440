"""Slow ranks are named while they are slow, and a slow link is not blamed on one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import slipstream
from slipstream.checks.slow_ranks import LOOKS, SlowRanks


def looks(*seconds: list[float]) -> list[str]:
    slow = SlowRanks()
    return [
        words
        for step, each in enumerate(seconds)
        for words in slow.look(dict(enumerate(each)), 10 * step)
    ]


EVEN, SLOW = [0.1, 0.11, 0.1, 0.09], [0.1, 0.11, 0.2, 0.09]


def test_a_slow_rank_is_named_once():
    said = looks(EVEN, *[SLOW] * (3 * LOOKS))
    assert said == [
        "rank 2 takes 2.0 times as long for an update as the other ranks, since update 10"
    ]


def test_it_is_taken_back():
    said = looks(*[SLOW] * LOOKS, *[EVEN] * LOOKS)
    assert said[1:] == [f"rank 2 is as fast as the others again, since update {10 * LOOKS}"]


@pytest.mark.parametrize("seconds", [[EVEN] * 9, [SLOW, EVEN] * 9, [[1.0] * 4, [9.0] * 4] * 9])
def test_even_ranks_and_moments_are_not_named(seconds):
    assert looks(*seconds) == []


def test_two_ranks_have_one_other():
    assert "as the other rank, since" in looks(*[[0.1, 0.3]] * LOOKS)[0]


def trains_slowly(folder: Path) -> str:
    """What rank 0 says where rank 1 sleeps in each update."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks = {"timeout": 6.0, "folder": str(folder)}
    said: list[str] = []
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        slipstream.accelerate(model, optimizer, strategy={"checks": checks}) as session,
    ):
        monkeypatch.setattr("sys.stderr.write", said.append)
        stop = torch.zeros(1)
        while not stop:
            session.backward(model(torch.ones(2, 4)).square().mean())
            session.step()
            time.sleep(0.03 * (1 + 2 * session.rank))
            if session.updates % 20 == 0:
                stop.fill_(bool(said) or session.updates > 2000)
                torch.distributed.broadcast(stop, 0)
    return "".join(said)


def test_a_slow_rank_of_a_run_is_named(two, tmp_path):
    said, _ = two.run(trains_slowly, tmp_path)
    assert said.startswith("slipstream: rank 1 takes ")
    assert "times as long for an update as the other rank, since update" in said
