"""The session's side of a trace: when iterations begin and end, and the file when all are recorded.

Never measures an exchange (the channel does) nor the wait for data (the loader does).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.comm.agreement import together
from slipstream.gradients.layout import Gradient
from slipstream.gradients.shipment import Exchanged
from slipstream.strategy import Strategy
from slipstream.trace import chrome
from slipstream.trace.event import BACKWARD, FORWARD, OPTIMIZER
from slipstream.trace.recorder import Recorder, Stamp


class Recording:
    """Tells the recorder what the session does; writes ``trace.json`` when it is complete.

    An iteration begins where the last one ended, or where an epoch starts: what a script does
    between epochs is not part of it.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        strategy: Strategy,
        device: torch.device,
        control: dist.ProcessGroup | None,
    ) -> None:
        self._recorder, self._strategy, self._device = recorder, strategy, device
        self._control = control
        self._name = type(model).__name__
        self._iteration = 0
        self._aligned = self._under_way = self._written = False
        self._forward_start: Stamp | None = None
        self._start: Stamp = 0.0
        self._end: Stamp = 0.0
        self._batch = self._samples = 0
        self._hook = model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)
        self.iteration_begins()

    def iteration_begins(self) -> None:
        """A collective before the first iteration that is recorded: clocks are aligned there."""
        if self._written or self._under_way:
            return
        if self._iteration == self._strategy.trace.skip and not self._aligned:
            with together("the alignment of the clocks for the trace"):
                self._recorder.align(self._control)
            self._aligned = True
        self._recorder.begin_step(self._iteration, self._recorder.stamp(self._device))
        self._forward_start = None

    def backward_begins(self, *, filler: bool = False) -> None:
        """The forward pass and the loss are over; a filler's samples do not count."""
        self._under_way = True
        self._samples += 0 if filler else self._batch
        self._batch = 0
        if self._recorder.active:
            self._start = self._recorder.stamp(self._device)
            self._recorder.add(FORWARD, self._forward_start or self._start, self._start)
            self._forward_start = None

    def backward_ends(self) -> None:
        """All gradients of this rank are there; exchanges may go on."""
        if self._recorder.active:
            self._end = self._recorder.stamp(self._device)

    def exchanged(self, ready: list[Stamp | None] | None) -> None:
        """The exchanges are over; when each gradient was there, if that is known."""
        facts = {} if ready is None else {"gradients_ready": ready}
        self._recorder.add(BACKWARD, self._start, self._end, **facts)

    def update_begins(self) -> None:
        """The optimizer is next."""
        if self._recorder.active:
            self._start = self._recorder.stamp(self._device)

    def update_ends(
        self, segments: Sequence[Exchanged], gradients: Callable[[], Iterable[Gradient]]
    ) -> None:
        """The iteration is over; a collective after the last one: the trace is gathered."""
        if self._written:
            return
        if self._recorder.active:
            now = self._recorder.stamp(self._device)
            self._recorder.add(OPTIMIZER, self._start, now)
            samples = {"samples": self._samples} if self._samples else {}
            self._recorder.end_step(now, **samples)
        else:
            self._recorder.end_step()
        self._iteration += 1
        self._samples = 0
        self._under_way = False
        if self._recorder.done:
            self.write(segments, gradients())
        else:
            self.iteration_begins()

    def write(self, segments: Sequence[Exchanged], gradients: Iterable[Gradient]) -> None:
        """Gather what was recorded, and write it on rank 0; a collective, the first time."""
        if self._written:
            return
        self._written = True
        self._hook.remove()
        self._recorder.meta |= {
            "model": self._name,
            "strategy": self._strategy.document(full=True),
            "segments": [{"bytes": s.num_bytes, "gradients": list(s.gradients)} for s in segments],
            "gradients": [
                {"name": g.name, "layer": g.layer, "bytes": g.num_bytes, "dtype": g.dtype}
                for g in gradients
            ],
        }
        with together("the gathering of the trace"):
            trace = self._recorder.gather(self._control)
        if trace is not None and trace.events:
            path = Path(self._strategy.trace.folder) / "trace.json"
            chrome.write(trace, path)
            print(f"slipstream: trace written to {path}", file=sys.stderr)

    def drop(self) -> None:
        """Stop recording, without a collective."""
        self._written = True
        self._hook.remove()
        self._control = None

    def _forward_begins(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._recorder.active and self._forward_start is None:
            self._forward_start = self._recorder.stamp(self._device)
            self._batch = _batch_size([*args, *kwargs.values()])


def _batch_size(inputs: Iterable[Any]) -> int:
    """The first axis of the first tensor; 0 where there is none."""
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.ndim:
            return value.shape[0]
    return 0
