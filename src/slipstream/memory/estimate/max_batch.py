"""The largest batch that fits, found by trying."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.errors import OffloadError, UsageError
from slipstream.memory.estimate.estimate import Regions, optimizer_bytes, state_bytes
from slipstream.memory.estimate.saved_bytes import Inputs, saved_by
from slipstream.strategy import Offload
from slipstream.strategy.memory import Operation


def max_batch(
    model: nn.Module,
    inputs_of: Callable[[int], Inputs],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    memory_bytes: int | None = None,
    loss_of: Callable[[Any], torch.Tensor] = lambda output: output.loss,
    regions: Regions = (),
    config: Offload | None = None,
    keep: Sequence[Operation] = (),
    most: int = 2**16,
) -> int:
    """The largest batch of which an iteration fits: doubled until it does not, then halved between.

    On a GPU an iteration is run, with room taken for the optimizer's state, until memory is out,
    of the GPU or of the host; recomputation and offload are as they are installed. On a CPU, where
    memory is not out at a definite point, a forward is run without keeping anything, and what it
    would have saved is counted against ``memory_bytes``, as it would be with ``regions``,
    ``config`` and ``keep``; these must not be installed, as they hide what is saved. Running
    statistics and random states go on; on a GPU gradients are cleared.

    Args:
        model: in training mode, on its device.
        inputs_of: arguments by name, for so many samples.
        optimizer: makes no update.
        memory_bytes: the limit; None: that of the GPU.
        loss_of: the loss of what the model returns.
        regions: on a CPU: blocks that are computed again, as ``Recomputed.regions`` says, also
            after its ``close()``.
        wish: on a CPU: what leaves.
        keep: on a CPU: operations whose results regions keep.
        most: where to stop.

    Returns:
        0 where not even one sample fits.

    Raises:
        UsageError: on a CPU without a limit, or with recomputation or offload installed.
        StrategyError: a region names what is no block.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        >>> max_batch(model, lambda n: {"input": torch.ones(n, 8)}, memory_bytes=10_000)
        51
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        trial = _Trial(model, inputs_of, optimizer, loss_of, device)
        with _limited(device, memory_bytes):
            return largest(trial.fits, most)
    if memory_bytes is None:
        raise UsageError("max_batch() on a CPU needs a limit; give memory_bytes")
    state = sum(state_bytes(model, optimizer))

    def fits(batch: int) -> bool:
        saved = saved_by(model, inputs_of(batch))
        return state + saved.peak(regions, config, keep) + saved.largest <= memory_bytes

    return largest(fits, most)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, where all below it do; 0: none.

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


@contextmanager
def _limited(device: torch.device, memory_bytes: int | None) -> Iterator[None]:
    """Inside, this process may take so much of a GPU's memory."""
    if memory_bytes is None:
        yield
        return
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(memory_bytes / whole, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class _Trial:
    """An iteration on a GPU, which may not fit."""

    def __init__(
        self,
        model: nn.Module,
        inputs_of: Callable[[int], Inputs],
        optimizer: torch.optim.Optimizer | None,
        loss_of: Callable[[Any], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._model, self._inputs_of, self._loss_of = model, inputs_of, loss_of
        self._device = device
        self._state = 0
        if optimizer is not None and not optimizer.state:
            self._state = optimizer_bytes(optimizer)

    def fits(self, batch: int) -> bool:
        """Whether a batch goes forward and backward; what it took is given back."""
        try:
            self._iterate(batch)
        except (torch.cuda.OutOfMemoryError, OffloadError):
            return False
        finally:
            self._model.zero_grad(set_to_none=True)
            gc.collect()  # the traceback of the error held the graph
            torch.cuda.empty_cache()
        return True

    def _iterate(self, batch: int) -> None:
        room = torch.empty(self._state, dtype=torch.uint8, device=self._device)
        self._loss_of(self._model(**self._inputs_of(batch))).backward()
        torch.cuda.synchronize(self._device)
        del room
