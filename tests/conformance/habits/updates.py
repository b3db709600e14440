"""What happens between two updates: forwards, backwards, gradients, modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


@habit("clipping by torch, body and head apart")
def clipping_apart(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients()
        for part in (run.model.body, run.model.head):
            run.note("norm", nn.utils.clip_grad_norm_(part.parameters(), 0.05))
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


@habit("noise added to gradients, alike on all ranks", "whole parameters")
def noise_added(run: Loop) -> None:
    run.start()
    for number in range(3):
        run.gradients()
        drawn = torch.Generator().manual_seed(number)
        for parameter in run.model.parameters():
            noise = torch.randn(parameter.shape, generator=drawn)
            if parameter.grad is not None:
                parameter.grad.add_(noise, alpha=0.01)
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


@habit("gradients zeroed by the model")
def zeroed_by_the_model(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.model.zero_grad()
        run.update()


@habit("gradients filled with zeros, then a pass without the head", "optimizer's momentum")
def filled_with_zeros(run: Loop) -> None:
    """What is zero is not absent: momentum and decay go on."""
    run.start(unused=True)
    for whole in (True, False, True, False):
        run.model.head.requires_grad_(whole)
        run.gradients()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)


@habit("gradients zeroed after backward")
def zeroed_after(run: Loop) -> None:
    """As a script does that throws a batch away."""
    run.start()
    run.update(times=2)
    run.gradients()
    run.optimizer.zero_grad()
    run.step()
    run.update()


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
