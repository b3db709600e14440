"""The progress of a training: a line every few steps and, on a terminal, a bar; rank 0 only."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Self

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor


class Meter:
    """Counts the steps of a training; a context manager that shows the bar while it is open.

    Args:
        steps: of the whole training.
        samples: samples of all ranks in one step.
        log_every: steps between two lines.
        rank: of this process; all but 0 print nothing.

    Example:
        >>> with Meter(steps=4, samples=32, log_every=10, rank=0) as meter:
        ...     for loss in torch.tensor([5.0, 4.0, 3.0, 2.0]):
        ...         meter.update(loss)  # doctest: +ELLIPSIS
        step    1  loss 5.000  ... samples/s
        >>> meter.mean_loss()
        3.5
    """

    def __init__(self, steps: int, samples: int, log_every: int, rank: int) -> None:
        self._samples, self._log_every, self._rank = samples, log_every, rank
        self._losses: deque[Tensor] = deque(maxlen=10)
        self._step = 0
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, disable=rank != 0 or not sys.stdout.isatty())
        self._task = self._bar.add_task("training", total=steps)

    def __enter__(self) -> Self:
        self._bar.start()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, loss: Tensor) -> None:
        """Count a step that ended with ``loss``, a scalar."""
        self._step += 1
        self._losses.append(loss.detach())  # no item() here: it would wait for the device
        self._bar.advance(self._task)
        if self._rank == 0 and (self._step == 1 or self._step % self._log_every == 0):
            speed = self._step * self._samples / (time.perf_counter() - self._began)
            text = f"step {self._step:4}  loss {loss.item():.3f}  {speed:.1f} samples/s"
            print(text, flush=True)

    def mean_loss(self) -> float:
        """Mean of the last ten losses, over this rank's samples."""
        return torch.stack(list(self._losses)).mean().item()
