"""Measure what a block costs on the arguments it is called with: seconds and bytes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from slipstream.memory.forward_override import Forward
from slipstream.memory.recompute.block_dataflow import Call
from slipstream.memory.recompute.budget import BlockCost
from slipstream.memory.recompute.buffers import SubstituteBuffers, buffers_of
from slipstream.memory.recompute.module_state import modules_in, settings_kept
from slipstream.memory.recompute.rng_state import RngReplay, generators_of
from slipstream.plain_copy import Attached
from slipstream.pytree import tensors

T = TypeVar("T")

RUNS = 3


def saved_storages(run: Callable[[], T]) -> tuple[T, dict[int, int]]:
    """Return what ``run`` returns, and the storages that autograd saved in it for backward.

    Storages are bytes by address; addresses are unique as long as the returned graph exists.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> y, storages = saved_storages(lambda: (x + x).exp().sum())
        >>> list(storages.values())  # of the exponential, which its own backward needs
        [16]
    """
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages.update(storages_of([tensor]))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return run(), storages


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the storages of dense tensors, by address."""
    storages = (t.untyped_storage() for t in tensors if t.layout is torch.strided)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def measure(module: nn.Module, forward: Forward, call: Call) -> BlockCost:
    """Run forward and backward of ``module`` on copies of ``call`` a few times; take medians.

    Bytes are counted in a run before. Gradients, buffers, settings (`StateReplay`) and random
    states do not change.
    """
    device = next((tensor.device for tensor in call.tensors), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    rng = RngReplay(generators_of(module.modules()))
    settings = settings_kept(module, call.objects)
    with torch.random.fork_rng(devices), rng, settings:
        try:
            with _without_hooks(module):
                return _cost(module, forward, call, device)
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError):
            if not any(m._forward_hooks for m in modules_in([module])):
                raise
            return _cost(module, forward, call, device)  # one changes what the block goes on with


def _cost(module: nn.Module, forward: Forward, call: Call, device: torch.device) -> BlockCost:
    output_bytes, saved_bytes = _count_bytes(module, forward, call)
    runs = [_time_run(module, forward, call, device) for _ in range(RUNS)]
    forwards, backwards = zip(*runs, strict=True)
    return BlockCost(median(forwards), median(backwards), output_bytes, saved_bytes)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Inside, a script's forward hooks in a block are not called: they collect what it computes, as
    features or attentions, of its own forward alone."""
    hooked = [(m, m._forward_hooks) for m in modules_in([module]) if m._forward_hooks]
    for m, hooks in hooked:
        ours = {number: hook for number, hook in hooks.items() if isinstance(hook, Attached)}
        m._forward_hooks = OrderedDict(ours)
    try:
        yield
    finally:
        for m, hooks in hooked:
            m._forward_hooks = hooks


def _count_bytes(module: nn.Module, forward: Forward, call: Call) -> tuple[int, int]:
    """Bytes of the output, and of all that a forward keeps for backward, output included."""
    with SubstituteBuffers(buffers_of(module.modules()), module.modules()):
        call = _detached_copy(call)
        ignored = storages_of((*call.tensors, *module.parameters(), *module.buffers()))
        output, saved = saved_storages(lambda: forward(*call.args, **call.kwargs))
        returned = storages_of(tensors(output))
        kept = (saved | returned).items()
        return sum(returned.values()), sum(size for address, size in kept if address not in ignored)


def _time_run(
    module: nn.Module, forward: Forward, call: Call, device: torch.device
) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    # These hooks hide outer ones, such as those of offload, whose copies must not be measured.
    keep_saved = saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
    with SubstituteBuffers(buffers_of(module.modules()), module.modules()), keep_saved:
        call = _detached_copy(call)
        inputs = [t for t in (*call.tensors, *module.parameters()) if t.requires_grad]
        start = _now(device)
        outputs = tensors(forward(*call.args, **call.kwargs))
        middle = _now(device)
        ends = [output for output in outputs if output.requires_grad]
        if ends and inputs:
            ones = [torch.ones_like(output) for output in ends]
            torch.autograd.grad(ends, inputs, ones, allow_unused=True)
        return middle - start, _now(device) - middle


def _detached_copy(call: Call) -> Call:
    """The call on copies of its tensors, cut off from the graph that led to these.

    The copies are no leaves, as autograd refuses changes of leaves in place.
    """
    copies = {id(t): t.detach().requires_grad_(t.requires_grad).clone() for t in call.tensors}
    return call.with_tensors(copies[id(tensor)] for tensor in call.tensors)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
