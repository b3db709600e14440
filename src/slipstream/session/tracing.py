"""The session's side of a trace: when iterations begin and end, and the file when all are recorded.

Never measures an exchange (the channel does) nor the wait for data (the loader does).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.strategy import Trace as TraceSettings
from slipstream.trace import chrome
from slipstream.trace.event import BACKWARD, FORWARD, OPTIMIZER, Trace
from slipstream.trace.recorder import Recorder, Stamp
from slipstream.transport.consistency import collective_errors
from slipstream.tuner.online_split import SETTLING, OnlineSplit


class Recording:
    """Tells the recorder what the session does; writes ``trace.json`` when it is complete.

    An iteration begins where the last one ended, or where an epoch starts: what a script does
    between epochs is not part of it. Where the split is searched for, that has the recorder first.
    ``share``: how many ranks share a model; each counts its part of the samples.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        config: TraceSettings,
        device: torch.device,
        control: dist.ProcessGroup | None,
        live: OnlineSplit | None,
        share: int = 1,
    ) -> None:
        self._recorder, self._config, self._device = recorder, config, device
        self._control, self._live, self._part = control, live, 1 / share if share > 1 else 1
        self._for_user = live is None  # whether this window is the one that the user asked for
        self._iteration = 0
        self._aligned = self._under_way = self._over = False
        self._forward_start: Stamp | None = None
        self._in_backward = False
        self._start: Stamp = 0.0
        self._end: Stamp = 0.0
        self._batch = self._samples = 0
        self.iteration_begins()  # first, as it may fail
        self._hook = model.register_forward_pre_hook(
            lambda _, args, kwargs: self.forward_begins(args, kwargs), with_kwargs=True
        )

    def iteration_begins(self) -> None:
        """A collective before the first iteration that is recorded: clocks are aligned there."""
        if self._over or self._under_way:
            return
        if self._iteration == self._recorder.first_step and not self._aligned:
            with collective_errors("the alignment of the clocks for the trace"):
                self._recorder.align(self._control)
            self._aligned = True
        self._recorder.begin_step(self._iteration, self._recorder.stamp(self._device))
        self._forward_start = None

    def backward_begins(self, *, dummy_batch: bool = False) -> None:
        """The forward pass and the loss are over; a filler's samples do not count."""
        self._under_way = self._in_backward = True
        self._samples += 0 if dummy_batch else self._batch
        self._batch = 0
        if self._recorder.active:
            self._start = self._recorder.stamp(self._device)
            self._recorder.add(FORWARD, self._forward_start or self._start, self._start)
            self._forward_start = None

    def backward_ends(self) -> None:
        """All gradients of this rank are there; exchanges may go on."""
        self._in_backward = False
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

    def update_ends(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """The iteration is over; a collective after the last one: the trace is gathered."""
        if self._over:
            return
        if self._recorder.active:
            now = self._recorder.stamp(self._device)
            self._recorder.add(OPTIMIZER, self._start, now)
            samples = {"samples": own} if (own := self._samples * self._part) else {}
            self._recorder.end_step(now, **samples)
        else:
            self._recorder.end_step()
        self._iteration += 1
        self._samples = 0
        self._under_way = False
        if self._recorder.done:
            self._complete(facts())
        if not self._over:
            self.iteration_begins()

    def write(self, facts: Mapping[str, Any]) -> None:
        """Gather what was recorded, and write it on rank 0; a collective, the first time."""
        if self._over:
            return
        self.drop()
        if not self._for_user:
            return
        trace = self._gather(facts)
        if trace is not None and trace.events:
            path = Path(self._config.folder) / "trace.json"
            chrome.write(trace, path)
            print(f"slipstream: trace written to {path}", file=sys.stderr)

    def drop(self) -> None:
        """Stop recording, without a collective."""
        self._over = True
        self._hook.remove()

    def _complete(self, facts: Mapping[str, Any]) -> None:
        """All iterations of a window are recorded: for the search of the split, or for the user."""
        live = self._live
        if live is None or self._for_user:
            self.write(facts)
        elif not live.settled and live.proceed(self._gather(facts)):
            self._next_window(self._iteration + SETTLING, live.steps)
        elif self._config.steps is not None:
            self._for_user = True
            self._next_window(
                max(self._config.skip, self._iteration + SETTLING), self._config.steps
            )
        else:
            self.drop()

    def _next_window(self, first_step: int, num_steps: int) -> None:
        self._recorder.restart(first_step, num_steps)
        self._aligned = False

    def _gather(self, facts: Mapping[str, Any]) -> Trace | None:
        self._recorder.meta |= facts
        with collective_errors("the gathering of the trace"):
            return self._recorder.gather(self._control)

    def forward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is about to get these inputs. Within a backward (stages of a pipeline, blocks
        that are computed again) it is not news."""
        if self._recorder.active and self._forward_start is None and not self._in_backward:
            self._forward_start = self._recorder.stamp(self._device)
            self._batch = _batch_size([*args, *kwargs.values()])


def _batch_size(inputs: Iterable[Any]) -> int:
    """The first axis of the first tensor; 0 where there is none."""
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.ndim:
            return value.shape[0]
    return 0
