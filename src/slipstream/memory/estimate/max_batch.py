"""Find the largest batch that fits by trying batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.errors import OffloadError, UsageError
from slipstream.memory.estimate.estimate import Regions, optimizer_bytes, state_bytes
from slipstream.memory.estimate.saved_bytes import ModelInputs, saved_by
from slipstream.strategy import OffloadConfig
from slipstream.strategy.memory import KeptOperation


def max_batch(
    model: nn.Module,
    inputs_of: Callable[[int], ModelInputs],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    memory_bytes: int | None = None,
    loss_of: Callable[[Any], torch.Tensor] = lambda output: output.loss,
    regions: Regions = (),
    offload: OffloadConfig | None = None,
    keep: Sequence[KeptOperation] = (),
    most: int = 2**16,
) -> int:
    """The largest batch of which an iteration fits into memory: doubling, then bisection.

    On a GPU each batch runs forward and backward, with memory reserved for the optimizer's state,
    until the memory of the GPU or the host is exhausted. Recomputation and offload count as they
    are installed.

    On a CPU, which has no hard limit, each batch runs a forward, and what it would save counts
    against ``memory_bytes``, with recomputation and offload as ``regions``, ``offload`` and
    ``keep`` describe them. They must not be installed, as they hide what is saved.

    Running statistics and random states advance; on a GPU gradients are cleared.

    Args:
        model: in training mode, on its device.
        inputs_of: returns the model's keyword arguments for so many samples.
        optimizer: makes no update.
        memory_bytes: the limit; None: the memory of the GPU.
        loss_of: the loss of what the model returns.
        regions: on a CPU: blocks that are recomputed, as in ``Recomputed.regions``, which can be
            read after ``close()``.
        offload: on a CPU: what is offloaded.
        keep: on a CPU: operations whose results regions keep.
        most: the largest batch to try.

    Returns:
        0 if not even one sample fits.

    Raises:
        UsageError: on a CPU: no limit, or recomputation or offload is installed.
        StrategyError: a region names a path that is not a block.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        >>> max_batch(model, lambda n: {"input": torch.ones(n, 8)}, memory_bytes=10_000)
        51
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        if memory_bytes is None:
            raise UsageError("max_batch() on a CPU needs a limit; pass memory_bytes")
        state = sum(state_bytes(model, optimizer))

        def fits_limit(batch: int) -> bool:
            saved = saved_by(model, inputs_of(batch))
            return state + saved.peak(regions, offload, keep) + saved.largest <= memory_bytes

        return largest(fits_limit, most)
    new_state = optimizer is not None and not optimizer.state
    reserved_bytes = optimizer_bytes(optimizer) if optimizer is not None and new_state else 0
    with _limited(memory_bytes, device):
        return largest(_fits_gpu(model, inputs_of, loss_of, reserved_bytes, device), most)


@contextmanager
def _limited(memory_bytes: int | None, device: torch.device) -> Iterator[None]:
    """Inside, this process gets so much of a GPU's memory; None: all of it."""
    if memory_bytes is None:
        yield
        return
    fraction = memory_bytes / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(fraction, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _fits_gpu(
    model: nn.Module,
    inputs_of: Callable[[int], ModelInputs],
    loss_of: Callable[[Any], torch.Tensor],
    reserved_bytes: int,
    device: torch.device,
) -> Callable[[int], bool]:
    """Tell by an iteration of a batch whether it fits, with ``reserved_bytes`` beside it."""

    def iterate(batch: int) -> None:
        reserved = torch.empty(reserved_bytes, dtype=torch.uint8, device=device)
        loss_of(model(**inputs_of(batch))).backward()
        torch.cuda.synchronize(device)
        del reserved

    def fits(batch: int) -> bool:
        try:
            iterate(batch)
        except (torch.cuda.OutOfMemoryError, OffloadError):
            return False
        finally:
            model.zero_grad(set_to_none=True)
            gc.collect()  # the traceback of the error holds the graph
            torch.cuda.empty_cache()
        return True

    return fits


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, if all smaller ones fit, too; 0: none fits.

    Example:
        >>> asked = []
        >>> largest(lambda n: asked.append(n) or n <= 11, most=100), asked
        (11, [1, 2, 4, 8, 16, 12, 10, 11])
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
