"""From one session to the next: a resumed run goes on bit for bit, a closed one leaves nothing."""

from __future__ import annotations

import copy
import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.errors import ExchangeError, MismatchError, UsageError
from tests.harness.models import MODELS
from tests.harness.ranks import PerRank
from tests.harness.reference import OPTIMIZERS, build, digest, distance

NAMES = ["mlp", "conv_bn", "sparse", "changing_order", "checkpoint_reentrant_shared"]
SPLIT = {"kind": "by_bytes", "megabytes": 100 / 2**20, "first_megabytes": None}


def accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, **trace: Any) -> Any:
    strategy = {"gradients": {"split": SPLIT}, "trace": trace}
    return slipstream.accelerate(model, optimizer, None, strategy)


def train(session: Any, name: str, steps: range) -> None:
    for step in steps:
        session.backward(session.model(*MODELS[name].batch(dist.get_rank(), step)))
        session.step()


def resume(name: str) -> dict[str, Any]:
    """Six steps at a stretch; three and three with the state of the session, and without it."""
    model = build(MODELS[name])
    optimizer = OPTIMIZERS["sgd"](model)
    with accelerate(model, optimizer) as session:
        assert session.state_dict()["ready_order"] is None
        train(session, name, range(3))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
        segments = session.segments
        train(session, name, range(3, 6))
        assert session.state_dict() == {**saved[2], "steps": 6}
    found: dict[str, Any] = {"bits": digest(model), "state": saved[2]}
    for with_state in (True, False):
        again = build(MODELS[name], seed=7)
        optimizer = OPTIMIZERS["sgd"](again)
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # else it would train on them
        with accelerate(again, optimizer) as session:
            if with_state:
                session.load_state_dict(saved[2])
                assert session.segments == segments
            train(session, name, range(3, 6))
            found[f"same segments, state {with_state}"] = session.segments == segments
        found[f"bits, state {with_state}"] = digest(again)
        found[f"distance, state {with_state}"] = distance(again, model)
    return found


@pytest.mark.parametrize("world", ["two", "four"])
@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_goes_on_bit_for_bit(request, world, name):
    by_rank = request.getfixturevalue(world).run(resume, name)
    assert all(found == by_rank[0] for found in by_rank)
    for found in by_rank:
        assert found["bits"] == found["bits, state True"]
        assert found["distance, state False"] <= 1
        # The order of this model at step 3 is another than at step 0: only the state knows.
        assert found["same segments, state False"] == (name != "changing_order")


def load(kind: str) -> None:
    model = build(MODELS["mlp"])
    with accelerate(model, OPTIMIZERS["sgd"](model)) as session:
        train(session, "mlp", range(1))
        state = session.state_dict()
        if kind == "another model's":
            state["ready_order"]["names"][0] = "nowhere.weight"
        if kind == "another version's":
            state["version"] = 3
        if kind == "later":
            state["steps"] = 9
        session.load_state_dict(state)
        train(session, "mlp", range(1, 2))


def test_wrong_states_are_refused_on_every_rank(two):
    for kind in ("another model's", "another version's"):
        assert {type(e) for e in two.fail(load, kind).values()} == {UsageError}
    errors = two.fail(load, PerRank("right", "another model's"))
    assert [type(errors[rank]) for rank in range(2)] == [MismatchError, UsageError]
    assert "nowhere.weight" in str(errors[1])
    assert "rank 1 cannot go on" in str(errors[0])
    errors = two.fail(load, PerRank("right", "later"))
    assert {type(e) for e in errors.values()} == {MismatchError}
    assert two.run(load, "later") == [None, None]


def lose_a_rank_after_loading() -> None:
    model = build(MODELS["mlp"])
    with accelerate(model, OPTIMIZERS["sgd"](model)) as session:
        train(session, "mlp", range(1))
        session.load_state_dict({**session.state_dict(), "steps": 41})
        if dist.get_rank() == 1:
            raise KeyError("a bad sample")
        train(session, "mlp", range(1, 2))


def test_steps_go_on_counting(two):
    errors = two.fail(lose_a_rank_after_loading)
    assert isinstance(errors[0], ExchangeError)
    assert "rank 0, step 41" in str(errors[0])


def threads() -> set[tuple[str, str]]:
    """Id and name of this process's threads, those of the backend included."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.add((task.name, (task / "comm").read_text().strip()))
        except OSError:  # it has ended
            continue
    return found


def left_since(before: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Threads of other ids than before, once there is none, or after a while."""
    ids = {number for number, _ in before}
    give_up = time.monotonic() + 60
    while True:
        new = {(number, name) for number, name in threads() if number not in ids}
        if not new or time.monotonic() > give_up:
            return new
        time.sleep(0.01)


def open_and_close(name: str, traced: bool, folder: str) -> None:
    case, rank = MODELS[name], dist.get_rank()
    trace = {"steps": 2, "skip": 1, "folder": folder} if traced else {}
    model = build(case)
    keys = list(model.state_dict())
    optimizer = OPTIMIZERS["sgd"](model)
    model(*case.batch(rank, 0)).backward()  # autograd's own threads are there before
    optimizer.zero_grad()
    before = threads()
    for again in range(2):
        session = accelerate(model, optimizer, **trace)
        with pytest.raises(UsageError, match="accelerated already"):
            slipstream.accelerate(model, optimizer)
        with pytest.raises(UsageError, match="accelerated already"):
            slipstream.accelerate(nn.Sequential(model), optimizer)
        assert threads() - before
        assert list(model.state_dict()) == keys
        train(session, name, range(2 * again, 2 * again + 2))
        session.backward(model(*case.batch(rank, 9)))
        session.close()
        session.close()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        for gradient in gradients:
            if not gradient.is_sparse:
                assert gradient.untyped_storage().nbytes() == gradient.nbytes
        for verb in (session.step, session.state_dict, lambda: session.backward(torch.ones(()))):  # noqa: B023
            with pytest.raises(UsageError, match=r"after close\(\)"):
                verb()
        optimizer.zero_grad()
        assert not (left := left_since(before)), left
    assert list(model.state_dict()) == keys
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks
    alone = build(case)
    alone.load_state_dict(model.state_dict())
    for module in (model, alone):
        module(*case.batch(rank, 5)).backward()
    assert digest(model) == digest(alone)
    dist.barrier()  # the script's own group still works


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", ["mlp", "conv_bn", "sparse"])
def test_nothing_is_left_after_close(two, name, traced, tmp_path):
    two.run(open_and_close, name, traced, str(tmp_path))
    assert (tmp_path / "trace.json").exists() == traced


def threads_left_by_meetings(delay: int) -> set[tuple[str, str]]:
    model = build(MODELS["mlp"])
    optimizer = OPTIMIZERS["sgd"](model)
    model(*MODELS["mlp"].batch(dist.get_rank(), 0)).backward()
    optimizer.zero_grad()
    before = threads()
    gc.disable()
    try:
        local = {"steps": 2, "delay": delay}
        with slipstream.accelerate(model, optimizer, None, {"local": local}) as session:
            train(session, "mlp", range(4))
        return left_since(before)
    finally:
        gc.enable()


@pytest.mark.parametrize("delay", [0, 1])
def test_meetings_leave_no_thread_for_the_garbage_collector(two, delay):
    assert two.run(threads_left_by_meetings, delay) == [set(), set()]


def fail_at_step_two(model: nn.Module) -> None:
    with accelerate(model, OPTIMIZERS["sgd"](model)) as session:
        train(session, "mlp", range(2))
        raise KeyError("of the script")


def fail_inside() -> None:
    model = build(MODELS["mlp"])
    before = threads()
    with pytest.raises(KeyError, match="of the script"):
        fail_at_step_two(model)
    assert not (left := left_since(before)), left
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    with accelerate(model, OPTIMIZERS["sgd"](model)) as session:
        train(session, "mlp", range(2))


def test_an_error_of_the_script_closes_the_session(two):
    two.run(fail_inside)


def own_world() -> tuple[int, bool]:
    """No process group of the script's: the session makes one and ends it."""
    model = build(MODELS["mlp"])
    with slipstream.accelerate(model, OPTIMIZERS["sgd"](model)) as session:
        train(session, "mlp", range(2))
    return int(os.environ["RANK"]), dist.is_initialized()


def test_the_world_that_the_session_made_ends_with_it(two):
    assert two.run(own_world, connect=False) == [(0, False), (1, False)]
