"""Optimizers, their schedules and scales, and who calls their steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from tests.conformance.habit import habit
from tests.conformance.loop import Batch, Loop, mse


@habit("a second optimizer of the same parameters", "optimizer's momentum")
def second_optimizer(run: Loop) -> None:
    other = torch.optim.SGD(run.model.parameters(), lr=0.01)
    run.start()
    for _ in range(3):
        run.gradients()
        other.step()
        run.step()


def _head_apart(run: Loop) -> torch.optim.Optimizer:
    """Give the head to an optimizer of its own, and leave the rest."""
    head = {*run.model.head.parameters()}
    for group in run.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in head]
    return torch.optim.SGD(run.model.head.parameters(), lr=0.05, momentum=0.5)


@habit("a second optimizer, of the head", "optimizer's momentum")
def second_optimizer_of_the_head(run: Loop) -> None:
    other = _head_apart(run)
    run.start()
    for _ in range(3):
        run.gradients()
        other.step()
        run.step()


@habit("a second optimizer, of the head, that steps second", "optimizer's momentum")
def second_optimizer_second(run: Loop) -> None:
    other = _head_apart(run)
    run.start()
    for _ in range(3):
        run.gradients()
        run.optimizer.step()
        other.step()
        run.optimizer.zero_grad()
        other.zero_grad()


@habit("the head updated by hand (p.add_), the body by step()", "optimizer's momentum")
def head_by_hand(run: Loop) -> None:
    _head_apart(run)
    run.start()
    for _ in range(3):
        run.gradients()
        _descend(run.model.head)
        run.step()


@habit(
    "one update by hand (p.add_) in place of step()", "optimizer's momentum", "updates by step()"
)
def update_by_hand(run: Loop) -> None:
    run.start()
    for by_hand in (False, True, False, False):
        run.gradients()
        if by_hand:
            _descend(run.model)
            run.optimizer.zero_grad()
        else:
            run.step()


@torch.no_grad()
def _descend(part: nn.Module) -> None:
    for p in part.parameters():
        if p.grad is not None:
            p.add_(p.grad, alpha=-0.05)


@habit("body and head trained in turn, by two optimizers", "optimizer's momentum")
def in_turn(run: Loop) -> None:
    """As generator and discriminator are: an update of one is none of the other."""
    other = _head_apart(run)
    run.start(unused=True)
    for whole in (True, False, True, False):
        run.model.body.requires_grad_(whole)
        run.gradients()
        if not whole:
            other.step()
        run.step()


class Lookahead(torch.optim.Optimizer):
    """Every second update goes half way only (Zhang et al. 2019); groups are the inner one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.state, self.updates = inner, inner.state, 0
        self.slow: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        for p in held:
            self.slow.setdefault(p, p.detach().clone())
        self.inner.step()
        self.updates += 1
        for p in held if self.updates % 2 == 0 else ():
            self.slow[p].lerp_(p, 0.5)
            p.copy_(self.slow[p])


@habit("an optimizer around another one", "optimizer's momentum")
def around_another(run: Loop) -> None:
    run.optimizer = Lookahead(run.optimizer)
    run.start()
    run.update(times=4)


@habit("scheduler made before")
def scheduler_before(run: Loop) -> None:
    schedule = StepLR(run.optimizer, 1, 0.5)
    run.start()
    for _ in range(3):
        run.update()
        schedule.step()


@habit("scheduler made after, of momentum too")
def one_cycle(run: Loop) -> None:
    group = run.optimizer.param_groups[0]
    cycles = "momentum" in group or "betas" in group
    run.start()
    schedule = OneCycleLR(run.optimizer, 0.05, total_steps=5, cycle_momentum=cycles)
    for _ in range(3):
        run.update()
        schedule.step()


@habit("lr and weight decay written by hand")
def lr_by_hand(run: Loop) -> None:
    run.start()
    for factor in (1.0, 0.5, 0.25):
        for group in run.optimizer.param_groups:
            group["lr"] = 0.02 * factor
            if "weight_decay" in group:
                group["weight_decay"] = 0.3 * (1 - factor)
        run.update()


@habit("a learning rate of 0 for the head, for a while")
def rate_of_zero(run: Loop) -> None:
    head = {*run.model.head.parameters()}
    for group in run.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in head]
    run.optimizer.add_param_group({"params": [*run.model.head.parameters()]})
    run.start()
    group = run.optimizer.param_groups[-1]
    rate = group["lr"]
    for factor in (1.0, 0.0, 0.0, 1.0):
        group["lr"] = rate * factor
        run.update()


@habit("loss scale of one's own")
def own_scale(run: Loop) -> None:
    run.start()
    run.update(times=3, scale=8.0)


@habit("loss scale, overflow on one rank", "own batches", "one update")
def overflow_on_one_rank(run: Loop) -> None:
    def overflows(model: nn.Module, batch: Batch) -> Tensor:
        return mse(model, batch) * (float("inf") if batch.rank == 1 else 1.0)

    run.start()
    run.update(scale=8.0)
    run.update(overflows, scale=8.0)
    run.update(times=2, scale=8.0)


def _by_scaler(run: Loop, *, clips: bool, overflow: bool = False) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def finite(model: nn.Module, batch: Batch) -> Tensor:
        return scaler.scale(mse(model, batch))

    def overflows(model: nn.Module, batch: Batch) -> Tensor:
        return finite(model, batch) * (float("inf") if batch.rank == 1 else 1.0)

    run.start()
    for number in range(4):
        run.gradients(overflows if overflow and number == 1 else finite)
        if clips:
            scaler.unscale_(run.optimizer)
            run.note("norm", nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.note("scale", scaler.get_scale())


@habit("torch's GradScaler loop")
def grad_scaler(run: Loop) -> None:
    _by_scaler(run, clips=False)


@habit("torch's GradScaler loop with clipping")
def grad_scaler_clips(run: Loop) -> None:
    _by_scaler(run, clips=True)


@habit("torch's GradScaler loop, overflow on one rank", "own batches", "one update")
def grad_scaler_overflow(run: Loop) -> None:
    _by_scaler(run, clips=False, overflow=True)


class HeavyBall(torch.optim.Optimizer):
    """Sets ``data``, and keeps the former one."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    former = self.state[p].get("former", p.data)
                    self.state[p]["former"] = p.data
                    p.data = p.data - group["lr"] * p.grad + 0.5 * (p.data - former)


@habit("an optimizer of one's own that sets data", "optimizer's momentum")
def data_set_in_step(run: Loop) -> None:
    run.optimizer = HeavyBall(run.model.parameters(), {"lr": 0.05})
    run.start()
    run.update(times=3)


@habit("optimizer.step() by hand")
def step_by_hand(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients()
        run.optimizer.step()
        run.optimizer.zero_grad()


@habit("optimizer.step() by hand, session.step() besides", "session")
def both_steps(run: Loop) -> None:
    """A loop that keeps the old verb by mistake; plain torch has no second one."""
    run.start()
    for _ in range(3):
        run.gradients()
        if not run.plain:
            run.optimizer.step()
        run.step()


@habit("zero_grad() forgotten, step() by hand")
def never_zeroed(run: Loop) -> None:
    """Plain torch adds up gradients, and so must this, or be refused."""
    run.start()
    for _ in range(3):
        run.gradients()
        run.optimizer.step()


@habit("no step() at all", "session")
def never_stepped(run: Loop) -> None:
    """Each backward adds to the last; nothing trains."""
    run.start()
    for _ in range(3):
        run.backward()


@habit("step(closure)")
def step_by_closure(run: Loop) -> None:
    """Gradients come in the step."""

    def closure() -> float:
        run.optimizer.zero_grad()
        run.gradients()
        return 0.0

    run.start()
    for _ in range(3):
        run.optimizer.step(closure)


@habit("a parameter of the loss, in the optimizer alone", "not DDP")
def parameter_of_the_loss(run: Loop) -> None:
    """The weight of a task is learned so (Kendall et al. 2018)."""
    weight = nn.Parameter(torch.tensor(0.3))
    run.optimizer.add_param_group({"params": [weight]})

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return torch.exp(-weight) * mse(model, batch) + weight

    run.start()
    run.update(loss_of, times=3)
    run.note("weight", weight)


@habit("an optimizer a parameter, stepped in backward", "optimizer's momentum", "not DDP")
def stepped_in_backward(run: Loop) -> None:
    """A gradient is used and forgotten before the next one is there; plain torch has one loss."""
    run.start()
    for parameter in run.model.parameters():
        _step_in_backward(parameter)
    for _ in range(3):
        run.gradients()
        run.step()


def _step_in_backward(parameter: nn.Parameter) -> None:
    own = torch.optim.SGD([parameter], lr=0.02)

    def step(of: Tensor) -> None:
        own.step()
        own.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


@habit("learning rates in tensors")
def lr_in_tensors(run: Loop) -> None:
    run.start()
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    run.update(times=2)
    for group in run.optimizer.param_groups:
        group["lr"].mul_(0.5)
    run.update()


@habit("another optimizer takes over", "optimizer's momentum", own_buffers=True)
def taken_over(run: Loop) -> None:
    run.start()
    run.update(times=2)
    other = torch.optim.SGD(run.model.parameters(), lr=0.01)
    for _ in range(2):
        run.gradients()
        other.step()
        other.zero_grad()
