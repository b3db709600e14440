"""A fused optimizer under what users do beside it, against the plain one that they do it to."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import ModelError
from slipstream.fusion import fuse_optimizer, small_parameters
from tests.fusion.optimizers import (
    OPTIMIZERS,
    C,
    Lion,
    check_same,
    fuse,
    give_gradients,
    groups,
    parameters,
)
from tests.harness.versions import OLD_TORCH


class Own(C.Optimizer):
    """A user's class: a counter with a name of its own, a state made anew in every step, gradients
    zeroed at the end of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "steps": 0})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                old = self.state.get(p, {})
                time = old.get("time", torch.zeros(())) + 1
                mean = old.get("mean", torch.zeros_like(p.data)) * 0.9 + 0.1 * p.grad.data
                p.data.add_(mean / (1 - 0.9 ** float(time)), alpha=-group["lr"])
                self.state[p] = {"time": time, "mean": mean}
                p.grad.data.zero_()


class Halving(Own):
    """It goes on after the step of its base."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)


MAKE = {**OPTIMIZERS, "Own": Own, "Halving": Halving}


class Run:
    """An optimizer, fused or not, and its parameters."""

    def __init__(self, name: str, made: list[nn.Parameter], *, fused: bool) -> None:
        self.made, self.count = made, 0
        self.optimizer = MAKE[name](groups(made))
        vouched = isinstance(self.optimizer, Lion | Own)
        self.handle = fuse_optimizer(self.optimizer, elementwise=vouched) if fused else None
        self.seen: list[torch.Tensor] = []

    def go(self, steps: int = 1, without: tuple[int, ...] = ()) -> None:
        for _ in range(steps):
            give_gradients(self.made, self.count)
            for number in without:
                self.made[number].grad = None
            self.count += 1
            self.optimizer.step()

    @property
    def states(self) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        return [
            (state, key, value)
            for state in self.optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        ]


def state_reloaded(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.go()
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    run.optimizer.load_state_dict(torch.load(file))


def groups_replaced(run: Run) -> None:
    run.optimizer.param_groups = [
        {**g, "params": [*g["params"]]} for g in run.optimizer.param_groups
    ]
    run.optimizer.param_groups[0]["lr"] = 0.05


def groups_reversed(run: Run) -> None:
    run.optimizer.param_groups.reverse()
    run.go()
    left = run.optimizer.param_groups.pop(0)
    run.go()
    run.optimizer.param_groups.append(left)


def group_added(run: Run) -> None:
    new = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 3))]
    run.made += new
    run.optimizer.add_param_group({"params": new, "lr": 0.02})


def frozen_and_thawed(run: Run) -> None:
    run.go(2, without=(0, 4, 5))


def parameters_reordered(run: Run) -> None:
    for p in run.made:
        p.data = p.data.mT.contiguous().mT if p.ndim > 1 else p.data.clone()
    run.go()
    for p in run.made:
        p.data = p.data.contiguous()


def states_reordered(run: Run) -> None:
    for state, key, value in run.states:
        state[key] = value.contiguous()
    run.go()
    for state, key, value in run.states:
        state[key] = value.mT.contiguous().mT if value.ndim > 1 else value.clone()


def states_written(run: Run) -> None:
    for _, _, value in run.states:
        value.mul_(0.9) if value.ndim else value.add_(1.0)
    run.go()
    for _, key, value in run.states:
        if value.ndim:
            value.data.mul_(0.8)
        if key in ("step", "time"):
            value.data = value.data + 1


def states_dropped(run: Run) -> None:
    if not isinstance(run.optimizer, C.Adagrad):  # which makes its states in the beginning alone
        run.optimizer.state.pop(run.made[4], None)
        run.go()
        run.optimizer.state = defaultdict(dict)


def parameters_of_another_type(run: Run) -> None:
    for p in run.made:
        p.grad, p.data = None, p.data.double()
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def whole_steps(run: Run) -> None:
    for state, key, value in run.states:
        state[key] = value.long() if key == "step" else value


def settings_written(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(0.02)
        for key, value in (("weight_decay", 0.2), ("betas", (0.5, 0.7)), ("maximize", True)):
            if key in group:
                group[key] = value
    run.go()
    run.optimizer.param_groups[0]["lr"].fill_(0.001)
    run.go()
    for group in run.optimizer.param_groups:
        group["lr"], group["foreach"] = 0.01, True


def momentum_switched(run: Run) -> None:
    for momentum in (0.0, 0.8):
        for group in run.optimizer.param_groups:
            if isinstance(run.optimizer, C.SGD):
                group["momentum"], group["nesterov"] = momentum, False
        run.go()


def gradients_in_other_orders(run: Run) -> None:
    for number, p in enumerate(run.made):
        p.grad = torch.full((), number - 3.5).expand(p.shape)
        if number % 2 == 0 and p.ndim > 1:
            p.grad = p.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(run.optimizer, Own):  # which writes to gradients
        for p in run.made:
            p.grad = p.grad.clone()  # type: ignore[union-attr]
    given = [p.grad for p in run.made]
    run.optimizer.step()
    assert all(p.grad is gradient for p, gradient in zip(run.made, given, strict=True))


def hooks(run: Run) -> None:
    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(run.made, 0.1)

    def double(*_: object) -> None:
        for p in run.made:
            p.grad = p.grad * 2  # type: ignore[operator]

    def look_and_clamp(optimizer: C.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            run.seen += [p.detach().clone() for p in group["params"]]
            with torch.no_grad():
                for p in group["params"]:
                    p.clamp_(-0.5, 0.5)

    before = [run.optimizer.register_step_pre_hook(hook) for hook in (clip, double)]
    after = run.optimizer.register_step_post_hook(look_and_clamp)
    run.go(2)
    for handle in (*before, after):
        handle.remove()


def interrupted(run: Run) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for register in (
        run.optimizer.register_step_pre_hook,
        run.optimizer.register_step_post_hook,
    ):
        handle = register(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.go()
        handle.remove()
        run.optimizer.zero_grad()
        assert all(p.grad is None for p in run.made)


def copied(run: Run) -> None:
    for other in (copy.deepcopy(run.optimizer), pickle.loads(pickle.dumps(run.optimizer))):
        assert type(other) is type(run.optimizer)
        run.seen += [p.detach() for group in other.param_groups for p in group["params"]]


def one_cycle(run: Run) -> None:
    cycles = isinstance(run.optimizer, C.Adam | C.NAdam)
    cycle = C.lr_scheduler.OneCycleLR(run.optimizer, 0.05, 10, cycle_momentum=cycles)
    for _ in range(3):
        run.go()
        cycle.step()


HABITS: list[Callable[[Run], None]] = [
    state_reloaded,
    groups_replaced,
    groups_reversed,
    group_added,
    frozen_and_thawed,
    parameters_reordered,
    states_reordered,
    states_written,
    states_dropped,
    parameters_of_another_type,
    whole_steps,
    settings_written,
    momentum_switched,
    gradients_in_other_orders,
    hooks,
    interrupted,
    copied,
    one_cycle,
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(small_parameters.SMALL, "cpu", 50)
    monkeypatch.setattr(small_parameters, "BLOCK", 16)


def many() -> list[nn.Parameter]:
    """More of those that look alike: numbers, and a map of images."""
    image = torch.randn(6, 2, 2, 2, generator=torch.Generator().manual_seed(1))
    return [*parameters(), nn.Parameter(image), nn.Parameter(torch.tensor(2.0))]


def check_equal(runs: list[Run]) -> None:
    ours, theirs = runs
    torch.testing.assert_close(ours.made, theirs.made, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours.seen, theirs.seen, rtol=2e-5, atol=2e-5)
    check_same(ours.optimizer, theirs.optimizer, 2e-5)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("habit", HABITS)
def test_habits(habit: Callable[[Run], None], name: str) -> None:
    if OLD_TORCH and (name, habit) == ("Adagrad", group_added):
        pytest.skip("torch 2.11's Adagrad makes no state for a group that is added")
    runs = [Run(name, many(), fused=fused) for fused in (True, False)]
    for run in runs:
        run.go(2)
        habit(run)
        run.go(2)
    check_equal(runs)


def tied() -> list[nn.Parameter]:
    """Parameters with memory in common, as after ``decoder.weight.data = encoder.weight.data``."""
    weight, bias = torch.ones(3, 4), torch.arange(20.0)
    made = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(weight), nn.Parameter(bias[:10])]
    made += [nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(5))]
    made[0].data, made[3].data = made[1].data, made[2].data
    return made


def of_many_types() -> list[nn.Parameter]:
    types = (torch.float32, torch.float64, torch.complex64)
    shapes = ((3,), (4,), (2, 3), ())
    return [nn.Parameter(torch.ones(shape, dtype=kind)) for shape in shapes for kind in types]


def of_16_bits() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, n).bfloat16()) for n in (3, 40, 156)]


def empty() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((0,), (0, 4), (1,), (), ())]


@pytest.mark.parametrize("make", [tied, of_many_types, of_16_bits, empty])
@pytest.mark.parametrize("name", [n for n in MAKE if n != "Lamb"])
def test_parameters(make: Callable[[], list[nn.Parameter]], name: str) -> None:
    if name == "Lion" and make is of_many_types:
        pytest.skip("Lion takes signs, of which complex numbers have none")
    runs = [Run(name, make(), fused=fused) for fused in (True, False)]
    for run in runs:
        run.go(2)
        state_reloaded(run)
        run.go(2)
    for ours, theirs in zip(runs[0].made, runs[1].made, strict=True):
        tolerance = 2e-2 if ours.dtype is torch.bfloat16 else 2e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "RAdam", "SGD, momentum"])
def test_a_default_type_of_64_bits(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        runs = [Run(name, many(), fused=fused) for fused in (True, False)]
        for run in runs:
            run.go(2)
            state_reloaded(run)
            run.go(2)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(runs[0].made, runs[1].made)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_the_loop_of_a_gradient_scaler(name: str) -> None:
    runs = [Run(name, many(), fused=fused) for fused in (True, False)]
    for run in runs:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for number in range(4):
            scaler.scale(sum((p * p).sum() * number for p in run.made)).backward()
            if number == 2:
                run.made[1].grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.unscale_(run.optimizer)
            torch.nn.utils.clip_grad_norm_(run.made, 1.0)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
    check_equal(runs)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Lamb"])
def test_a_state_of_another_shape_is_refused_as_by_torch(name: str) -> None:
    made = parameters()
    optimizer = OPTIMIZERS[name](made)
    fuse(optimizer)
    give_gradients(made, 0)
    optimizer.step()
    key = "square_avg" if name == "RMSprop" else "exp_avg"
    optimizer.state[made[1]][key] = torch.ones(9)
    with pytest.raises(RuntimeError, match="size of tensor"):
        optimizer.step()


def test_an_optimizer_without_hooks_is_refused() -> None:
    class Wrapper(C.Optimizer):
        def __init__(self, inner: C.Optimizer) -> None:
            self.all, self.param_groups = [inner], inner.param_groups

    with pytest.raises(ModelError, match="Wrapper cannot be fused: it has no hooks"):
        fuse_optimizer(Wrapper(C.SGD(parameters())), elementwise=True)


def test_an_optimizer_around_another_one_is_refused() -> None:
    class Wrapper(C.Optimizer):
        def __init__(self, inner: C.Optimizer) -> None:
            super().__init__(inner.param_groups, inner.defaults)
            self.inner = inner

    with pytest.raises(ModelError, match=r"Wrapper cannot be fused: it is around another one"):
        fuse_optimizer(Wrapper(C.SGD(parameters())), elementwise=True)
