"""Hooks, functional calls, higher derivatives, modes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.conformance.habit import habit
from tests.conformance.loop import Batch, Loop, mse
from tests.conformance.models import WIDTH


def _module_hooks(run: Loop) -> list[int]:
    """They change outputs, and count the calls of the own batches."""
    calls = [0, 0]

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        calls[0] += run._computing in (None, run.rank)
        return 1.5 * output

    def before(module: nn.Module, args: Any) -> Any:
        calls[1] += run._computing in (None, run.rank)
        return (0.5 * args[0],)

    def halve(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(None if gradient is None else 0.5 * gradient for gradient in inputs)

    run.model.head.register_forward_pre_hook(before)
    for layer in [m for m in run.model.body.modules() if not [*m.children()]][:3]:
        layer.register_forward_hook(double)
    run.model.head.register_full_backward_hook(halve)
    return calls


@habit("hooks on modules before", "whole forwards")
def module_hooks_before(run: Loop) -> None:
    calls = _module_hooks(run)
    run.start()
    run.update(times=3)
    run.note("calls", calls[1])


@habit("hooks on modules after", "whole forwards")
def module_hooks_after(run: Loop) -> None:
    run.start()
    run.update()
    calls = _module_hooks(run)
    run.update(times=2)
    run.note("calls", calls[1])


def _parameter_hooks(run: Loop) -> list[int]:
    calls: list[int] = []

    def count(parameter: Tensor) -> None:
        calls.extend([1] * (run._computing in (None, run.rank)))

    for parameter in run.model.parameters():
        parameter.register_hook(lambda gradient: 0.5 * gradient)
        parameter.register_post_accumulate_grad_hook(count)
    return calls


@habit("hooks on parameters before", "whole forwards")
def parameter_hooks_before(run: Loop) -> None:
    calls = _parameter_hooks(run)
    run.start()
    run.update(times=3)
    run.note("calls", len(calls))


@habit("hooks on parameters after", "whole forwards")
def parameter_hooks_after(run: Loop) -> None:
    run.start()
    run.update()
    calls = _parameter_hooks(run)
    run.update(times=2)
    run.note("calls", len(calls))


def _norm_of_all(run: Loop) -> Tensor:
    return torch.stack([p.detach().double().norm() for p in run.model.parameters()]).norm()


@habit("step hooks on the optimizer before", "whole parameters")
def optimizer_hooks_before(run: Loop) -> None:
    run.optimizer.register_step_pre_hook(lambda *_: run.note("before", _norm_of_all(run)))
    run.optimizer.register_step_post_hook(lambda *_: run.note("after", _norm_of_all(run)))
    run.start()
    run.update(times=3)


@habit("step hooks on the optimizer after", "whole parameters")
def optimizer_hooks_after(run: Loop) -> None:
    run.start()
    run.update()
    run.optimizer.register_step_pre_hook(lambda *_: run.note("before", _norm_of_all(run)))
    run.optimizer.register_step_post_hook(lambda *_: run.note("after", _norm_of_all(run)))
    run.update(times=2)


@habit("EMA in a step hook", "whole parameters")
def ema_in_hook(run: Loop) -> None:
    average: dict[int, Tensor] = {}

    def follow(*_: Any) -> None:
        for number, parameter in enumerate(run.model.parameters()):
            own = average.setdefault(number, parameter.detach().clone().double())
            own.lerp_(parameter.detach().double(), 0.3)

    run.optimizer.register_step_post_hook(follow)
    run.start()
    run.update(times=3)
    run.note("average", *average.values())


@habit("functional_call")
def by_functional_call(run: Loop) -> None:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        output = functional_call(model, dict(model.named_parameters()), batch.x)
        return F.mse_loss(output.to(batch.y.dtype), batch.y)

    run.start()
    run.update(loss_of, times=3)


def _probe(run: Loop) -> Tensor:
    return torch.stack([x for x, _ in run._samples(0)[:2]])


@habit("torch.func.grad after a step", "whole parameters")
def func_grad(run: Loop) -> None:
    run.start()
    run.update(times=2)
    run.model.eval()
    x = _probe(run)

    def value(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(run.model, parameters, x).float().square().sum()

    run.note("gradient", *grad(value)(dict(run.model.named_parameters())).values())
    run.model.train()
    run.update()


@habit("torch.func.vjp and vmap over inputs after a step", "vmap")
def func_vjp(run: Loop) -> None:
    run.start()
    run.update(times=2)
    run.model.eval()
    output, pull = vjp(lambda x: run.model(x).float().square().sum(), _probe(run))
    run.note("output", output)
    run.note("pulled", *pull(torch.ones_like(output)))
    run.note("outputs", torch.func.vmap(lambda x: run.model(x.unsqueeze(0))[0])(_probe(run)))
    run.model.train()
    run.update()


@habit("torch.jit.trace after a step")
def jit_trace(run: Loop) -> None:
    import warnings

    run.start()
    run.update(times=2)
    run.model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(run.model, (_probe(run),), check_trace=False)
        run.note("traced", traced(_probe(run)))
    run.model.train()
    run.update()


@habit("second derivatives", "same batches")
def second_derivatives(run: Loop) -> None:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        loss = mse(model, batch)
        named = [p for p in run.model.parameters() if p.requires_grad]
        first = torch.autograd.grad(loss, named, create_graph=True, allow_unused=True)
        return loss + 0.1 * sum(g.float().square().mean() for g in first if g is not None)

    run.start()
    run.update(loss_of, times=3)


@habit("gradient penalty")
def gradient_penalty(run: Loop) -> None:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x = batch.x.clone().requires_grad_()
        output = model(x).to(batch.y.dtype)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, batch.y) + slope.float().square().mean()

    run.start()
    run.update(loss_of, times=3)


@habit("gradients of inputs by autograd.grad")
def input_gradients(run: Loop) -> None:
    """As for an adversarial example."""

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x = batch.x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(mse(model, batch._replace(x=x)), x)
        return mse(model, batch._replace(x=batch.x + 0.1 * slope.sign().to(batch.x.dtype)))

    run.start()
    run.update(loss_of, times=3)


@habit("gradients by autograd.grad, as a sum of products", "same batches")
def gradients_as_products(run: Loop) -> None:
    """So gradients of one's own are averaged (docs/gradients.md)."""

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        named = [p for p in run.model.parameters() if p.requires_grad]
        own = torch.autograd.grad(mse(model, batch), named, allow_unused=True)
        pairs = zip(named, own, strict=True)
        return torch.stack([(p * g).sum().float() for p, g in pairs if g is not None]).sum()

    run.start()
    run.update(loss_of, times=3)


@habit(
    "gradients by autograd.grad, averaged and assigned by hand", "all gradients", own_buffers=True
)
def gradients_assigned_by_hand(run: Loop) -> None:
    run.start()
    named = [p for p in run.model.parameters() if p.requires_grad]
    for _ in range(3):
        own = torch.autograd.grad(run.loss(), named, allow_unused=True)
        for parameter, gradient in zip(named, own, strict=True):
            if gradient is not None:
                parameter.grad = run.averaged(gradient)
        run.optimizer.step()
        run.optimizer.zero_grad()


@habit("loss.backward(inputs=...) by hand, of the head", "not DDP")
def backward_of_inputs(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.loss().backward(inputs=[*run.model.head.parameters()])
        run.optimizer.step()
        run.optimizer.zero_grad()


@habit("a step in a function under no_grad, with enable_grad inside")
def step_under_no_grad(run: Loop) -> None:
    @torch.no_grad()
    def update() -> None:
        with torch.enable_grad():
            run.gradients()
        run.step()

    run.start()
    for _ in range(3):
        update()


@habit("no_grad in between")
def no_grad(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.update()
        run.model.eval()
        with torch.no_grad():
            run.note("output", run.model(_probe(run)))
        run.model.train()


@habit("inference_mode in between")
def inference_mode(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.model.eval()
        with torch.inference_mode():
            found = run.model(_probe(run)).double().sum().item()
        run.note("output", found)
        run.model.train()
        run.update()


@habit("autocast inside the loss", bf16=True)
def autocast_inside(run: Loop) -> None:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mse(model, batch)

    run.start()
    run.update(loss_of, times=3)


@habit("autocast around an update", bf16=True)
def autocast_outside(run: Loop) -> None:
    run.start()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):  # its casts of weights live as long
            run.update()


@habit("torch.profiler around an update")
def profiled(run: Loop) -> None:
    run.start()
    run.update()
    with torch.profiler.profile():  # stops while what an update leaves is on its way
        run.update()
    run.update()


@habit("saved tensors kept in another memory (save_on_cpu)")
def saved_elsewhere(run: Loop) -> None:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return mse(model, batch)

    run.start()
    run.update(loss_of, times=3)


@habit("detect_anomaly around an update")
def anomalies_looked_for(run: Loop) -> None:
    run.start()
    run.update()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of its cost
        anomalies = torch.autograd.detect_anomaly(check_nan=True)
    with anomalies:
        run.update()
    run.update()


class Recomputed(nn.Module):
    """Layers that torch computes once more in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return again


@habit("torch.utils.checkpoint in the model")
def recomputed(run: Loop) -> None:
    run.model.plugs.extend([Recomputed(False), nn.Tanh()])
    run.start()
    run.update(times=3)


@habit("torch.utils.checkpoint in the model, reentrant")
def recomputed_reentrant(run: Loop) -> None:
    run.model.plugs.extend([Recomputed(True), nn.Tanh()])
    run.start()
    run.update(times=3)
