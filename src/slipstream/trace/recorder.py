"""Records the spans of one rank, and gathers those of all ranks on one clock.

The other rooms decide what becomes a span. Nothing here runs unless a recorder was made.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slipstream.trace.event import ITERATION, Event, Trace, is_meeting
from slipstream.version import __version__

Stamp = float | torch.cuda.Event
"""A point in time: seconds on this rank's clock, or a CUDA event that is resolved later."""

Clock = Callable[[], float]
"""Seconds now."""

_PINGS = 10
_Row = tuple[str, int, Stamp, Stamp, dict[str, Any]]


class _Reading(NamedTuple):
    """When one clock showed ``at``, the other showed ``at + offset``, plus or minus ``error``."""

    at: float
    offset: float
    error: float


class Recorder:
    """Records the steps ``first_step .. first_step + num_steps - 1`` of one rank.

    The main thread calls ``begin_step`` and ``end_step`` around each iteration, which adds the span
    ``iteration``. Any thread may ``add`` spans of the current step, as long as it does so before it
    signals the main thread that the work is done. A span costs one append; everything else waits
    for ``gather``. That of a meeting may begin in an earlier step: it is cut into a piece for each.

    CUDA work runs later than the Python code that starts it: take start and end with ``stamp``,
    which does not synchronize.

    Args:
        rank: This rank.
        first_step: The first step to record.
        num_steps: How many steps to record, at least 1.
        clock: Returns seconds; tests replace it.

    Attributes:
        active: True while the current step is recorded; check it before measuring anything.
        done: True once the last step has ended; then call ``gather``.
        first_step: The first step to record.
        now: Seconds on this rank's clock.
        meta: Goes into ``Trace.meta`` of rank 0; overrides what the recorder adds itself.

    Example:
        >>> recorder = Recorder(rank=0, first_step=2, num_steps=1)
        >>> for step in range(3):
        ...     recorder.begin_step(step)
        ...     start = recorder.now()
        ...     recorder.add("forward", start, recorder.now())
        ...     recorder.end_step()
        >>> trace = recorder.gather()
        >>> [(event.name, event.step) for event in trace.events]
        [('iteration', 2), ('forward', 2)]
    """

    def __init__(
        self, rank: int, first_step: int, num_steps: int, *, clock: Clock = time.perf_counter
    ) -> None:
        self.rank = rank
        self.active = False
        self.meta: dict[str, Any] = {}
        self.now = clock
        self._step = -1
        self._begin: Stamp = 0.0
        self._cpu_begin = 0.0
        self._gpu: _GpuClock | None = None
        self.restart(first_step, num_steps)

    def restart(self, first_step: int, num_steps: int) -> None:
        """Discard what was recorded, and record these later steps instead."""
        self.done = False
        self.first_step, self._last = first_step, first_step + num_steps - 1
        self._rows: list[_Row] = []
        self._readings: list[_Reading] = []
        self._cpu: list[float] = []

    def stamp(self, device: torch.device) -> Stamp:
        """Now on the CPU; on CUDA the moment at which the current stream gets to this point."""
        if device.type != "cuda":
            return self.now()
        if self._gpu is None:
            self._gpu = _GpuClock(device, self.now)
        return self._gpu.record()

    def begin_step(self, step: int, start: Stamp | None = None) -> None:
        """Begin an iteration, at ``start`` or now."""
        self.active = self.first_step <= step <= self._last
        self._step = step
        if self.active:
            self._begin = self.now() if start is None else start
            self._cpu_begin = time.thread_time()

    def add(self, name: str, start: Stamp, end: Stamp, **args: Any) -> None:
        """Add a span to the current step; does nothing in a step that is not recorded.

        ``args`` are plain JSON values, with three exceptions: ``ready`` is a stamp like ``start``,
        ``gradients_ready`` is a list of stamps or None, stored as seconds since ``start``, and a
        tensor of one value is stored as a number, or not at all where it is not finite.
        """
        if self.active:  # no lock: appending to a list is atomic
            self._rows.append((name, self._step, start, end, args))

    def end_step(self, end: Stamp | None = None, **args: Any) -> None:
        """End the iteration, at ``end`` or now."""
        if self.active:
            self._cpu.append(time.thread_time() - self._cpu_begin)
            self.add(ITERATION, self._begin, self.now() if end is None else end, **args)
        self.active = False
        self.done = self._step >= self._last

    def align(self, group: dist.ProcessGroup | None = None) -> None:
        """Compare this rank's clock with rank 0's. Collective over ``group`` (None: all ranks).

        No exchange may run in ``group`` meanwhile. Call it at the first recorded step; ``gather``
        does it again, and the drift of the clocks in between is interpolated. Each rank plays
        ping-pong with rank 0 and keeps the fastest round trip, half of which bounds the error.
        Source: Mills, "Internet time synchronization: the network time protocol" (1991); Cristian,
        "Probabilistic clock synchronization" (1989).
        """
        if _size(group) == 1:
            return
        if dist.get_rank(group) == 0:
            _answer_pings(self.now, group)
        else:
            self._readings.append(_ping(self.now, group))

    def gather(self, group: dist.ProcessGroup | None = None) -> Trace | None:
        """Gather the events of all ranks on rank 0's clock: a trace on rank 0, None on others.

        Collective over ``group`` (None: all ranks, or this process alone); no exchange may run in
        it meanwhile.
        """
        self.align(group)  # the second reading: drift since the first one is interpolated
        if self._gpu is not None:
            self._gpu.synchronize()  # elapsed times exist for completed events only
        error = max((reading.error for reading in self._readings), default=0.0)
        busy = median(self._cpu) if self._cpu and self._gpu is None else None
        local = (self._events(), socket.gethostname(), error, busy)
        parts: list[Any] | None = [local]
        if _size(group) > 1:
            parts = [None] * _size(group) if dist.get_rank(group) == 0 else None
            dist.gather_object(local, parts, group=group, group_dst=0)
        if parts is None:
            return None
        events, hosts, errors, cpu = zip(*parts, strict=True)
        meta: dict[str, Any] = {
            "world_size": len(parts),
            "hosts": list(hosts),
            "versions": {"slipstream": __version__, "torch": torch.__version__},
            "clock_error": list(errors),
        }
        if None not in cpu:
            meta["cpu_seconds"] = list(cpu)
        merged = sorted(chain(*events), key=lambda e: (e.start, -e.end, e.rank))
        return Trace(tuple(merged), meta | self.meta)

    def _events(self) -> list[Event]:
        """This rank's spans on rank 0's clock."""
        events = []
        for name, step, start, end, args in self._rows:
            begin = self._seconds(start)
            if "ready" in args:
                args = args | {"ready": self._seconds(args["ready"])}
            if stamps := args.get("gradients_ready"):
                offsets = [None if at is None else self._seconds(at) - begin for at in stamps]
                args = args | {"gradients_ready": offsets}
            args = dict(_read(args))
            events.append(Event(name, self.rank, step, begin, self._seconds(end), args))
        steps = {event.step: event for event in events if event.name == ITERATION}
        return [piece for event in events for piece in _pieces(event, steps)]

    def _seconds(self, stamp: Stamp) -> float:
        """A stamp as seconds on rank 0's clock."""
        if isinstance(stamp, torch.cuda.Event):
            assert self._gpu is not None, "a CUDA stamp of another recorder"
            stamp = self._gpu.seconds(stamp)
        return _translate(stamp, self._readings)


def _read(args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Read tensors, of work that is done; numbers that are not finite are in no document."""
    for name, value in args.items():
        read = float(value) if isinstance(value, torch.Tensor) else value
        if not isinstance(value, torch.Tensor) or math.isfinite(read):
            yield name, read


def _pieces(event: Event, steps: Mapping[int, Event]) -> Iterator[Event]:
    """An event; of a meeting a piece for each recorded step, as it may have begun in an earlier
    one."""
    if not is_meeting(event.name):
        yield event
        return
    for number, step in sorted(steps.items()):
        start, end = max(event.start, step.start), min(event.end, step.end)
        if number <= event.step and start < end:
            yield replace(event, step=number, start=start, end=end)


class _GpuClock:
    """Converts CUDA events to seconds on ``clock``.

    CUDA events measure time only relative to each other. An anchor is an event whose time is read
    from ``clock`` right after it has completed. There is one at the first stamp and one at the end,
    because the clocks of GPU and host drift apart by microseconds a second.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device, self._clock = device, clock
        self._zero, self._start = self._anchor()
        self._readings = [_Reading(0.0, self._start, 0.0)]

    def record(self) -> torch.cuda.Event:
        """An event on the current stream of the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Wait for all streams, so that all events have completed, and set the second anchor."""
        torch.cuda.synchronize(self._device)
        event, at = self._anchor()
        since = self._since_zero(event)
        self._readings = [self._readings[0], _Reading(since, at - since, 0.0)]

    def seconds(self, event: torch.cuda.Event) -> float:
        """The event's time on ``clock``; only after ``synchronize``."""
        return _translate(self._since_zero(event), self._readings)

    def _anchor(self) -> tuple[torch.cuda.Event, float]:
        torch.cuda.synchronize(self._device)  # else the anchor would queue behind earlier work
        event = self.record()
        event.synchronize()
        return event, self._clock()

    def _since_zero(self, event: torch.cuda.Event) -> float:
        return float(self._zero.elapsed_time(event)) * 1e-3


def _translate(at: float, readings: list[_Reading]) -> float:
    """A time of one clock on the other, by the line through the first and the last reading."""
    if not readings:
        return at
    first, last = readings[0], readings[-1]
    drift = (last.offset - first.offset) / (last.at - first.at) if last.at > first.at else 0.0
    return at + first.offset + drift * (at - first.at)


def _ping(clock: Clock, group: dist.ProcessGroup | None) -> _Reading:
    """The reading of rank 0's clock with the fastest of several round trips."""
    message = _message(group)
    readings = []
    for _ in range(_PINGS):
        sent = clock()
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        theirs = float(message.item())
        received = clock()
        middle = (sent + received) / 2
        readings.append(_Reading(middle, theirs - middle, (received - sent) / 2))
    return min(readings, key=lambda reading: reading.error)


def _answer_pings(clock: Clock, group: dist.ProcessGroup | None) -> None:
    """Send the time of rank 0 to each other rank in turn."""
    message = _message(group)
    for peer in range(1, _size(group)):
        for _ in range(_PINGS):
            dist.recv(message, group=group, group_src=peer)
            message.fill_(clock())
            dist.send(message, group=group, group_dst=peer)


def _message(group: dist.ProcessGroup | None) -> torch.Tensor:
    """A buffer for one time, on a device that the backend can send from."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return torch.zeros(1, dtype=torch.float64, device=device)


def _size(group: dist.ProcessGroup | None) -> int:
    """Ranks of the group; 1 without a process group."""
    joined = dist.is_available() and dist.is_initialized()
    return dist.get_world_size(group) if joined else 1
