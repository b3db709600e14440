"""``session.checkpoint()`` and ``restore()``: parts, mistakes, and the place in the data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import slipstream
from slipstream.errors import MismatchError, UsageError
from tests.harness.ranks import Ranks


def opened(loader: Any = None, strategy: Any = None) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return slipstream.accelerate(model, optimizer, loader, strategy)


def test_parts_are_asked_for_and_restored_one_by_one() -> None:
    with opened() as session:
        assert list(session.checkpoint()) == ["model", "optimizer", "session"]
        assert list(session.checkpoint("session", "model")) == ["model", "session"]
        session.restore({"model": {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}})
        assert session.model.weight.sum() == 2
        with pytest.raises(UsageError, match="no part 'weights'; allowed: model, optimizer, sess"):
            session.checkpoint("weights")
    with pytest.raises(UsageError, match="after close"):
        session.checkpoint()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weight": 1}, "this checkpoint has weight; allowed: model, optimizer, session"),
        ({}, "this checkpoint has nothing"),
        (
            {"model": {}, "epoch": 3, "optimizer": {}},
            r"has epoch, model, optimizer; .*restore\({p: state\[p\] for p in \['model', 'optim",
        ),
        (7, "this checkpoint is a int; pass what session.checkpoint"),
        ([3], "this checkpoint is a int"),
        ([{"optimizer": {"rank": 1, "ranks": 2}}], "optimizer.param_groups: None; allowed: a list"),
    ],
)
def test_what_is_no_checkpoint_is_refused(state: Any, words: str) -> None:
    with opened() as session, pytest.raises(UsageError, match=words):
        session.restore(state)


@pytest.mark.parametrize("strategy", [None, {"local": {"steps": 4, "fragments": 2, "delay": 1}}])
def test_parts_of_different_updates_are_refused(strategy: Any) -> None:
    """A run was killed while ranks wrote over their files."""
    with opened(strategy=strategy) as session:
        saved = []
        for _ in range(3):
            session.backward(session.model(torch.ones(4, 2)).square().mean())
            session.step()
            saved.append(session.checkpoint(sharded=True))
        with pytest.raises(UsageError, match=r"different updates, 2, 3, .*write its number into"):
            session.restore(saved[1:])


BATCHES = [torch.ones(2, 2), torch.zeros(2, 2)]
ONE_BIT = {"gradients": {"codec": "onebit"}}


def alone(verb: str, strategy: Any) -> str:
    """The first rank calls a verb, as inside of ``if session.rank == 0:``; the other one has begun
    its next epoch by then."""
    batches = [x + dist.get_rank() for x in BATCHES]
    session = opened(batches, strategy)
    saved = copy.deepcopy(session.checkpoint())
    for x in session.loader:
        session.backward(session.model(x).square().mean())
        session.step()
    calls = {
        "checkpoint": session.checkpoint,
        "state_dict": session.state_dict,
        "load_state_dict": partial(session.load_state_dict, saved["session"]),
        "restore": partial(session.restore, saved),
    }
    following = iter(session.loader)
    with pytest.raises(MismatchError) as caught:
        next(following) if session.rank else calls[verb]()
    session.__exit__(MismatchError, caught.value, None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("verb", "strategy"),
    [
        ("checkpoint", {"gradients": {"transport": "sharded"}}),
        ("checkpoint", ONE_BIT),
        ("state_dict", ONE_BIT),
        ("load_state_dict", None),
        ("restore", None),
    ],
)
def test_a_verb_of_all_ranks_that_one_calls_alone_is_named(
    two: Ranks, verb: str, strategy: Any
) -> None:
    """gloo ended the other rank's process, or it read numbers out of the first one's words."""
    found = two.run(alone, verb, strategy)
    assert found[0] == found[1]
    assert f"rank 0 session.{verb}(), rank 1 the next batch of session.loader" in found[0]
    assert f"call session.{verb}() on all ranks" in found[0]


def another(part: str) -> str:
    """Each rank restores what it has found on its own disk."""
    with opened() as session:
        saved = session.checkpoint("model", "optimizer")
        session.restore(saved)
        if part == "model":
            saved["model"] = {name: t + session.rank for name, t in saved["model"].items()}
        else:
            momentum = torch.ones(1, 2) * session.rank
            saved["optimizer"]["state"] = {0: {"momentum_buffer": momentum}}
        with pytest.raises(MismatchError) as caught:
            session.restore(saved)
        assert all(map(torch.equal, session.model.parameters(), opened_values()))
    return str(caught.value)


def opened_values() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [*nn.Linear(2, 1).parameters()]


TIED: dict[str, dict[str, Any]] = {
    "half weights": {"precision": "half_weights"},
    "sharded half weights": {
        "gradients": {"transport": "sharded"},
        "precision": "half_weights",
    },
    "local": {"local": {"steps": 4}},
}


def ties(strategy: dict[str, Any]) -> bool:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        state = session.checkpoint("model")["model"]
    return state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


@pytest.mark.parametrize("strategy", TIED.values(), ids=TIED)
def test_a_tied_weight_is_one_in_a_checkpoint(two: Ranks, strategy: dict[str, Any]) -> None:
    assert two.run(ties, strategy) == [True, True]


@pytest.mark.parametrize(
    ("part", "words"), [("model", "the parameters"), ("optimizer", "the optimizer's state")]
)
def test_ranks_load_the_same(two: Ranks, part: str, words: str) -> None:
    for text in two.run(another, part):
        assert f"rank 1 differs from rank 0 in {words} to load" in text


class Stateful(list[int]):
    """A loader that keeps its place itself, as torchdata's does."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < len(self):
            self.at += 1
            yield self[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Texts(list[str]):
    """Samples that say how long they are."""

    @property
    def lengths(self) -> list[int]:
        return [*map(len, self)]

    def loader(self) -> DataLoader[str]:
        dataset: Any = self
        return DataLoader(dataset, batch_size=2)


@pytest.mark.parametrize("kind", [list, Stateful])
def test_a_pass_goes_on_where_it_was(kind: Any) -> None:
    with opened(kind(range(7))) as session:
        passed = iter(session.loader)
        before = [next(passed) for _ in range(3)]
        saved = session.checkpoint()
    with opened(kind(range(7))) as session:
        session.restore(saved)
        assert [*before, *session.loader] == [*range(7)]


@pytest.mark.parametrize("saved_by", ["stateful", "balanced", "plain"])
def test_a_place_that_this_run_cannot_go_to_is_a_warning(saved_by: str) -> None:
    """So is none that is the begin of an epoch."""
    balanced = {"data": {"balance": {}}}
    with opened(Texts("abcdef").loader(), balanced if saved_by == "balanced" else None) as session:
        first = session.checkpoint()
        next(passed := iter(session.loader))
        saved = session.checkpoint()
        del passed
    if saved_by == "stateful":
        saved["session"]["data"] = {"own": {"at": 2}}
    other = balanced if saved_by == "plain" else None
    with opened(Texts("abcdef").loader(), other) as session:
        anew = "place in the data .* so the epoch begins anew"
        with pytest.warns(UserWarning, match=anew) as caught:
            session.restore(saved)
        assert caught[0].filename == __file__
        if saved_by != "stateful":
            session.restore(first)
        assert [*session.loader] == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_a_pass_that_is_over_or_was_left_is_not_gone_on_with() -> None:
    with opened([*range(4)]) as session:
        for _ in session.loader:
            pass
        assert session.checkpoint()["session"]["data"]["batches"] == 0
        for _ in session.loader:
            break
        saved = session.checkpoint()
        assert saved["session"]["data"]["batches"] == 0
        session.restore(saved)
        assert [*session.loader] == [*range(4)]


def test_two_sessions_on_one_loader_skip_together() -> None:
    def pair(saved: Any) -> tuple[list[int], Any]:
        with opened([*range(5)]) as leader, opened(leader.loader) as follower:
            if saved is not None:
                leader.restore(saved[0])
                follower.restore(saved[1])
            seen = []
            for batch in follower.loader:
                seen.append(batch)
                if saved is None and len(seen) == 2:
                    return seen, (leader.checkpoint(), follower.checkpoint())
            return seen, None

    first, saved = pair(None)
    rest, _ = pair(saved)
    assert first + rest == [*range(5)]


@pytest.mark.parametrize("parts", [(), ("model",), ("model", "optimizer")], ids=str)
def test_a_state_that_is_the_model_itself_is_refused_once_it_has_trained(parts: Any) -> None:
    with opened() as session:
        good = session.checkpoint(*parts)
        session.restore(good)  # nothing has changed yet
        kept = copy.deepcopy(good)
        values = [p.detach().clone() for p in session.model.parameters()]
        session.backward(session.model(torch.ones(1, 2)).sum())
        session.step()
        with pytest.raises(UsageError, match=r"the model itself.*copy\.deepcopy"):
            session.restore(good)
        session.restore(kept)
        assert all(map(torch.equal, session.model.parameters(), values))


def test_a_state_whose_tensors_became_the_parameters_is_restored() -> None:
    """``load_state_dict(assign=True)``, as large models are loaded, then the rest of the state."""
    with opened() as session:
        session.backward(session.model(torch.ones(1, 2)).sum())
        session.step()
        state = copy.deepcopy(session.checkpoint())
    model = nn.Linear(2, 1)
    model.load_state_dict(state["model"], assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with slipstream.accelerate(model, optimizer) as session:
        session.restore(state)
        assert session.updates == 1


def test_nothing_is_loaded_or_gathered_where_part_of_it_is_refused() -> None:
    with opened() as session:
        saved = session.checkpoint()
        saved["model"] = {"weight": torch.full((1, 2), 7.0), "bias": torch.zeros(1)}
        with pytest.raises(UsageError, match="this state has version 0"):
            session.restore({**saved, "session": {**saved["session"], "version": 0}})
        session.backward(session.model(torch.ones(1, 2)).sum())
        with pytest.raises(UsageError, match=r"restore\(\) after a backward\(\) that no update"):
            session.restore(saved)
        with pytest.raises(UsageError, match=r"checkpoint\(\) inside an accumulation window"):
            session.checkpoint()
        assert list(session.checkpoint("model")) == ["model"]
        assert (session.model.weight != 7).all()
        session.step()


def uneven(saved: Any) -> tuple[list[int], Any]:
    """Batches of a pass, or of the rest of one: rank 1 has two of its own, rank 0 five."""
    count = 2 if dist.get_rank() else 5
    with opened([*range(count)]) as session:
        if saved is not None:
            session.restore(saved)
        seen = []
        for batch in session.loader:
            seen.append(batch)
            session.backward(session.model(torch.ones(1, 2)).sum())
            session.step()
            if saved is None and len(seen) == 3:
                return seen, session.checkpoint()
        return seen, None


def resumed() -> list[int]:
    first, saved = uneven(None)
    rest, _ = uneven(saved)
    return first + rest


def test_also_where_a_rank_has_run_out() -> None:
    with Ranks(2) as two:
        assert two.run(resumed) == [[0, 1, 2, 3, 4], [0, 1, 1, 1, 1]]
