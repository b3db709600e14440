"""One iteration on all ranks at once: what each of them computes, and what it waits for.

Never makes events and never chooses a plan. Moments are *work* (see ``_channel``) in arrays with a
number a rank; only the landings of exchanges know time.

[Note: Where an iteration begins]
Exchanges end on all ranks at once, and each then updates its parameters. So in the long run a rank
begins an iteration by its own ``optimizer`` later than the last exchange ended, and an iteration
takes as long as the next such end is away. ``settle`` finds that start, so the first simulated
iteration is as good as the hundredth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from slipstream.errors import StrategyError
from slipstream.planner.channel import Array, Clock, Idle, Job, Landing, run
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.exchange import Plan, gathers, parcels
from slipstream.planner.workload import Workload

_SETTLING = 4
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Pass:
    """The moments of one batch: the wait for it, forward, backward, and the end of that."""

    waits: Array
    forward: Array
    backward: Array
    ends: Array


@dataclass(frozen=True, slots=True)
class Moments:
    """One iteration.

    ``ready`` has a column a gradient, ``handed`` one a parcel: when the rank was through with it.
    ``decoded`` has a column a parcel that a codec made smaller. ``landings`` are those of parcels,
    ``gathered`` those of all-gathers.
    """

    start: Array
    passes: tuple[Pass, ...]
    ready: Array
    handed: Array
    landings: tuple[Landing, ...]
    decoded: Array
    update: Array
    end: Array
    gathered: tuple[Landing, ...]


class Step:
    """What does not change from iteration to iteration, made ready to be run.

    Raises:
        StrategyError: the plan is for another number of gradients.
        ClusterError: the transport needs a network that was not measured.
    """

    def __init__(self, workload: Workload, plan: Plan, cluster: NetworkProfile) -> None:
        if plan.cuts[-1:] != (len(workload.gradients),):
            raise StrategyError(
                f"the plan's last cut is {plan.cuts[-1:]}, but there are {len(workload.gradients)} "
                "gradients; the last cut must be their number"
            )
        self.workload = work = workload.for_ranks(cluster.world_size)
        self.plan, self._cluster = plan, cluster
        self.parcels = parcels(work, plan, cluster)
        self.gathers = gathers(work, plan, cluster)
        self.optimizer = work.optimizer
        if plan.transport == "sharded":
            self.optimizer = work.optimizer / work.num_ranks
        self._backward = work.backward + plan.recompute_share * work.forward
        stretch = self._backward / np.maximum(work.backward, 1e-30)
        self._ready = work.ready * stretch[:, None]
        starts = [0, *plan.cuts[:-1]]
        latest = np.maximum.reduceat(self._ready, starts, axis=1)
        self._segments = np.maximum.accumulate(latest, axis=1)
        self._encode, self.decode_seconds = self._codec_seconds()

    def settle(self) -> tuple[Array, float]:
        """When ranks begin an iteration in the long run, and the seconds that it takes.

        The first guess is right unless a rank is not ready when the last exchange has landed.
        """
        start = self.optimizer - self.optimizer.min()
        for _ in range(_SETTLING):
            clock = Clock()
            end = clock.times_of(self.run(start, clock).end)
            spent = end - start
            if np.ptp(spent) <= _SAME:
                break
            start = end - end.min()
        return start, float(spent.max())

    def run(self, start: Array, clock: Clock) -> Moments:
        """One iteration whose ranks begin at ``start``; the clock goes on to its last landing."""
        work, at = self.workload, start + self.workload.other
        passes: list[Pass] = []
        gathered: tuple[Landing, ...] = ()
        for number in range(self.plan.accumulate):
            loaded = at + work.data_wait
            forward_ends = loaded + work.forward
            if number == 0 and self.gathers:
                updated = float(start.max())
                gathered, forward_ends = self._forward_under_gathers(loaded, updated, clock)
            ends = forward_ends + self._backward
            passes.append(Pass(at, loaded, forward_ends, ends))
            at = ends
        ready, handed, busy = self._hand_over(passes[-1])
        if self.plan.overlap:
            passes[-1] = replace(passes[-1], ends=busy)
        landings = self._exchange(handed, busy, clock)
        done = np.maximum(busy, max((landing.work for landing in landings), default=-np.inf))
        decoded = self._decoded(busy, landings)
        if decoded.size:
            done = np.maximum(done, decoded[:, -1])
        end = done + self.optimizer
        moments = (ready, handed, landings, decoded, done, end, gathered)
        return Moments(start, tuple(passes), *moments)

    def _codec_seconds(self) -> tuple[Array, Array]:
        """Seconds to encode and to decode each parcel; 0 for buffers."""
        codec = self.plan.codec
        if codec is None:
            return np.zeros(len(self.parcels)), np.zeros(0)
        sizes = np.array([p.num_bytes for p in self.parcels if p.segment is not None], dtype=float)
        encode = codec.startup + codec.encode * sizes
        buffers = np.zeros(len(self.parcels) - len(sizes))
        return np.concatenate([buffers, encode]), codec.startup + codec.decode * sizes

    def _hand_over(self, last: Pass) -> tuple[Array, Array, Array]:
        """When gradients are ready and parcels handed over, and the thread has nothing to do.

        Encoding is work of the thread that computes, so it delays all that comes after it.
        """
        begins, ends = last.backward[:, None], last.ends[:, None]
        segments = np.array([-1 if p.segment is None else p.segment for p in self.parcels])
        encoded = np.cumsum(self._encode)
        if not len(segments):
            return begins + self._ready, np.zeros((len(begins), 0)), last.ends
        when = np.where(segments < 0, begins, begins + self._segments[:, segments])
        if not self.plan.overlap:
            handed = np.where(segments < 0, begins, ends) + encoded
            return begins + self._ready, handed, np.maximum(last.ends, handed[:, -1])
        stops = np.array(self.plan.cuts)
        own = np.searchsorted(stops, np.arange(self._ready.shape[1]), side="right")
        before = np.searchsorted(segments, own)  # the first parcel of each gradient's segment
        delay = np.concatenate([[0.0], encoded])[before]
        busy = last.ends + encoded[-1]
        return begins + self._ready + delay, when + encoded, busy

    def _exchange(self, handed: Array, busy: Array, clock: Clock) -> tuple[Landing, ...]:
        """Let the parcels through; each moves when the last rank has handed it over."""
        latest = handed.max(axis=0)
        jobs = [Job(float(at), p.phases) for at, p in zip(latest, self.parcels, strict=True)]
        rests = np.sort(busy).tolist()
        return tuple(self._run(jobs, clock, lambda landings: rests))

    def _run(self, jobs: Sequence[Job], clock: Clock, idle: Idle) -> list[Landing]:
        return run(jobs, clock, idle, self._cluster)

    def _decoded(self, busy: Array, landings: Sequence[Landing]) -> Array:
        """When each parcel is decoded, in order, once backward is over and it has landed."""
        pairs = zip(self.parcels, landings, strict=True)
        landed = [landing.work for parcel, landing in pairs if parcel.segment is not None]
        columns, at = [], busy
        for work, seconds in zip(landed, self.decode_seconds, strict=False):
            at = np.maximum(at, work) + seconds
            columns.append(at)
        return np.stack(columns, axis=1) if columns else np.zeros((len(busy), 0))

    def _forward_under_gathers(
        self, loaded: Array, available: float, clock: Clock
    ) -> tuple[tuple[Landing, ...], Array]:
        """Landings of all-gathers, and the end of a forward that waits for each of them in turn.

        The forward of a segment's layers is taken to be to the whole as its backward is.
        """
        gaps = np.diff(self._segments, axis=1, prepend=0.0)[:, ::-1] + 1e-12
        shares = self.workload.forward[:, None] * gaps / gaps.sum(axis=1, keepdims=True)
        jobs = [Job(available, parcel.phases) for parcel in self.gathers]
        landings = self._run(jobs, clock, partial(_idle_behind, loaded, shares))
        return tuple(landings), _forward_ends(loaded, shares, landings)


def _forward_ends(loaded: Array, shares: Array, landings: Sequence[Landing | None]) -> Array:
    """How far forward comes: it stops at the first segment that has not landed."""
    at, latest = loaded, -np.inf
    for landing, share in zip(landings, shares.T, strict=True):
        if landing is None:
            break
        latest = max(latest, landing.work)
        at = np.maximum(at, latest) + share
    return at


def _idle_behind(
    loaded: Array, shares: Array, landings: Sequence[Landing | None]
) -> Sequence[float]:
    rests: list[float] = np.sort(_forward_ends(loaded, shares, landings)).tolist()
    return rests
