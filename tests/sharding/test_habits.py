"""What users do beside a sharded session: as under ``direct``, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from slipstream.errors import MismatchError, ModelError, UsageError
from tests.harness.ranks import Ranks
from tests.harness.reference import digest
from tests.sharding.test_update import OPTIMIZERS, Signs, batch, each, session_on, steps


class Odd(nn.Module):
    """A tied weight, an empty parameter, a complex one, one without axes, one in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.expanded = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.randn(3, 6, dtype=torch.float64).T)
        self.late = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, use_late: bool = True) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x))) * self.scale + self.expanded.sum()
        y = (y.double() @ self.wide).float().mean() + self.phase.abs().sum()
        return y.square() + (self.late(x).sum() if use_late else 0)


def build() -> Odd:
    torch.manual_seed(0)
    return Odd()


Habit = Callable[[Any, Odd, Optimizer, int], Any]


def assign(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    session.backward(model(batch(step, session.rank)))
    model.first.weight.grad = torch.full_like(model.first.weight, 0.01).T  # another memory order
    model.scale.grad = None
    model.wide.grad = torch.ones_like(model.wide)
    session.step()


def assign_and_clip(session: Any, model: Odd, update: Optimizer, step: int) -> float:
    session.backward(model(batch(step, session.rank)))
    model.first.weight.grad = torch.full_like(model.first.weight, 10.0)
    norm = session.clip_grad_norm_(0.1)
    session.step()
    return round(float(norm), 4)


def freeze_and_thaw(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    model.late.requires_grad_(step % 2 == 0)
    steps(session, step, 1)


def unused_for_a_while(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    session.backward(model(batch(step, session.rank), use_late=step == 0))
    session.step()


def groups_replaced(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    update.param_groups = [{**group, "lr": 0.1 / (step + 1)} for group in update.param_groups]
    steps(session, step, 1)


def scheduled(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    steps(session, step, 1)
    torch.optim.lr_scheduler.StepLR(update, 1, 0.5).step()


def profiled(session: Any, model: Odd, update: Optimizer, step: int) -> list[str]:
    session.backward(model(batch(step, session.rank)))
    with torch.profiler.profile() as profiler:
        session.step()
    # None: a send that it has seen, and that is under way where it stops, breaks memory.
    return [event.name for event in profiler.events() if event.name.startswith("gloo:")]


def reloaded(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    steps(session, step, 1)
    update.load_state_dict(copy.deepcopy(session.checkpoint("optimizer")["optimizer"]))


def reset(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    steps(session, step, 1)
    update.state.clear() if step == 1 else None


def written(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    steps(session, step, 1)
    with torch.no_grad():
        model.first.weight.mul_(0.9)
        model.wide.data.clamp_(-0.5, 0.5)
        nn.init.zeros_(model.first.bias)


def averaged(session: Any, model: Odd, update: Optimizer, step: int) -> torch.Tensor:
    steps(session, step, 1)
    average: AveragedModel = AveragedModel(model)
    average.update_parameters(model)
    return average.module.first.weight.double().sum()  # type: ignore[union-attr]


def evaluated(session: Any, model: Odd, update: Optimizer, step: int) -> float:
    steps(session, step, 1)
    with torch.inference_mode():
        first = float(model(batch(9, 0)))
    with torch.no_grad():
        return first + float(model(batch(8, 0)))


def moved(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    steps(session, step, 1)
    model.to("cpu")
    model.first.weight.data = model.first.weight.data.clone()


def compiled(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    """The compiler looks at gradients, too: those of the update before."""
    forward = torch.compile(model.late, backend="eager") if step else model.late
    loss = forward(batch(step, session.rank)).square().mean()
    update.zero_grad()
    session.backward(loss)
    update.step()


def zeroed_by_hand(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    """As copies of an old ``zero_grad()`` do (guided-diffusion)."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()
    session.backward(model(batch(step, session.rank), use_late=step == 0))
    update.step()


def zeroed_through_data(session: Any, model: Odd, update: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()
            parameter.grad.detach().zero_()
    session.backward(model(batch(step, session.rank)))
    update.step()


HABITS: dict[str, Habit] = {
    habit.__name__: habit
    for habit in (
        *(assign, assign_and_clip, freeze_and_thaw, unused_for_a_while, groups_replaced),
        *(scheduled, profiled, reloaded, reset, written, averaged, evaluated, moved),
        *(compiled, zeroed_by_hand, zeroed_through_data),
    )
}


def trained(transport: str, name: str) -> tuple[str, list[Any]]:
    model = build()
    update = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for _ in range(2):  # and once more with the same objects, the first session being closed
        with session_on(model, update, transport) as session:
            seen += [HABITS[name](session, model, update, step) for step in range(3)]
    return digest(model), [float(x) if isinstance(x, torch.Tensor) else x for x in seen]


def compare(name: str) -> None:
    direct, sharded = trained("direct", name), trained("sharded", name)
    assert sharded[1] == direct[1]
    if "clip" not in name:  # whose norms are summed in another order
        assert sharded[0] == direct[0]
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, sharded[0])
    assert len(set(digests)) == 1


def test_habits_are_those_of_the_direct_transport(two: Ranks) -> None:
    two.run(each, compare, [(name,) for name in HABITS])


def group_added(transport: str) -> str:
    model = build()
    update = torch.optim.SGD(model.first.parameters(), lr=0.05, momentum=0.9)
    with session_on(model, update, transport) as session:
        steps(session, 0, 1)
        update.add_param_group({"params": [*model.late.parameters(), model.wide], "lr": 0.01})
        steps(session, 1, 2)
    return digest(model)


def test_a_group_may_be_added(two: Ranks) -> None:
    assert two.run(group_added, "sharded") == two.run(group_added, "direct")


def own_gradients(transport: str) -> str:
    """Never calls ``backward()``, as a script that follows other models (Reptile)."""
    model = build()
    update = OPTIMIZERS["sgd"](model.parameters())
    with session_on(model, update, transport, compute={"fuse_optimizer": True}):
        for step in (1, 2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * step)
            update.step()
            update.zero_grad()
    return digest(model)


def test_gradients_of_the_script_s_own(two: Ranks) -> None:
    assert two.run(own_gradients, "sharded") == two.run(own_gradients, "direct")


def loaded_after_an_update(transport: str) -> Any:
    """While the new values of parameters are still on their way."""
    model = build()
    update = OPTIMIZERS["sgd"](model.parameters())
    saved = copy.deepcopy(update.state_dict())
    half = {"kind": "half_weights", "exchange": "fp32"}
    with session_on(model, update, transport, precision=half) as session:
        for step in range(3):
            session.backward(model(batch(step, session.rank)).float())
            session.step()
            update.load_state_dict(copy.deepcopy(saved))
    return digest(model)


def test_an_optimizer_with_half_weights_loads_a_state_after_an_update(two: Ranks) -> None:
    assert two.run(loaded_after_an_update, "sharded") == two.run(loaded_after_an_update, "direct")


def two_sessions(transport: str) -> list[str]:
    models = [build(), build()]
    sessions = [session_on(m, OPTIMIZERS["sgd"](m.parameters()), transport) for m in models]
    for step in range(3):
        for number, session in enumerate(sessions):
            steps(session, step + 10 * number, 1)
    for session in sessions:
        session.close()
    return [digest(model) for model in models]


def test_two_sessions_in_one_process(two: Ranks) -> None:
    assert two.run(two_sessions, "sharded") == two.run(two_sessions, "direct")


def made_half() -> None:
    model = nn.Linear(6, 71)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    with session_on(model, update, "sharded") as session:
        session.backward(model(torch.ones(1, 6)).sum())
        session.step()
        before = copy.deepcopy(model.state_dict())
        model.weight.data = model.weight.data.T.contiguous().T
        with pytest.raises(UsageError, match=r"parameter weight was .*\(6, 1\).* is .*\(1, 71\)"):
            session.backward(model(torch.ones(1, 6)).sum())
        assert torch.equal(model.weight, before["weight"])


def test_a_parameter_in_another_form_is_refused(two: Ranks) -> None:
    two.run(made_half)


class Wrapped(Signs):
    """Lookahead and its kin."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.inner = torch.optim.SGD(params, lr=0.1)


class ScheduleFree(Signs):
    def eval(self) -> None: ...


class DuckType:
    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


ELSEWHERE: dict[Any, str] = {
    Wrapped: r"steps another optimizer inside its own step\(\) \(inner\)",
    ScheduleFree: r"method eval\(\) that changes parameters outside of step\(\)",
    DuckType: "is no torch.optim.Optimizer",
}


def elsewhere(kind: Any) -> None:
    model = build()
    transport = {"kind": "sharded", "elementwise": True}
    with pytest.raises(ModelError, match=ELSEWHERE[kind]):
        session_on(model, kind(model.parameters()), transport)


def test_optimizers_that_act_outside_their_step_are_refused(two: Ranks) -> None:
    two.run(each, elsewhere, [(kind,) for kind in ELSEWHERE])


def different_verbs() -> str:
    model = build()
    session = session_on(model, OPTIMIZERS["sgd"](model.parameters()), "sharded")
    session.backward(model(batch(0, session.rank)))
    with pytest.raises(MismatchError) as caught:
        session.checkpoint("optimizer") if session.rank else session.clip_grad_norm_(1.0)
    session.__exit__(MismatchError, caught.value, None)
    return str(caught.value)


def test_ranks_that_call_different_collectives_are_told(two: Ranks) -> None:
    for text in two.run(different_verbs):
        assert "rank 0 session.clip_grad_norm_()" in text
        assert "rank 1 session.checkpoint()" in text


def clip_local_gradients() -> None:
    model = build()
    with session_on(model, OPTIMIZERS["sgd"](model.parameters()), "sharded") as session:
        with session.no_sync():
            session.backward(model(batch(0, session.rank)))
            with pytest.raises(UsageError, match="not averages yet"):
                session._loop.sharding.model.clip_grad_norm_(1.0)
            session.step()
        steps(session, 1, 1)


def test_sums_of_one_rank_are_not_clipped(two: Ranks) -> None:
    two.run(clip_local_gradients)


def through_a_critic(transport: str) -> list[torch.Tensor]:
    """As SAC and DDPG do: the critic's gradients of the actor's loss are zeroed before its own."""
    torch.manual_seed(0)
    critic, actor = nn.Linear(6, 1), nn.Linear(6, 6)
    updates = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (critic, actor)]
    kind = {"kind": transport}
    with (
        session_on(critic, updates[0], kind) as of_critic,
        session_on(actor, updates[1], kind) as of_actor,
    ):
        for step in range(3):
            x = batch(step, of_critic.rank)
            updates[0].zero_grad()
            of_critic.backward((critic(x) - 1).square().mean())
            updates[0].step()
            with of_critic.no_sync():
                of_actor.backward(-critic(torch.tanh(actor(x))).mean())
            of_actor.step()
    return [p.detach() for p in (*critic.parameters(), *actor.parameters())]


def test_a_loss_of_another_model_may_follow_a_step_by_hand(two: Ranks) -> None:
    """torch said that memory of a single value cannot be added to."""
    sharded, direct = (two.run(through_a_critic, kind) for kind in ("sharded", "direct"))
    torch.testing.assert_close(sharded, direct)
