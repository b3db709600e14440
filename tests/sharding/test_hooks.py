"""Hooks of the optimizer's step see what they see in plain training, whenever registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.errors import UsageError
from tests.harness.ranks import Ranks
from tests.harness.reference import digest
from tests.sharding.test_update import (
    HALF,
    OPTIMIZERS,
    Model,
    batch,
    build,
    each,
    session_on,
    steps,
)


class Seen:
    """What hooks around a step see of the parameters."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []

    def begins(self, *_: object) -> None:
        self.before.append(self._all())

    def ends(self, *_: object) -> None:
        self.after.append(self._all())

    def _all(self) -> torch.Tensor:
        return torch.cat([p.detach().double().flatten() for p in self._model.parameters()])


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused optimizer": {"compute": {"fuse_optimizer": True}},
    "half weights": {"precision": {**HALF, "exchange": "fp32"}},
}


def hooked(transport: str, late: bool, settings: dict[str, Any]) -> Seen:
    model = build()
    update = OPTIMIZERS["adam"](model.parameters())
    seen = Seen(model)
    if not late:
        update.register_step_pre_hook(seen.begins)
        update.register_step_post_hook(seen.ends)
    with session_on(model, update, transport, **settings) as session:
        if late:
            steps(session, 0, 1)
            update.register_step_pre_hook(seen.begins)
            update.register_step_post_hook(seen.ends)
        steps(session, 1, 2)
    return seen


def compare(name: str, late: bool) -> None:
    direct, sharded = (hooked(t, late, SETTINGS[name]) for t in ("direct", "sharded"))
    whole = sum(p.numel() for p in build().parameters())
    assert [len(values) for values in sharded.before + sharded.after] == [whole] * 4
    if name != "half weights":  # there hooks of an earlier registration see fp32 masters
        assert all(map(torch.equal, direct.before, sharded.before))
        assert all(map(torch.equal, direct.after, sharded.after))


def test_hooks_see_whole_parameters(two: Ranks) -> None:
    two.run(each, compare, [(name, late) for name in SETTINGS for late in (False, True)])


def hook_at_the_last_moment() -> None:
    model = build()
    update = OPTIMIZERS["sgd"](model.parameters())
    with session_on(model, update, "sharded") as session:
        session.backward(model(batch(0, session.rank)))
        handle = update.register_step_pre_hook(lambda *_: None)
        with pytest.raises(UsageError, match="register it before session"):
            session.step()
        handle.remove()
        steps(session, 1, 1)


def test_a_hook_that_would_see_shares_is_refused(two: Ranks) -> None:
    two.run(hook_at_the_last_moment)


def gradients_in_hooks() -> None:
    model = build()
    update = OPTIMIZERS["sgd"](model.parameters())
    errors = []

    def norm(*_: object) -> None:
        with pytest.raises(UsageError, match="has only a shard of the average") as caught:
            torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            )
        errors.append(caught.value)

    update.register_step_pre_hook(norm)
    update.register_step_post_hook(norm)
    with session_on(model, update, "sharded") as session:
        steps(session, 0, 1)
    assert len(errors) == 2


def test_a_norm_of_shares_is_refused(two: Ranks) -> None:
    two.run(gradients_in_hooks)


class Decaying(torch.optim.SGD):
    """Changes gradients before and parameters after the step of its class, whose hooks run, too,
    where anybody has made a plain SGD."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.held():
            parameter.grad.mul_(0.5)
        self.inner()
        with torch.no_grad():
            torch._foreach_mul_(self.held(), 0.999)  # which 16 bits would not show

    def held(self) -> list[Any]:
        return [p for g in self.param_groups for p in g["params"] if p.grad is not None]

    def inner(self) -> None:
        super().step()


class DecayingUnseen(Decaying):
    def inner(self) -> None:
        torch.optim.SGD.step.__wrapped__(self)  # type: ignore[attr-defined]


def decayed(
    kind: type[Decaying], transport: Any, settings: dict[str, Any], by_hand: bool
) -> tuple[str, int]:
    model = build()
    update = kind(model.parameters(), lr=0.1, momentum=0.9)
    with session_on(model, update, transport, **settings) as session:
        for step in range(3):
            session.backward(model(batch(step, session.rank)))
            if by_hand:
                update.step()
                update.zero_grad()
            else:
                session.step()
        return digest(model), session.updates


def compare_decayed(transport: Any, settings: dict[str, Any], by_hand: bool) -> None:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # from now on its steps run hooks
    kinds = (Decaying, DecayingUnseen)
    found = [decayed(kind, transport, settings, by_hand) for kind in kinds]
    assert found[0] == found[1]
    assert found[0][1] == 3


def test_a_step_around_the_step_of_its_class_is_one_step(two: Ranks) -> None:
    sharded = {"kind": "sharded", "elementwise": True}
    fused = {"compute": {"fuse_optimizer": "elementwise"}}
    half = SETTINGS["half weights"]
    cases = [
        ("direct", {}, True),
        ("direct", half, False),
        (sharded, {}, True),
        (sharded, half, False),
        (sharded, fused, True),
    ]
    two.run(each, compare_decayed, cases)


def hook_in_a_nested_step() -> None:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    model = build()
    update = Decaying(model.parameters(), lr=0.1)
    with session_on(model, update, {"kind": "sharded", "elementwise": True}) as session:
        steps(session, 0, 1)
        handle = update.register_step_post_hook(lambda *_: None)
        session.backward(model(batch(1, session.rank)))
        with pytest.raises(UsageError, match=r"Decaying.step\(\) run around its super"):
            session.step()
        handle.remove()
        session.step()


def test_a_hook_that_would_see_shares_in_a_nested_step_is_refused(two: Ranks) -> None:
    two.run(hook_in_a_nested_step)
