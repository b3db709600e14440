"""The trace that a session writes: its spans and marks, and when it is written."""

from __future__ import annotations

import os
import time
from contextlib import redirect_stderr
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.fusion.checks import useful_settings
from slipstream.session.tracing import batch_size
from slipstream.sharding.checks import why_not_sharded
from slipstream.strategy import Strategy, TraceConfig
from slipstream.trace import Trace, marks, read
from tests.harness.ranks import Ranks
from tests.session.training import BATCH, opened, update


def traced(folder: str, skip: int) -> list[bool]:
    strategy = {
        "gradients": {"split": "per_layer"},
        "trace": {"steps": 2, "skip": skip, "folder": folder},
    }
    written = []
    with opened(strategy, [BATCH] * 5) as session:
        for batch in session.loader:
            session.backward(session.model(batch).square().mean())
            session.step()
            written.append(os.path.exists(f"{folder}/trace.json"))
    return written


def uneven(folder: str) -> None:
    """Rank 0 has three batches, rank 1 has four; an update takes two."""
    batches = 3 + int(os.environ["RANK"])
    strategy = {
        "gradients": {"accumulate": 2},
        "trace": {"steps": 2, "skip": 0, "folder": folder},
    }
    with opened(strategy, [BATCH] * batches) as session:
        for batch in session.loader:
            session.backward(session.model(batch).square().mean())
            session.step()


SPANS = ["iteration", "data_wait", "forward", "backward", "optimizer"]


def check_trace(trace: Trace, ranks: int, spans: list[str], skip: int) -> None:
    found = {(e.rank, e.step, e.name) for e in trace.events}
    expected = {(r, skip + s, name) for r in range(ranks) for s in range(2) for name in spans}
    assert found == expected
    wholes = {(e.rank, e.step): e for e in trace.events if e.name == "iteration"}
    slack = 2 * max(trace.meta["clock_error"]) + 1e-6
    for event in trace.events:
        whole = wholes[event.rank, event.step]
        assert whole.start - slack <= event.start <= event.end <= whole.end + slack, event


@pytest.mark.parametrize("skip", [0, 2])
def test_one_process_writes_its_trace(tmp_path: Path, skip: int) -> None:
    written = traced(str(tmp_path / "new"), skip)
    assert written == [step > skip for step in range(5)]
    trace = read(tmp_path / "new" / "trace.json")
    check_trace(trace, 1, SPANS, skip)
    assert {m.name for m in marks(trace.events)} == {"fp_start", "bp_end", "iteration_end"}


def test_ranks_train_on_where_the_trace_cannot_be_written(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    written = two.run(traced, str(tmp_path / "file" / "traces"), 0)
    assert written == [[False] * 5] * 2


@pytest.mark.parametrize("skip", [0, 2])
def test_all_ranks_write_one_trace(two: Ranks, tmp_path: Path, skip: int) -> None:
    first, _ = two.run(traced, str(tmp_path), skip)
    assert first == [step > skip for step in range(5)]
    trace = read(tmp_path / "trace.json")
    check_trace(trace, 2, [*SPANS, "allreduce1", "allreduce2"], skip)
    assert {m.name for m in marks(trace.events)} == {
        "fp_start",
        "bp_end",
        "allreduce1_start",
        "allreduce1_end",
        "allreduce2_start",
        "allreduce2_end",
        "iteration_end",
    }
    assert trace.meta["world_size"] == 2
    last, first_layer = ({*s["gradients"]} for s in trace.meta["segments"])
    assert (last, first_layer) == ({"2.weight", "2.bias"}, {"0.weight", "0.bias"})


def test_a_trace_says_when_each_gradient_was_ready(two: Ranks, tmp_path: Path) -> None:
    two.run(traced, str(tmp_path), 0)
    trace = read(tmp_path / "trace.json")
    names = [gradient["name"] for gradient in trace.meta["gradients"]]
    assert names == [name for s in trace.meta["segments"] for name in s["gradients"]]
    carried = [gradient["bytes"] for gradient in trace.meta["gradients"]]
    assert sum(carried) == sum(segment["bytes"] for segment in trace.meta["segments"]) > 0
    backward = [event for event in trace.events if event.name == "backward"]
    assert len(backward) == 4  # two steps of two ranks
    for event in backward:
        offsets = event.args["gradients_ready"]
        assert len(offsets) == len(names)
        assert offsets == sorted(offsets)
        assert 0 < offsets[0] <= offsets[-1] <= event.duration
    iterations = [event for event in trace.events if event.name == "iteration"]
    assert {event.args["samples"] for event in iterations} == {len(BATCH)}


def test_samples_of_dummy_batches_do_not_count_and_those_of_a_window_add_up(
    two: Ranks, tmp_path: Path
) -> None:
    two.run(uneven, str(tmp_path))
    iterations = [e for e in read(tmp_path / "trace.json").events if e.name == "iteration"]
    samples = {(e.rank, e.step): e.args["samples"] for e in iterations}
    batch = len(BATCH)
    assert samples == {(0, 0): 2 * batch, (0, 1): batch, (1, 0): 2 * batch, (1, 1): 2 * batch}


def test_an_evaluation_between_updates_is_no_forward_of_the_training(tmp_path: Path) -> None:
    strategy = {"trace": {"steps": 2, "skip": 0, "folder": str(tmp_path)}}
    evaluated = []
    with opened(strategy, [BATCH] * 2) as session:
        for batch in session.loader:
            with torch.no_grad():
                session.model(torch.cat([batch] * 5))
            evaluated.append(time.perf_counter())
            session.backward(session.model(batch).square().mean())
            session.step()
    events = read(tmp_path / "trace.json").events
    assert {e.args["samples"] for e in events if e.name == "iteration"} == {len(BATCH)}
    starts = [e.start for e in events if e.name == "forward"]
    rounding = 1e-8  # a trace is written to the nanosecond
    assert all(start > end - rounding for start, end in zip(starts, evaluated, strict=True))


def test_norms_leave_sharded_out_of_a_search() -> None:
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = Strategy.load(
        {"gradients": {"transport": "auto"}, "trace": {"steps": 5, "norms": True}}
    )
    assert "trace.norms" in str(why_not_sharded(model, optimizer, strategy))
    without = strategy.model_copy(update={"trace": TraceConfig()})
    assert why_not_sharded(model, optimizer, without) is None


def test_a_trace_still_open_is_written_at_close(tmp_path: Path) -> None:
    with opened({"trace": {"steps": 9, "skip": 0, "folder": str(tmp_path)}}) as session:
        update(session)
        assert not (tmp_path / "trace.json").exists()
    assert {e.step for e in read(tmp_path / "trace.json").events} == {0}


def test_a_trace_of_one_process_that_fails_is_written(tmp_path: Path) -> None:
    session = opened({"trace": {"steps": 9, "skip": 0, "folder": str(tmp_path)}})
    update(session)
    session.__exit__(KeyError, KeyError("a bad sample"), None)
    assert {event.step for event in read(tmp_path / "trace.json").events} == {0}


def unfinished(folder: str, how: str) -> str:
    """What is said where ranks are gone before the last update of a trace."""
    session = opened({"trace": {"steps": 9, "skip": 0, "folder": folder}})
    update(session)
    with redirect_stderr(StringIO()) as said:
        if how == "the groups are gone":
            dist.destroy_process_group()
            session.close()
        else:
            session.__exit__(KeyError, KeyError("a bad sample"), None)
    return said.getvalue()


@pytest.mark.parametrize("how", ["the groups are gone", "an error"])
def test_a_trace_that_is_not_written_is_told(two: Ranks, tmp_path: Path, how: str) -> None:
    first, second = two.run(unfinished, str(tmp_path), how, connect=False)
    assert "no trace is written: the run has ended before trace.steps updates" in first
    assert not second
    assert not [*tmp_path.iterdir()]


def test_sessions_side_by_side_write_a_trace_each(tmp_path: Path) -> None:
    strategy = {"trace": {"steps": 2, "skip": 0, "folder": str(tmp_path)}}
    both = opened(strategy), opened(strategy)
    for session in 2 * both:
        update(session)
    for session in both:
        session.close()
    names = ["trace-2.json", "trace.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with opened(strategy) as session:  # as where a notebook runs its cell again
        update(session)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert {event.step for event in read(tmp_path / "trace.json").events} == {0}


def test_nothing_is_recorded_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a recorder was made")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slipstream.session.compose.Recorder", refuse)
    with opened() as session:
        update(session)
        assert not session.model._forward_pre_hooks
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError, match="a recorder was made"):
        opened({"trace": {"steps": 1}})


class Own(torch.optim.SGD):
    """Who knows what it does."""


def test_a_trace_tells_how_the_model_computes(tmp_path: Path) -> None:
    layers = torch.nn.Conv1d(1, 2, 1), torch.nn.BatchNorm1d(2), torch.nn.Linear(3, 5)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = {"trace": {"steps": 1, "skip": 0, "folder": str(tmp_path)}}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        session.backward(session.model(torch.ones(2, 1, 3)).sum())
        session.step()
    told = read(tmp_path / "trace.json").meta
    assert told["convolutions"] == 0.5
    assert told["useful_compute"] == ["fuse_bn_act", "fuse_optimizer"]
    assert not told["prefetchable"]  # there is no loader


class Residual(torch.nn.Sequential):
    """A forward with a sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + super().forward(x))


@pytest.mark.parametrize(("kind", "sums"), [(torch.nn.Sequential, False), (Residual, True)])
def test_sums_have_a_use_where_a_forward_is_not_one_of_torch(
    kind: type[torch.nn.Sequential], sums: bool
) -> None:
    model = torch.nn.Sequential(kind(torch.nn.Linear(3, 3), torch.nn.ReLU()))
    useful = useful_settings(model, torch.optim.SGD(model.parameters()))
    assert ("fuse_add_act" in useful) == sums


@pytest.mark.parametrize(("kind", "shardable"), [(torch.optim.SGD, True), (Own, False)])
def test_a_trace_tells_what_a_plan_must_know_of_the_optimizer(
    tmp_path: Path, kind: type[torch.optim.SGD], shardable: bool
) -> None:
    model = torch.nn.Linear(3, 5)
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    strategy = {"trace": {"steps": 1, "skip": 1, "folder": str(tmp_path)}}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        for _ in range(2):
            session.backward(session.model(torch.ones(2, 3)).sum())
            session.step()
    told = read(tmp_path / "trace.json").meta["optimizer"]
    assert told == {"bytes": 20 * 4, "shardable": shardable, "sgd": kind is torch.optim.SGD}


def with_losses(folder: str, norms: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of this rank by update, the mean of two backward passes, and what was trained."""
    strategy = {
        "gradients": {"accumulate": 2},
        "trace": {"steps": 3, "skip": 1, "folder": folder, "norms": norms},
    }
    rank, losses = int(os.environ.get("RANK", 0)), []
    with opened(strategy, [BATCH * (1 + rank)] * 8) as session:
        for batch in session.loader:
            loss = session.model(batch).square().mean()
            session.backward(loss)
            session.step()
            losses.append(loss.item())
        parameters = [p.detach().clone() for p in session.model.parameters()]
    return [(a + b) / 2 for a, b in pairwise(losses)][::2], parameters


def test_a_trace_has_losses_and_norms_and_norms_change_nothing(two: Ranks, tmp_path: Path) -> None:
    without = two.run(with_losses, str(tmp_path / "without"), False)
    found = two.run(with_losses, str(tmp_path / "norms"), True)
    for (_, trained), (_, same) in zip(without, found, strict=True):
        assert all(map(torch.equal, trained, same))
    trace = read(tmp_path / "norms" / "trace.json")
    wholes = {(e.rank, e.step): e.args for e in trace.events if e.name == "iteration"}
    for rank, (losses, _) in enumerate(found):
        seen = [wholes[rank, step]["loss"] for step in (1, 2, 3)]
        assert seen == pytest.approx(losses[1:], rel=1e-6)
    for step in (1, 2, 3):
        own = [wholes[rank, step]["own_norm2"] for rank in (0, 1)]
        average = {wholes[rank, step]["average_norm2"] for rank in (0, 1)}
        assert len(average) == 1
        # a mean is no longer than the mean of lengths
        assert 0 < average.pop() <= (own[0] + own[1]) / 2
    plain = read(tmp_path / "without" / "trace.json")
    assert not any("own_norm2" in event.args for event in plain.events)


@pytest.mark.parametrize(
    ("inputs", "samples"),
    [
        ([torch.ones(4, 2), torch.ones(9)], 4),
        ([{"x": torch.ones(4, 2), "y": torch.ones(4)}, 7], 4),
        ([[torch.ones(4, 2), torch.ones(4, 1)], 7], 4),
        ([[torch.ones(3, 8, 8), torch.ones(3, 9, 9)], [{"boxes": torch.ones(5, 4)}]], 0),
        ([torch.ones(()), "text"], 0),
    ],
    ids=["the first tensor", "a mapping", "a list", "a list of samples", "none"],
)
def test_samples_are_those_of_the_first_tensor_or_of_all_in_a_batch(
    inputs: list[object], samples: int
) -> None:
    assert batch_size(inputs) == samples
