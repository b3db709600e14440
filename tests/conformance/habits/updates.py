"""What happens between two updates: forwards, backwards, gradients, windows, scales, schedules."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from tests.conformance.habit import habit
from tests.conformance.loop import Batch, Loop, mse
from tests.conformance.models import WIDTH


@habit("two forwards of one loss")
def two_forwards(run: Loop) -> None:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        model(2.0 * batch.x)  # and one without a backward
        return mse(model, batch) + 0.5 * mse(model, batch._replace(x=0.5 * batch.x))

    run.start()
    run.update(loss_of, times=3)


@habit("two backwards before a step")
def two_backwards(run: Loop) -> None:
    run.start()
    for _ in range(3):
        for _ in range(run.accumulate):
            run.backward()
            run.backward()
            run.step()


def _two_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    output = model(batch.x).to(batch.y.dtype)
    return (output - batch.y).square().mean(), 0.1 * output.abs().mean()


@habit("two losses of one forward")
def two_losses(run: Loop) -> None:
    run.start()
    run.update(_two_losses, times=3)


@habit("two losses of one forward, batch norm", "same batches")
def two_losses_batch_norm(run: Loop) -> None:
    run.model.plugs.extend([nn.Tanh(), nn.BatchNorm1d(WIDTH)])
    run.start()
    run.update(_two_losses, times=3)


@habit("batch norm", "same batches", "whole batches")
def batch_norm(run: Loop) -> None:
    run.model.plugs.extend([nn.Tanh(), nn.BatchNorm1d(WIDTH)])
    run.start()
    run.update(times=3)


@habit(
    "batch norm, a forward between backward and step",
    "same batches",
    "whole batches",
    "first rank's buffers",
    own_buffers=True,
)
def batch_norm_in_between(run: Loop) -> None:
    run.model.plugs.extend([nn.Tanh(), nn.BatchNorm1d(WIDTH)])
    run.start()
    for number in range(3):
        run.gradients()
        shape = run.model.body.shape
        seed = torch.Generator().manual_seed(number)
        with torch.no_grad():
            run.model(torch.randn(4, *shape, generator=seed))
        run.step()


@habit(
    "weights moved along the gradients, and back before step()",
    *("whole parameters", "optimizer's momentum", "updates of one pass"),
)
def sharpness_aware(run: Loop) -> None:
    """Sharpness-aware minimisation (Foret et al. 2021) takes two backward passes an update."""
    run.start()
    for _ in range(3):
        run.gradients()
        moves = [None if p.grad is None else 0.05 * p.grad for p in run.model.parameters()]
        with torch.no_grad():
            for p, move in zip(run.model.parameters(), moves, strict=True):
                if move is not None:
                    p.add_(move)
        run.optimizer.zero_grad()
        run.gradients()
        with torch.no_grad():
            for p, move in zip(run.model.parameters(), moves, strict=True):
                if move is not None:
                    p.sub_(move)
        run.step()


@habit("accumulate: an epoch's last window is partial, flushed", "session")
def partial_window_flushed(run: Loop) -> None:
    run.start(accumulate=2)
    for _ in range(2):
        run.update()
        run.backward()
        run.step()
        run.flush()


@habit("accumulate: a partial window flushed, clipped", "session", "optimizer's momentum")
def partial_window_clipped(run: Loop) -> None:
    run.start(accumulate=3)
    run.update()
    run.backward()
    run.step()
    run.flush(max_norm=0.05)
    run.update()


@habit("every backward in no_sync(), step() behind it", "session")
def step_behind_no_sync(run: Loop) -> None:
    run.start()
    for _ in range(3 * run.accumulate):
        with run.no_sync():
            run.backward()
        run.step()


@habit("every backward in no_sync(), flush() behind it", "session")
def flush_behind_no_sync(run: Loop) -> None:
    run.start(accumulate=1)
    for _ in range(3):
        with run.no_sync():
            run.backward()
        run.flush()


@habit("a second backward in no_sync(), loss scale of one's own", "session")
def added_in_no_sync(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients(scale=8.0)
        with run.no_sync():
            run.backward(scale=8.0)
        run.step()


@habit("accumulate by hand: the last backward alone outside no_sync()", "session")
def accumulated_by_hand(run: Loop) -> None:
    run.start()
    for _ in range(3 * run.accumulate):
        for _ in range(2):
            with run.no_sync():
                run.backward()
        run.backward()
        run.step()


@habit("a look at own gradients in no_sync(), zeroed", "session")
def looked_at_in_no_sync(run: Loop) -> None:
    run.start()
    for _ in range(3):
        with run.no_sync():
            run.backward()
        run.optimizer.zero_grad()
        run.update()


@habit("a backward fails in no_sync(), zeroed, and on", "session")
def failed_in_no_sync(run: Loop) -> None:
    run.start()
    for _ in range(2):
        with run.no_sync():
            run.backward()
            with contextlib.suppress(ZeroDivisionError):
                run.backward(_fails)
        run.optimizer.zero_grad()
        run.update(times=2)


@habit("a second backward fails in no_sync(), step() behind it", "session")
def second_failed_in_no_sync(run: Loop) -> None:
    run.start()
    for _ in range(2):
        run.gradients()
        with run.no_sync(), contextlib.suppress(ZeroDivisionError):
            run.backward(_fails)
        run.step()
    run.update()


def _fails(model: nn.Module, batch: Batch) -> Tensor:
    """A loss whose backward raises at once."""
    loss = mse(model, batch)
    loss.register_hook(_refuse)
    return loss


def _refuse(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError


@habit("accumulate: zeroed at the top of the loop", "session")
def zeroed_at_the_top(run: Loop) -> None:
    run.start(accumulate=2)
    for _ in range(4):
        run.optimizer.zero_grad()
        run.backward()
        run.step()


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


@habit("accumulate: a window open at close() is told", "session", own_buffers=True)
def window_left_open(run: Loop) -> None:
    run.start(accumulate=2)
    run.update(times=2)
    run.backward()
    run.step()
    run.close()
    for parameter in run.model.parameters() if run.plain else ():
        parameter.grad = None
    run.note("told", run.plain or any("window" in text for text in run.warned))


@habit("clipping after backward")
def clipping(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients()
        run.clip(0.1)
        run.step()


@habit("clipping by torch after backward")
def clipping_by_torch(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients()
        run.note("norm", nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
        run.step()


@habit("clipping inside a window", "session")
def clipping_inside(run: Loop) -> None:
    """Plain torch clips the sum of the joined batches; partial sums of ranks are none."""
    run.start(accumulate=2)
    for _ in range(2):
        run.backward()
        run.clip(0.1)
        run.step()
        run.backward()
        run.step()


@habit("clipping inside a window by torch", "session")
def clipping_inside_by_torch(run: Loop) -> None:
    run.start(accumulate=2)
    for _ in range(2):
        run.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.step()
        run.backward()
        run.step()


@habit("gradients read", "optimizer's momentum", "all gradients", "one update")
def gradients_read(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients()
        run.note("gradients", *[p.grad for p in run.model.parameters() if p.grad is not None])
        run.step()


@habit("gradients changed in place", "one update")
def gradients_changed(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients()
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        nn.utils.clip_grad_value_(run.model.parameters(), 0.01)
        run.step()


@habit("gradients kept to the end", "optimizer's momentum", "all gradients", "one update")
def gradients_kept(run: Loop) -> None:
    """Without a copy: those of an update are still its own after the next one."""
    run.start()
    kept = []
    for _ in range(3):
        run.gradients()
        kept += [p.grad for p in run.model.parameters() if p.grad is not None]
        run.step()
    run.note("gradients", *kept)


@habit("gradients set through .data")
def gradient_data_set(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients()
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad.data = 0.5 * parameter.grad.data
        run.step()


@habit("gradients assigned")
def gradients_assigned(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients()
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad = torch.full_like(parameter, 0.01)
        run.step()


@habit("some gradients set to None")
def gradients_removed(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients()
        run.model.head.bias.grad = None
        run.step()


@habit("gradients zeroed before backward")
def zeroed_before(run: Loop) -> None:
    run.start()
    for set_to_none in (True, False, True):
        run.optimizer.zero_grad(set_to_none=set_to_none)
        run.update()


@habit("gradients zeroed after backward")
def zeroed_after(run: Loop) -> None:
    """As a script does that throws a batch away."""
    run.start()
    run.update(times=2)
    run.gradients()
    run.optimizer.zero_grad()
    run.step()
    run.update()


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


@habit("train and eval switched", "same batches", "whole batches")
def train_and_eval(run: Loop) -> None:
    run.model.plugs.extend([nn.Tanh(), nn.BatchNorm1d(WIDTH)])
    run.start()
    run.update()
    run.model.eval()
    run.update()
    run.model.train()
    run.model.body.eval()
    run.update()


@habit("setting of a module changed later")
def setting_changed(run: Loop) -> None:
    run.start()
    run.update(times=2)
    run.model.body.change_setting()
    run.update(times=2)


@habit("modules and forwards replaced later")
def module_replaced(run: Loop) -> None:
    run.start()
    run.update()
    head = run.model.head
    head.forward = lambda h: nn.functional.linear(0.5 * h, head.weight, head.bias)
    run.update()
    for module in run.model.body.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d | nn.Tanh):
                setattr(module, name, nn.Identity())
    run.model.plugs.append(nn.Tanh())
    run.update(times=2)


@habit("batches of other sizes on each rank", "own batches")
def other_sizes(run: Loop) -> None:
    """Losses are means, and so is that of all ranks: of batches, not of samples."""

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        times = 1 + batch.rank
        x, y = (torch.cat([part] * times) for part in batch[:2])
        return mse(model, Batch(x, y, batch.rank))

    run.start()
    run.update(loss_of, times=3)
