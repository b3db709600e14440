"""Checkpoints of the sharded optimizer: whole and by shares, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import UsageError
from slipstream.sharding.model import join_shares
from tests.harness.ranks import Ranks
from tests.harness.reference import digest
from tests.sharding.test_update import OPTIMIZERS, build, session_on, steps


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def save(folder: Path, transport: str, half: bool) -> None:
    model = build()
    update = OPTIMIZERS["adam"](model.parameters())
    precision = {"precision": {"kind": "half_weights", "loss_scale": None}} if half else {}
    with session_on(model, update, transport, **precision) as session:
        steps(session, 0, 3)
        own = session.sharded_optimizer_state_dict()
        torch.save(own, folder / f"share{session.rank}.pt")
        full = {
            "model": session.full_state_dict(),
            "optimizer": session.full_optimizer_state_dict(),
            "session": session.state_dict(),
        }
        if session.rank == 0:
            torch.save(full, folder / "full.pt")


def resume(folder: Path, transport: str, how: str, half: bool) -> str:
    """Every rank trains on the same batches, so that the number of ranks does not matter."""
    full = torch.load(folder / "full.pt", weights_only=False)
    model = build()
    update = OPTIMIZERS["adam"](model.parameters())
    precision = {"precision": {"kind": "half_weights", "loss_scale": None}} if half else {}
    with session_on(model, update, transport, **precision) as session:
        session.load_full_state_dict(full["model"])
        session.load_state_dict(full["session"])
        if how == "full":
            session.load_full_optimizer_state_dict(full["optimizer"])
        elif how == "torch":
            update.load_state_dict(full["optimizer"])
        else:
            states = [torch.load(p, weights_only=False) for p in folder.glob("share*.pt")]
            session.load_sharded_optimizer_state_dict(states)
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
        for how in ("full", "torch", "shares")
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


def share(rank: int, ranks: int) -> dict[str, Any]:
    state = {"state": {0: {"step": torch.tensor(1.0), "m": torch.arange(2) + 2 * rank}}}
    return {"rank": rank, "ranks": ranks, "shapes": {0: ((2, 2), (2, 1))}, "optimizer": state}


def test_shares_join_in_any_order() -> None:
    joined = join_shares([share(1, 2), share(0, 2)])["state"][0]
    assert joined["m"].tolist() == [[0, 1], [2, 3]]
    assert joined["step"] == 1


@pytest.mark.parametrize("present", [[], [0], [0, 0], [0, 1, 1]])
def test_missing_shares_are_named(present: list[int]) -> None:
    with pytest.raises(UsageError, match="once each"):
        join_shares([share(rank, 2) for rank in present])


def load_another_share() -> None:
    model = build()
    update = OPTIMIZERS["adam"](model.parameters())
    with session_on(model, update, "sharded") as session:
        steps(session, 0, 1)
        state = update.state_dict()
        state["state"][0]["exp_avg"] = torch.zeros(3)
        with pytest.raises(UsageError, match="load_sharded_optimizer_state_dict"):
            update.load_state_dict(state)


def test_a_share_of_another_size_is_refused(two: Ranks) -> None:
    two.run(load_another_share)
