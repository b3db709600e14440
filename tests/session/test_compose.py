"""A step of ``accelerate()`` that fails takes off what those before it have installed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.errors import ExchangeError, UsageError
from slipstream.session import compose
from tests.harness.ranks import PerRank, Ranks
from tests.memory.models import Blocks, rows

HALF = {"kind": "half_weights", "dtype": "bf16", "exchange": "fp32"}
DISK = {"to": "disk", "min_bytes": 0}
EVERYTHING = {
    "precision": HALF,
    "memory": {"recompute": {"budget": 0.5}, "offload": DISK},
    "trace": {"steps": 9},
}
WISHES: dict[str, dict[str, Any]] = {
    "autocast": {"precision": {"kind": "autocast", "dtype": "bf16"}},
    "half weights": {"precision": HALF},
    "every block": {"memory": {"recompute": {"every": 1}}},
    "every other block": {"memory": {"recompute": {"every": 2}}},
    "budget": {"memory": {"recompute": {"budget": 0.5}}},
    "offload": {"memory": {"offload": DISK}},
    "trace": {"trace": {"steps": 9}},
    "everything": EVERYTHING,
}
DGC = {"gradients": {"codec": {"kind": "dgc", "density": 0.5}}}
ADAPTIVE = {"gradients": {"codec": {"kind": "adaptive", "codec": "int8"}}}


class Broken(Exception):
    """What a step raises."""


def broken(*_: object, **__: object) -> None:
    raise Broken


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def in_training() -> tuple[nn.Module, torch.optim.SGD]:
    """A model and an optimizer with momentum, after an update and another backward."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(**rows(step)).backward()
        if not step:
            optimizer.step()
    return model, optimizer


def hooks_of(thing: object) -> dict[str, int]:
    """How many of each kind."""
    return {name: len(kept) for name, kept in vars(thing).items() if name.endswith("_hooks")}


def seen(model: nn.Module, optimizer: torch.optim.SGD) -> dict[str, Any]:
    """What a user could tell of them, and of the process."""
    kept = [buffer.clone() for buffer in model.buffers()]  # which a forward changes
    with torch.no_grad():
        output = model.eval()(**rows(9)).item()
    for buffer, value in zip(model.train().buffers(), kept, strict=True):
        buffer.copy_(value)
    groups = [{**group, "params": [*map(id, group["params"])]} for group in optimizer.param_groups]
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = {os.readlink(link) for link in links if os.path.exists(link)}
    return {
        "output": output,
        "modules": [(id(m), sorted(vars(m)), hooks_of(m)) for m in model.modules()],
        "tensors": [
            (name, id(t), t.dtype, t.tolist())
            for name, t in [*model.named_parameters(), *model.named_buffers()]
        ],
        "gradients": [
            (p.grad_dtype, None if p.grad is None else p.grad.tolist()) for p in model.parameters()
        ],
        "parameters' hooks": [bool(p._post_accumulate_grad_hooks) for p in model.parameters()],
        "groups": groups,
        "state": [
            {key: value.tolist() for key, value in optimizer.state[p].items()}
            for p in model.parameters()
        ],
        "optimizer": (sorted(vars(optimizer)), hooks_of(optimizer)),
        "files": {file for file in files if file[0] == "/"},  # gloo has its own time for sockets
        "threads": {t.name for t in threading.enumerate()},
    }


def check_trains(model: nn.Module, optimizer: torch.optim.SGD, strategy: dict[str, Any]) -> None:
    """A session trains, and leaves what any other would."""
    before = model.first.weight.tolist()  # type: ignore[union-attr]
    batches = [rows(step) for step in range(3)]
    with slipstream.accelerate(model, optimizer, batches, strategy) as session:
        for batch in session.loader:
            session.backward(session.model(**batch))
            assert session.step()
    assert model.first.weight.tolist() != before  # type: ignore[union-attr]


def check_left_alone(step: str, strategy: dict[str, Any], tmp: str) -> None:
    """Where ``step`` of the composition raises, all is as before; and then it can be done again."""
    if "trace" in strategy:
        strategy = {**strategy, "trace": {"steps": 9, "folder": tmp}}
    model, optimizer = in_training()
    before = seen(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, step, broken)
        with pytest.raises(Broken):
            slipstream.accelerate(model, optimizer, [rows(0)], strategy)
    after = seen(model, optimizer)
    assert [name for name in before if after[name] != before[name]] == []
    check_trains(model, optimizer, strategy)


@pytest.mark.parametrize(
    ("name", "step"),
    [*((name, "Session") for name in WISHES), ("everything", "MomentumCorrection")],
)
def test_a_late_failure_leaves_all_as_it_was(name: str, step: str, tmp_path: Any) -> None:
    check_left_alone(step, WISHES[name], str(tmp_path))


def test_clocks_that_cannot_be_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = in_training()
    monkeypatch.setattr(compose.Recorder, "align", broken)
    with pytest.raises(Broken):
        slipstream.accelerate(model, optimizer, strategy={"trace": {"steps": 1, "skip": 0}})
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("step", ["Engine", "SessionTracer", "Session"])
def test_also_on_two_ranks_with_a_codec(two: Ranks, step: str, tmp_path: Any) -> None:
    two.run(check_left_alone, step, {**DGC, **EVERYTHING}, str(tmp_path))


def lose_the_other(fails: bool, tmp: str) -> str:
    """One rank fails where all of them measure the network; what the other hears."""
    model, optimizer = in_training()
    before = seen(model, optimizer)
    strategy = {**ADAPTIVE, **EVERYTHING, "trace": {"steps": 9, "folder": tmp}}
    with pytest.MonkeyPatch.context() as patch:
        if fails:
            patch.setattr(compose, "measure", broken)
        try:
            slipstream.accelerate(model, optimizer, [rows(0)], strategy)
        except (Broken, ExchangeError) as error:
            heard = type(error).__name__
        after = seen(model, optimizer)
        assert [name for name in before if after[name] != before[name]] == []
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name)
        check_trains(model, optimizer, strategy)  # alone from here on
    return heard


def test_a_network_that_breaks_while_it_is_measured(two: Ranks, tmp_path: Any) -> None:
    heard = two.run(lose_the_other, PerRank(False, True), str(tmp_path), connect=False)
    assert heard == ["ExchangeError", "Broken"]


def groups_alive(fails: bool) -> list[bool]:
    """Of those that a session made, which is over but there still."""
    model, optimizer = in_training()
    made = []
    with pytest.MonkeyPatch.context() as patch:
        new = dist.new_group

        def noted(*args: Any, **kwargs: Any) -> Any:
            group = new(*args, **kwargs)
            made.append(ref(group))
            return group

        patch.setattr(dist, "new_group", noted)
        if fails:
            patch.setattr(compose, "Session", broken)
        with (
            suppress(Broken),
            slipstream.accelerate(
                model, optimizer, [rows(0)], {**DGC, **EVERYTHING, "trace": {}}
            ) as session,
        ):
            session.backward(session.model(**rows(0)))
    return [group() is not None for group in made]


@pytest.mark.parametrize("fails", [False, True])
def test_process_groups_end_with_the_session_or_the_failure(two: Ranks, fails: bool) -> None:
    for alive in two.run(groups_alive, fails):
        assert len(alive) == 4  # for agreements, for single collectives, for two threads
        assert not any(alive)


def half_shared() -> None:
    model, optimizer = in_training()
    strategy = {"parallel": {"pipeline": {"ranks": 2, "cut": ["blocks.2"]}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "MomentumCorrection", broken)
        with pytest.raises(Broken):
            slipstream.accelerate(model, optimizer, strategy=strategy)
    slipstream.accelerate(model, optimizer)


def test_a_model_that_was_shared_stays_in_parts(two: Ranks) -> None:
    for error in two.fail(half_shared).values():
        assert type(error) is UsageError
        assert "build it anew" in str(error)
