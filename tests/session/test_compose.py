"""A step of ``accelerate()`` that fails takes off what those before it have installed."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.errors import ExchangeError, UsageError
from slipstream.session import compose, exchanging
from slipstream.trace.recorder import Recorder
from tests.harness.ranks import PerRank, Ranks
from tests.memory.models import Blocks, rows

HALF = {"kind": "half_weights", "dtype": "bf16", "exchange": "fp32"}
CHAINS = {"fuse_bn_act": True, "fuse_add_act": True, "fuse_relu_depthwise": True}
DISK = {"to": "disk", "min_bytes": 0}
EVERYTHING = {
    "precision": HALF,
    "memory": {"recompute": {"budget": 0.5}, "offload": DISK},
    "compute": {"fuse_optimizer": True, **CHAINS},
    "trace": {"steps": 9},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "autocast": {"precision": {"kind": "autocast", "dtype": "bf16"}},
    "half weights": {"precision": HALF},
    "fused chains": {"compute": CHAINS},
    "fused optimizer": {"compute": {"fuse_optimizer": True}},
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
    """Raised by a step of the composition."""


class WithChain(Blocks):
    """Blocks before a head that holds a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def broken(*_: object, **__: object) -> None:
    raise Broken


def in_training() -> tuple[nn.Module, torch.optim.SGD]:
    """A model and an optimizer with momentum, after an update and another backward."""
    torch.manual_seed(0)
    model = WithChain()
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


def visible_state(model: nn.Module, optimizer: torch.optim.SGD) -> dict[str, Any]:
    """What a user can see of them, and of the process."""
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
    """A session trains the model."""
    before = model.first.weight.tolist()  # type: ignore[union-attr]
    batches = [rows(step) for step in range(3)]
    with slipstream.accelerate(model, optimizer, batches, strategy) as session:
        for batch in session.loader:
            session.backward(session.model(**batch))
            assert session.step()
    assert model.first.weight.tolist() != before  # type: ignore[union-attr]


def check_left_alone(step: str, strategy: dict[str, Any], tmp: str) -> None:
    """If ``step`` of the composition raises, all is as before, and a second attempt works."""
    if "trace" in strategy:
        strategy = {**strategy, "trace": {"steps": 9, "folder": tmp}}
    model, optimizer = in_training()
    before = visible_state(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose if hasattr(compose, step) else exchanging, step, broken)
        with pytest.raises(Broken):
            slipstream.accelerate(model, optimizer, [rows(0)], strategy)
    after = visible_state(model, optimizer)
    assert [name for name in before if after[name] != before[name]] == []
    check_trains(model, optimizer, strategy)


@pytest.mark.parametrize(
    ("name", "step"),
    [*((name, "Session") for name in CONFIGS), ("everything", "MomentumCorrection")],
)
def test_a_late_failure_leaves_all_as_it_was(name: str, step: str, tmp_path: Any) -> None:
    check_left_alone(step, CONFIGS[name], str(tmp_path))


def test_clocks_that_cannot_be_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = in_training()
    monkeypatch.setattr(Recorder, "align", broken)
    with pytest.raises(Broken):
        slipstream.accelerate(model, optimizer, strategy={"trace": {"steps": 1, "skip": 0}})
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("step", ["Engine", "SessionTracer", "Session"])
def test_also_on_two_ranks_with_a_codec(two: Ranks, step: str, tmp_path: Any) -> None:
    two.run(check_left_alone, step, {**DGC, **EVERYTHING}, str(tmp_path))


def measure_and_fail(fails: bool, tmp: str) -> str:
    """One rank fails while all of them measure the network; the errors of both."""
    model, optimizer = in_training()
    before = visible_state(model, optimizer)
    strategy = {**ADAPTIVE, **EVERYTHING, "trace": {"steps": 9, "folder": tmp}}
    with pytest.MonkeyPatch.context() as patch:
        if fails:
            patch.setattr(exchanging, "measure", broken)
        try:
            slipstream.accelerate(model, optimizer, [rows(0)], strategy)
        except (Broken, ExchangeError) as error:
            error_name = type(error).__name__
        after = visible_state(model, optimizer)
        assert [name for name in before if after[name] != before[name]] == []
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name)
        check_trains(model, optimizer, strategy)  # alone from here on
    return error_name


def test_a_network_that_breaks_while_it_is_measured(two: Ranks, tmp_path: Any) -> None:
    error_name = two.run(measure_and_fail, PerRank(False, True), str(tmp_path), connect=False)
    assert error_name == ["ExchangeError", "Broken"]


def groups_alive(fails: bool) -> list[bool]:
    """Which of the groups that a session made are alive after its end."""
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


def fail_while_sharded() -> None:
    model, optimizer = in_training()
    strategy = {"parallel": {"pipeline": {"ranks": 2, "cut": ["blocks.2"]}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanging, "MomentumCorrection", broken)
        with pytest.raises(Broken):
            slipstream.accelerate(model, optimizer, strategy=strategy)
    slipstream.accelerate(model, optimizer)


def test_a_model_left_sharded_is_refused(two: Ranks) -> None:
    for error in two.fail(fail_while_sharded).values():
        assert type(error) is UsageError
        assert "build it anew" in str(error)
