"""A model whose layers take their time by sleeping: computing as on a host whose device computes.

Where a device computes, the cores of its host are free for the exchange. Here a layer owns the
parameters of a layer of a real model, reads an element of each where it computes (so they must have
arrived by then), sleeps as long as its share of the model's FLOPs says, and hands back gradients of
their true shapes, in the true order of layers. Forward takes a third of the time, backward the
rest.

What stays on the cores, for every variant alike: Python between the layers, the copies of gradients
into buckets, and the optimizer's update. `Device.fit` makes room for them, so that an iteration
without exchange takes the time that was asked for. Never exchanges anything else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.iteration import Iterate, Loss
from slipstream.calibration import contention

AHEAD = 1e-3
"""Seconds by which the host may launch layers before the device comes to them.

A short sleep takes up to 0.1 ms longer than asked for, so layers are slept for together; and what
the host does between two layers costs no time of the device, as on a real one, up to this bound.
Gradients are ready at most this much too early.
"""

QUEUED = 20e-3
"""Seconds by which the host may come late in backward without leaving the device idle.

On a real device autograd launches backward far ahead, and what hooks do on the host (copies, sends)
costs the device nothing. Here hooks run when a gradient is ready, so the device is granted the time
as if the next layers had been launched before, up to this bound. Not in forward, where a layer must
not begin before its parameters are there.
"""


PIECE = 1e-3
"""Seconds of a piece of compute, beside which slipstream times exchanges."""

CLOSE = 0.02
"""How far an iteration may be from the time that was asked for, as a share of it."""

TRIES = 8


class Device:
    """The clock of a device that computes one layer after the other; the host sleeps meanwhile.

    The one place where slipstream computes on its own, to see what computing and exchanging do to
    each other, computes on this device, too.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """What all layers of an iteration take."""
        self._free_at = 0.0
        contention.piece_of_compute = self._piece_of_compute

    def _piece_of_compute(self, device: torch.device) -> Callable[[], None]:
        return lambda: time.sleep(PIECE)

    def launch(self, share: float, late: float = 0.0) -> None:
        """Compute for a share of ``seconds``, from when the device is free, or from now.

        The host may come ``late``; one that comes later, after a wait for parameters say, has left
        its device idle.
        """
        now = time.perf_counter()
        self._free_at = max(self._free_at, now - late) + share * self.seconds
        if self._free_at - now > AHEAD:
            time.sleep(self._free_at - now - AHEAD / 2)

    def synchronize(self) -> None:
        """Wait until everything launched is computed."""
        time.sleep(max(0.0, self._free_at - time.perf_counter()))

    def fit(self, iterate: Iterate, seconds: float) -> None:
        """Set `seconds` so that ``iterate`` takes that many, with what the host adds; all ranks.

        Raises:
            SystemExit: what stays on the cores alone takes as long.
        """
        self.seconds = seconds
        iterate()
        for _ in range(TRIES):
            measured = []
            for _ in range(3):
                dist.barrier()
                start = time.perf_counter()
                iterate()
                spent = torch.tensor([time.perf_counter() - start])
                dist.all_reduce(spent, op=dist.ReduceOp.MAX)
                measured.append(float(spent))
            excess = statistics.median(measured) - seconds
            if abs(excess) <= CLOSE * seconds:
                return
            self.seconds -= excess
            if self.seconds <= 0:
                raise SystemExit(
                    f"--compute-seconds: {seconds:.3f} is less than the host alone needs for an "
                    f"iteration ({seconds - self.seconds:.3f}); allowed: more than that"
                )


class _Compute(torch.autograd.Function):
    """A layer in time: reads its parameters, and takes as long as the real one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: TimedModule, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*parameters)  # real layers need them again
        x = _read(x, parameters)
        layer.device.launch(layer.share / 3)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer: TimedModule = ctx.layer
        grad = _read(grad, ctx.saved_tensors)
        layer.device.launch(layer.share * 2 / 3, QUEUED)
        if layer.is_first:
            layer.device.synchronize()
        return (grad, None, *layer.gradients)


def _read(x: Tensor, parameters: tuple[Tensor, ...]) -> Tensor:
    """A copy of ``x``, after the first element of each parameter was read."""
    x = x.clone()
    for parameter in parameters:
        x.add_(parameter.detach()[(0,) * parameter.dim()], alpha=0)
    return x


class TimedModule(nn.Module):
    """A layer, a block of them, or a name on the path of one: the tree of the real model.

    Paths of parameters and of blocks are those of the real model, so that what splits, wraps or
    names by them does the same here.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.share = 0.0
        """Of the time of an iteration; forward and backward."""
        self.is_first = False
        self.gradients: tuple[Tensor, ...] = ()
        self.steps: tuple[TimedModule, ...] = ()
        """Layers and blocks in the order of forward; a layer is its own only step."""

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = self.compute(x) if step is self else step(x)
        return x

    def compute(self, x: Tensor) -> Tensor:
        """This layer alone."""
        own = self.parameters(recurse=False)  # by name, as wrappers put others in their places
        return cast(Tensor, _Compute.apply(x, self, *own))  # type: ignore[no-untyped-call]

    def at(self, path: str) -> TimedModule:
        """The module of a path, made if it is missing."""
        module = self
        for name in filter(None, path.split(".")):
            if name not in module._modules:
                module.add_module(name, TimedModule(self.device))
            module = module._modules[name]  # type: ignore[assignment]
        return module


def timed_model(
    model: nn.Module, shares: Mapping[str, float], blocks: list[str], device: Device, seed: int
) -> tuple[nn.Module, Loss]:
    """The model in time, with the parameters of ``model``, and a function to its loss.

    Args:
        model: what `shares_of` was asked about.
        shares: of its layers, in the order of forward.
        blocks: paths of modules that are called as a whole, as some wrappers need.
        device: whose time they take.
        seed: of the values of gradients.
    """
    root = TimedModule(device)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            root.at(path).register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            root.at(path).register_buffer(name, buffer)  # some variants keep them equal
    rows = [_row(p) for p in model.parameters()]
    pool = 1e-3 * torch.randn(max(rows), generator=torch.Generator().manual_seed(seed))
    steps: dict[str, list[TimedModule]] = {"": []}
    for path, share in shares.items():
        layer = root.at(path)
        layer.share = share
        layer.gradients = tuple(_gradient(p, pool) for p in layer.parameters(recurse=False))
        layer.is_first = layer is root.at(next(iter(shares)))
        block = next((b for b in blocks if path == b or path.startswith(f"{b}.")), "")
        if path == block and block not in steps:
            block = ""  # a layer of its own
        if path != block:
            layer.steps = (layer,)
        if block not in steps:
            steps[""].append(root.at(block))
        steps.setdefault(block, []).append(layer)
    for path, inner in steps.items():
        root.at(path).steps = tuple(inner)
    return root, lambda m: m(torch.zeros(()))


def shares_of(model: nn.Module, loss_of: Loss) -> dict[str, float]:
    """Paths of the layers of a model in the order of forward: the share of each in its FLOPs.

    A layer is a module with parameters of its own. Multiplications between two layers, as in
    attention, count to the later one. A module that computes nothing and only holds parameters of
    others is none.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 6))
        >>> shares_of(model, lambda m: m(torch.ones(1, 2)).sum())
        {'0': 0.25, '1': 0.75}
    """
    counts: dict[str, int] = {}
    known: set[int] = set()
    before = 0
    with torch.no_grad(), FlopCounterMode(display=False) as counter:

        def count(path: str, module: nn.Module) -> None:
            nonlocal before
            own = {id(p) for p in module.parameters(recurse=False)}
            flops = counter.get_total_flops() - before
            if flops or own - known:
                counts[path] = counts.get(path, 0) + flops
                known.update(own)
                before += flops

        hooks = [
            module.register_forward_hook(lambda m, _, __, path=path: count(path, m))
            for path, module in model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        loss_of(model)
    for hook in hooks:
        hook.remove()
    return {path: flops / sum(counts.values()) for path, flops in counts.items()}


def _row(parameter: Tensor) -> int:
    """Values of a gradient that are drawn; its other rows are the same."""
    return parameter[0].numel() if parameter.dim() > 1 else parameter.numel()


def _gradient(parameter: Tensor, pool: Tensor) -> Tensor:
    """Of the true shape, all rows in one place: autograd only writes it, as a device would."""
    if parameter.dim() < 2:
        return pool[: parameter.numel()].view(parameter.shape)
    return pool[: _row(parameter)].view(parameter.shape[1:]).expand(parameter.shape)
