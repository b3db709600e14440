"""Synthetic trainings: forward, backward, and exchanges one at a time.

All times here are milliseconds and all sizes megabytes (10**6 bytes); the trace itself is in
seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from slipstream.planner.network.curve import Curve
from slipstream.planner.network.profile import Network, NetworkProfile
from slipstream.trace.event import Event, Trace
from tests.planner.networks import contention, profile

MS, MB = 1e-3, 10**6


def on_time(rank: int, step: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Training:
    """By default ten gradients of 1 MB, ready every 10 ms of 100 ms of backward."""

    cuts: tuple[int, ...] = (5, 10)
    startup: float = 40.0
    per_mb: float = 2.0
    forward: float = 50.0
    data_wait: float = 0.0
    outside: float = 0.0  # of anything that is recorded, behind the wait for data
    reading: Mapping[str, int] = field(default_factory=dict)
    optimizer: float = 10.0
    sizes: Sequence[float] = (1.0,) * 10
    offsets: Sequence[float | None] = tuple(10.0 * number for number in range(1, 11))
    backward: float = 100.0
    ranks: int = 2
    steps: int = 3
    overlap: bool = True
    late: Callable[[int, int], float] = on_time
    phase: str = "forward"
    clock_error: float = 0.0
    samples: int = 8
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def network(self) -> NetworkProfile:
        """What exchanges truly cost: one at a time, and no contention."""
        line = [(2**k, (self.startup + self.per_mb * 2**k / MB) * MS) for k in range(10, 30)]
        world = Network(kind="world", ranks=self.ranks, all_reduce=Curve.fit(line))
        queue = contention(queue_share=1.0, queue_seconds=line[-1][1])
        return profile({"world": world}, **dict(queue))

    @property
    def trace(self) -> Trace:
        events = [event for step in range(2, 2 + self.steps) for event in self._step(step)]
        segments = self._segments() if self.ranks > 1 else []
        last = [cut - 1 for cut in self.cuts]
        gradients = {"overlap": self.overlap, "split": {"kind": "by_index", "last": last}}
        meta = {
            "world_size": self.ranks,
            "model": "Made to measure",
            "strategy": {"gradients": gradients, "trace": {"steps": self.steps}},
            "segments": [{"bytes": size, "gradients": names} for names, size in segments],
            "gradients": [
                {"name": f"g{index}", "layer": "l", "bytes": int(size * MB), "dtype": "float32"}
                for index, size in enumerate(self.sizes)
            ],
            "clock_error": [0.0] + [self.clock_error * MS] * (self.ranks - 1),
        }
        ordered = sorted(events, key=lambda event: (event.start, -event.end, event.rank))
        return Trace(tuple(ordered), meta | self.meta)

    def _segments(self) -> list[tuple[list[str], int]]:
        return [
            ([f"g{index}" for index in range(a, b)], int(sum(self.sizes[a:b]) * MB))
            for a, b in pairwise((0, *self.cuts))
        ]

    def _step(self, step: int) -> list[Event]:
        zero = 10_000.0 * step
        events, starts, ends = [], [], []
        for rank in range(self.ranks):
            at = zero
            for name in ("data_wait", "outside", "forward", "backward"):
                late = self.late(rank, step) if name == self.phase else 0.0
                start, at = at, at + getattr(self, name) + late
                ready = {"gradients_ready": [o and o * MS for o in self.offsets]}
                args = ready if name == "backward" and self.ranks > 1 else {}
                args = dict(self.reading) if name == "data_wait" else args
                if name != "outside":
                    events.append(_event(name, rank, step, start, at, args))
            starts.append(start)
            ends.append(at)
        done = max(ends)
        if self.ranks > 1:
            exchanged = self._exchanges(step, starts, ends)
            done = max(done, max(event.end for event in exchanged) / MS)
            events += exchanged
        for rank in range(self.ranks):
            late = self.late(rank, step) if self.phase == "optimizer" else 0.0
            end = done + self.optimizer + late
            events.append(_event("optimizer", rank, step, done, end))
            events.append(_event("iteration", rank, step, zero, end, {"samples": self.samples}))
        return events

    def _exchanges(self, step: int, starts: list[float], ends: list[float]) -> list[Event]:
        events, free = [], 0.0
        for number, (a, b) in enumerate(pairwise((0, *self.cuts))):
            names, size = self._segments()[number]
            offsets = self.offsets[a:b]
            ready = [
                end if None in offsets else start + max(o for o in offsets if o is not None)
                for start, end in zip(starts, ends, strict=True)
            ]
            sent = [max(r, free if self.overlap else max(ends, default=0)) for r in ready]
            end = max(*sent, free) + self.startup + self.per_mb * size / MB
            for rank, start in enumerate(sent):
                args = {"segment": number, "bytes": size, "gradients": len(names)}
                args |= {"collectives": 1, "ready": ready[rank] * MS}
                begun = max(start, free)
                events.append(_event(f"allreduce{number + 1}", rank, step, begun, end, args))
            free = end
        return events


def _event(
    name: str, rank: int, step: int, start: float, end: float, args: dict[str, Any] | None = None
) -> Event:
    return Event(name, rank, step, start * MS, end * MS, args or {})
