"""Checkpoints of the sharded optimizer: whole and by shards, for any number of ranks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slipstream.errors import ModelError, UsageError
from slipstream.sharding.state import join_shards
from tests.harness.ranks import Ranks
from tests.harness.reference import digest
from tests.sharding.test_update import OPTIMIZERS, build, session_on, steps


def save(folder: Path, transport: str, half: bool) -> None:
    model = build()
    update = OPTIMIZERS["adam"](model.parameters())
    precision = {"precision": {"kind": "half_weights", "loss_scale": None}} if half else {}
    with session_on(model, update, transport, **precision) as session:
        steps(session, 0, 3)
        own = session.checkpoint(sharded=True)
        torch.save(own, folder / f"shard{session.rank}.pt")
        full = session.checkpoint()
        if session.rank == 0:
            torch.save(full, folder / "full.pt")


def resume(folder: Path, transport: str, how: str, half: bool) -> str:
    """Every rank trains on the same batches, so that the number of ranks does not matter."""
    full = torch.load(folder / "full.pt", weights_only=True)
    model = build()
    update = OPTIMIZERS["adam"](model.parameters())
    precision = {"precision": {"kind": "half_weights", "loss_scale": None}} if half else {}
    with session_on(model, update, transport, **precision) as session:
        if how == "full":
            session.restore(full)
        elif how == "torch":
            session.restore({"model": full["model"], "session": full["session"]})
            update.load_state_dict(full["optimizer"])
        else:
            session.restore(
                [torch.load(p, weights_only=True) for p in sorted(folder.glob("shard*.pt"))[::-1]]
            )
        for _ in range(2):
            torch.manual_seed(7)
            session.backward(session.model(torch.randn(2, 3, 6)))
            session.step()
    return digest(model)


@pytest.mark.parametrize("half", [False, True])
def test_a_state_goes_on_on_another_number_of_ranks(
    four: Ranks, two: Ranks, tmp_path: Path, half: bool
) -> None:
    four.run(save, tmp_path, "sharded", half)
    found = {
        (how, ranks.size): set(ranks.run(resume, tmp_path, "sharded", how, half))
        for how in ("full", "torch", "shards")
        for ranks in (four, two)
    }
    plain = set(two.run(resume, tmp_path, "direct", "full", half))
    assert len(plain) == 1
    assert set.union(*found.values()) == plain, found


def test_a_state_of_the_flat_transport_is_cut(two: Ranks, tmp_path: Path) -> None:
    two.run(save, tmp_path, "flat", False)
    assert set(two.run(resume, tmp_path, "sharded", "full", False)) == set(
        two.run(resume, tmp_path, "direct", "full", False)
    )


def shard(rank: int, ranks: int) -> dict[str, Any]:
    numbers = {"step": torch.tensor(1.0), "count": torch.ones(1)}
    state = {"state": {0: {**numbers, "m": torch.arange(2) + 2 * rank}}}
    return {"rank": rank, "ranks": ranks, "shapes": {0: ((2, 2), (2, 1))}, "optimizer": state}


def test_shares_join_in_any_order() -> None:
    joined = join_shards([shard(1, 2), shard(0, 2)])["state"][0]
    assert joined["m"].tolist() == [[0, 1], [2, 3]]
    assert joined["step"] == joined["count"] == 1


@pytest.mark.parametrize("present", [[], [0], [0, 0], [0, 1, 1]])
def test_missing_shares_are_named(present: list[int]) -> None:
    with pytest.raises(UsageError, match="once each"):
        join_shards([shard(rank, 2) for rank in present])


def load_another_share() -> None:
    model = build()
    update = OPTIMIZERS["adam"](model.parameters())
    with session_on(model, update, "sharded") as session:
        steps(session, 0, 1)
        state = session.checkpoint("optimizer")["optimizer"]
        state["state"][0]["exp_avg"] = torch.zeros(3)
        with pytest.raises(UsageError, match=r"session\.restore\(states\)"):
            update.load_state_dict(state)


def test_a_share_of_another_size_is_refused(two: Ranks) -> None:
    two.run(load_another_share)


def dense() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Every rank has an equal shard, as in most models."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(session: Any, model: nn.Module) -> None:
    torch.manual_seed(session.rank)
    session.backward(model(torch.randn(4, 16)).square().mean())
    session.step()


def a_part_is_not_given_out() -> None:
    model, update = dense()
    with session_on(model, update, "sharded") as session:
        train(session, model)
        for give_out in (
            update.state_dict,
            lambda: copy.deepcopy(update),
            lambda: copy.deepcopy(update.state),
            lambda: pickle.dumps(update),
            lambda: torch.save(update, io.BytesIO()),
        ):
            with pytest.raises(UsageError, match=rf"part of rank {session.rank} of 2") as caught:
                give_out()
            assert "session.checkpoint() on every rank" in str(caught.value)
        train(session, model)
    copy.deepcopy(update).load_state_dict(update.state_dict())  # closed: the whole


def test_a_part_that_looks_whole_is_not_given_out(two: Ranks) -> None:
    two.run(a_part_is_not_given_out)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(copy.deepcopy(state), file)
    file.seek(0)
    return torch.load(file)


def restore_optimizer(session: Any) -> Callable[[Any], None]:
    """Its part of a checkpoint alone."""
    return lambda state: session.restore({"optimizer": state})


def the_part_of_another_rank() -> None:
    model, update = dense()
    with session_on(model, update, "sharded") as session:
        train(session, model)
        mine = through_a_file(session.checkpoint("optimizer", sharded=True)["optimizer"])
        every: list[Any] = [None, None]
        dist.all_gather_object(every, mine)
        theirs = every[1 - session.rank]
        right = session.checkpoint("optimizer")["optimizer"]["state"][0]["momentum_buffer"].clone()
        for part in (theirs["optimizer"], theirs, mine):
            for load in (update.load_state_dict, restore_optimizer(session)):
                with pytest.raises(UsageError, match=r"session\.restore\(states\)"):
                    load(part)
        with pytest.raises(UsageError, match="is the part of rank"):
            session.restore({"optimizer": mine["optimizer"]})
        for load, state in (
            (update.load_state_dict, mine["optimizer"]),
            (session.restore, [{"optimizer": part} for part in every]),
        ):
            load(state)
            now = session.checkpoint("optimizer")["optimizer"]["state"][0]["momentum_buffer"]
            assert torch.equal(now, right)
    assert "slipstream_share" not in update.state_dict()
    session = session_on(*dense(), "direct")
    with pytest.raises(UsageError, match="allowed here: a whole state;"):
        session.restore({"optimizer": theirs["optimizer"]})
    session.close()


def test_the_part_of_another_rank_is_refused(two: Ranks) -> None:
    two.run(the_part_of_another_rank)


def of_two_layers(frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    model[0].requires_grad_(not frozen)
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad])


def state_of_other_parameters() -> None:
    """As of a run whose first layer was frozen."""
    model, update = of_two_layers(frozen=True)
    with session_on(model, update, "sharded") as session:
        train(session, model)
        state = session.checkpoint("optimizer")
    with (
        session_on(*of_two_layers(frozen=False), "sharded") as session,
        pytest.raises(ModelError, match="doesn't match the size of optimizer's group"),
    ):
        session.restore(state)


def test_the_state_of_other_parameters_is_refused_as_such(two: Ranks) -> None:
    two.run(state_of_other_parameters)


def after_an_error() -> None:
    """Its part is refused where it is saved, and goes on in a session of the same ranks."""
    model, update = dense()
    session = session_on(model, update, "sharded")
    train(session, model)
    model(torch.ones(1, 16))  # all has arrived
    session.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(UsageError, match="the other parts are lost"):
        update.state_dict()
    assert model.state_dict()
    with session_on(model, update, "sharded") as session:
        session.checkpoint("optimizer")["optimizer"]
        train(session, model)
    update.state_dict()


def test_a_part_that_an_error_has_left_is_refused(two: Ranks) -> None:
    two.run(after_an_error)


def broken_off_in_backward() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    split = {"split": {"kind": "by_index", "last": [1, 3]}}
    session = session_on(model, update, "sharded", gradients=split)
    train(session, model)
    loss = model(torch.ones(1, 16)).sum()

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    next(model.parameters()).register_hook(fail)  # the other layer is on its way
    with pytest.raises(ZeroDivisionError):
        session.backward(loss)
    with pytest.raises(UsageError, match="after a backward\\(\\) that has failed") as caught:
        session.checkpoint("optimizer")
    found = [str(caught.value), *session.checkpoint("model")["model"]]
    assert ("model" in session.checkpoint("model", "optimizer", sharded=True)) == (not session.rank)
    session.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    return found


def test_after_a_backward_that_has_failed_no_rank_waits_for_shares_of_others(two: Ranks) -> None:
    """As a callback does that saves where training fails; it hung."""
    for found in two.run(broken_off_in_backward):
        assert "sharded=True" in found[0]
        assert "0.weight" in found


def as_docs_show(path: Path, transport: str, steps: int, resume: bool) -> str:
    """The checkpoint of docs/session.md."""
    model, update = dense()
    with session_on(model, update, transport) as session:
        if resume:
            state = torch.load(path)
            session.restore(state)
        for _ in range(steps):
            train(session, model)
        state = session.checkpoint()
        if session.rank == 0:
            torch.save(state, path)
        dist.barrier()
    return digest(model)


def test_the_checkpoint_of_the_docs_goes_on_bit_for_bit(two: Ranks, tmp_path: Path) -> None:
    for transport in ("sharded", "flat"):
        path = tmp_path / transport
        whole = two.run(as_docs_show, path, transport, 4, False)
        two.run(as_docs_show, path, transport, 2, False)
        assert two.run(as_docs_show, path, transport, 2, True) == whole
