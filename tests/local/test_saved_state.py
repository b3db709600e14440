"""A state goes on in the model that it is of, and nothing of another state is left."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from slipstream.errors import UsageError
from slipstream.local.model import LocalModel
from slipstream.local.training import LocalTraining
from slipstream.session.session import Session
from tests.harness.ranks import Ranks
from tests.local.reference import flat
from tests.local.test_training import adamw, build, loss_of, sgd


def training(session: Any) -> LocalTraining:
    whole = session._loop.sharding.model
    assert isinstance(whole, LocalModel)
    assert whole.training is not None
    return whole.training


def layers(*names: str) -> nn.Module:
    torch.manual_seed(0)
    made = {name: nn.Linear(4, 4) for name in ("first", "second")}
    return nn.Sequential(OrderedDict((name, made[name]) for name in names))


def test_outer_parameters_in_another_order_are_refused() -> None:
    model = layers("first", "second")
    with slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 2}}) as session:
        saved = session.checkpoint()
    other = layers("second", "first")
    with slipstream.accelerate(other, sgd(other), None, {"local": {"steps": 2}}) as session:
        with pytest.raises(UsageError, match=r"have first\.weight where .* second\.weight"):
            session.restore({"session": saved["session"]})
        for meeting in saved["session"]["local"]["meetings"]:
            del meeting["names"]  # of an earlier version
        session.restore({"session": saved["session"]})


class Counting(nn.Linear):
    """A layer that keeps more than tensors."""

    count: Any = None

    def get_extra_state(self) -> Any:
        return {"n": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["n"]


def test_a_module_may_keep_more_than_tensors() -> None:
    model = Counting(4, 1)
    with slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 2}}) as session:
        model.count = torch.ones(2)
        session.backward(model(torch.ones(2, 4)).mean())
        session.step()
        part = session.checkpoint(sharded=True)
        whole = session.checkpoint()
        model.count += 1
        session.restore([part])
        assert model.count.tolist() == [1, 1]
        assert whole["model"]["_extra_state"]["n"].tolist() == [1, 1]


def run(session: Session, model: nn.Module, updates: int) -> None:
    for update in range(updates):
        session.backward(loss_of(model, 0, update))
        session.step()


def test_a_part_that_was_refused_is_not_taken_later() -> None:
    model = build()
    with slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 4}}) as session:
        run(session, model, 2)
        part = session.checkpoint(sharded=True)
        run(session, model, 1)
        whole = session.checkpoint()
        session.restore([{key: part[key] for key in ("model", "optimizer")}])
        session.restore(whole)
        assert torch.equal(flat(model.parameters()), flat(build().parameters()))
        assert training(session)._rounds.weights == [0]


def test_a_state_without_a_part_of_its_own_has_no_updates_of_its_own() -> None:
    model = build()
    with slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 4}}) as session:
        run(session, model, 1)
        saved = session.checkpoint()
        run(session, model, 2)
        session.load_state_dict(saved["session"])
        model.load_state_dict(saved["model"])
        assert training(session)._rounds.weights == [0]


def gone_on(saved: dict[str, Any], first: str) -> torch.Tensor:
    """Parameters of a plain resume, which loads the model or the session first."""
    model = layers("first", "second")
    nn.init.zeros_(model.get_parameter("first.weight"))  # as a process begins: with other values
    local = {"steps": 4, "delay": 2}
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        load = {"model": model.load_state_dict, "session": session.load_state_dict}
        for part in sorted(load, reverse=first == "session"):
            load[part](saved[part])
        for _ in range(6):
            session.backward(model(torch.ones(2, 4)).square().mean())
            session.step()
    return flat(model.parameters())


def test_a_model_may_be_loaded_after_the_session_while_a_change_travels() -> None:
    model = layers("first", "second")
    local = {"steps": 4, "delay": 2}
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        for _ in range(5):
            session.backward(model(torch.ones(2, 4)).square().mean())
            session.step()
        saved = session.checkpoint()
        [meeting] = saved["session"]["local"]["meetings"]
        assert meeting["due"] is not None
        saved["model"] = {name: value.clone() for name, value in saved["model"].items()}
    assert torch.equal(gone_on(saved, "session"), gone_on(saved, "model"))


def under_local(updates: int) -> dict[str, Any]:
    """The part of this rank."""
    model = layers("first", "second")
    with slipstream.accelerate(model, adamw(model), None, {"local": {"steps": 2}}) as session:
        for update in range(updates):
            session.backward(model(torch.full((2, 4), 1.0 + update + session.rank)).mean())
            session.step()
        return session.checkpoint(sharded=True)


def averaging(parts: list[Any], strategy: Any) -> tuple[int, dict[str, Any], list[str]]:
    model = layers("first", "second")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with slipstream.accelerate(model, adamw(model), None, strategy) as session:
            session.restore(copy.deepcopy(parts))  # whose memory ranks share
            session.backward(model(torch.ones(2, 4)).mean())
            session.step()
            return session.updates, session.checkpoint(), [str(one.message) for one in caught]


@pytest.mark.parametrize("transport", ["flat", "sharded"])
def test_a_run_that_averages_gradients_goes_on_from_one_that_met(
    two: Ranks, transport: str
) -> None:
    parts = two.run(under_local, 3)
    first = parts[0]
    strategy = {"gradients": {"transport": transport}}
    (updates, state, (warning,)), (_, other, none) = two.run(averaging, parts, strategy)
    assert updates == 4
    assert "with the optimizer state of rank 0" in warning
    assert not none
    model = layers("first", "second")
    model.load_state_dict(first["model"])
    optimizer = adamw(model)
    optimizer.load_state_dict(first["optimizer"]["optimizer"])
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state["model"][name], value)
        assert torch.equal(state["model"][name], other["model"][name])
