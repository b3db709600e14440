"""A trace shows what ranks send when they meet, beside the iterations that it spans."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from statistics import fmean

import pytest
import torch

import slipstream
from slipstream.analysis.ascii_timeline import ascii_timeline
from slipstream.analysis.breakdown import breakdown
from slipstream.planner.progress.calibration import cosine_of_changes
from slipstream.report.bars import lay_out
from slipstream.report.runs import RecordedRun
from slipstream.trace import chrome
from slipstream.trace.event import ITERATION, MEETING_WAIT, Event, Trace, is_meeting
from slipstream.trace.recorder import Recorder
from slipstream.trace.timeline import timeline
from tests.harness.ranks import Ranks
from tests.local.reference import flat
from tests.local.test_training import build, loss_of, sgd


def traced(folder: str, local: dict[str, object]) -> None:
    model = build()
    strategy = {"local": local, "trace": {"steps": 8, "skip": 4, "folder": folder}}
    with slipstream.accelerate(model, sgd(model), None, strategy) as session:
        for update in range(14):
            session.backward(loss_of(model, session.rank, update))
            session.step()


@pytest.mark.parametrize("delay", [0, 2])
def test_each_meeting_is_there_with_its_wait(tmp_path: Path, delay: int) -> None:
    local = {"steps": 4, "fragments": 2, "delay": delay, "codec": "int4"}
    with Ranks(2) as two:
        two.run(traced, str(tmp_path), local)
    trace = chrome.read(tmp_path / "trace.json")
    sent = [event for event in trace.events if is_meeting(event.name)]
    assert {event.name for event in sent} == {"meeting1", "meeting2"}
    bounds = {(e.rank, e.step): e for e in trace.events if e.name == ITERATION}
    for event in sent:
        own = bounds[event.rank, event.step]
        rounding = 1e-8  # a trace is written to the nanosecond
        assert own.start - rounding <= event.start <= event.end <= own.end + rounding
        assert event.args["bytes"] > 0
        # sent after every second update, and there by the update that needs it
        assert event.step - delay <= event.args["update"] <= event.step
        assert event.args["update"] % 2 == 0
    waits = [event for event in trace.events if event.name == MEETING_WAIT]
    assert len(waits) >= 2 * 3
    iterations = timeline(trace.events)
    for one in iterations:
        parts = breakdown(one).parts
        waited = sum(e.duration for e in one.events if e.name == MEETING_WAIT)
        assert parts.exposed == pytest.approx(waited)


def first_changes(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank changes alone until ranks meet, and together with the others."""
    model = build()
    begin, alone = values(model), deepcopy(model)
    optimizer = sgd(alone)
    strategy = {
        "local": {"steps": 4, "lr": 1.0, "momentum": 0.0},
        "trace": {"steps": 5, "skip": 0, "folder": folder, "norms": True},
    }
    with slipstream.accelerate(model, sgd(model), None, strategy) as session:
        for update in range(5):  # a meeting belongs to the iteration behind it
            changes = values(alone) - begin, values(model) - begin
            session.backward(loss_of(model, session.rank, update))
            session.step()
            optimizer.zero_grad()
            loss_of(alone, session.rank, update).backward()
            optimizer.step()
    return changes


def values(model: torch.nn.Module) -> torch.Tensor:
    return flat([*model.parameters()])


def test_norms_tell_how_far_ranks_agree(tmp_path: Path) -> None:
    with Ranks(2) as two:
        changes = two.run(first_changes, str(tmp_path))
    trace = chrome.read(tmp_path / "trace.json")
    sent = {event.rank: event.args for event in trace.events if is_meeting(event.name)}
    for rank, (own, mean) in enumerate(changes):
        assert sent[rank]["own_norm2"] == pytest.approx(float(own.square().sum()))
        assert sent[rank]["average_norm2"] == pytest.approx(float(mean.square().sum()))
    (first, _), (second, _) = changes
    product = float(first @ second) / fmean(float(one.square().sum()) for one in (first, second))
    assert cosine_of_changes(trace) == pytest.approx(product)
    assert not any("own_norm2" in e.args for e in trace.events if e.name == ITERATION)


def test_drawings_show_a_meeting() -> None:
    events = [
        Event(ITERATION, 0, 2, 0.0, 0.5),
        Event("forward", 0, 2, 0.0, 0.2),
        Event("meeting1", 0, 2, 0.1, 0.4, {"bytes": 8, "update": 1}),
        Event(MEETING_WAIT, 0, 2, 0.2, 0.4),
    ]
    trace = Trace(tuple(events))
    [one] = timeline(trace.events)
    assert breakdown(one).parts.exposed == pytest.approx(0.2)
    drawn = str(ascii_timeline(one, width=31))
    assert "exchange |    mmmmmmmmmmmm    |" in drawn
    assert "m meeting" in drawn
    bars = lay_out(RecordedRun.of("local", trace, predicted=False)).bars
    assert [(b.kind, round(b.length, 3)) for b in bars if "meeting1" in b.tip[0]] == [
        ("hidden", 0.1), ("exposed", 0.2)
    ]  # fmt: skip


def test_a_meeting_that_takes_several_iterations_is_cut_at_their_bounds() -> None:
    recorder = Recorder(0, 1, 3, clock=iter(range(100)).__next__)
    for step in range(4):
        recorder.begin_step(step, 10.0 * step)
        if step == 3:
            recorder.add("meeting1", 5.0, 34.0, bytes=8)
        recorder.end_step(10.0 * step + 10.0)
    trace = recorder.gather()
    assert trace is not None
    pieces = [event for event in trace.events if is_meeting(event.name)]
    assert pieces == [
        Event("meeting1", 0, step, 10.0 * step, end, {"bytes": 8})
        for step, end in ((1, 20.0), (2, 30.0), (3, 34.0))
    ]
