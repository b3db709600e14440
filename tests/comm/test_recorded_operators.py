"""Operators in a trace: a span each, forward and backward, while a recorder is active."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import slipstream.comm as comm
from slipstream.analysis.summary import summary
from slipstream.trace.event import Trace
from slipstream.trace.recorder import Recorder
from tests.harness.ranks import Ranks

SIZE = 2


def record(check: bool) -> Trace | None:
    recorder = Recorder(dist.get_rank(), first_step=1, num_steps=1)
    world = dist.group.WORLD
    assert world is not None
    group = comm.group_of(world, check=check, recorder=recorder)
    for step in range(2):
        recorder.begin_step(step)
        x = torch.ones(6, requires_grad=True)
        comm.all_gather(x, group).sum().backward()
        part = comm.scatter(x, group)
        comm.backward(part.sum())
        recorder.end_step()
    return recorder.gather()


@pytest.mark.parametrize("check", [True, False])
def test_every_operator_of_a_recorded_step_is_a_span(check) -> None:
    with Ranks(SIZE) as team:
        trace, _ = team.run(record, check)
    for rank in range(SIZE):
        spans = [e for e in trace.events if e.rank == rank and e.name != "iteration"]
        assert [(e.name, e.step, e.args) for e in spans] == [
            ("all_gather", 1, {"bytes": 48, "ranks": 2}),
            ("backward of all_gather", 1, {"bytes": 48, "ranks": 2}),
            ("scatter", 1, {"bytes": 24 if rank == 0 else 12, "ranks": 2}),
            ("backward of scatter", 1, {"bytes": 24 if rank == 0 else 12, "ranks": 2}),
        ]
        assert all(e.duration > 0 for e in spans)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(summary(trace))
    table = shown.get().partition("Operators between ranks")[2]
    for name in ("all_gather", "backward of all_gather", "scatter", "backward of scatter"):
        assert re.search(rf"^ ?{name} +[\d.]+ +0\.00 +1 +2", table, re.MULTILINE), table
