"""Predict an iteration on all ranks at once: what each computes, and what it waits for.

Moments are *work* (see the note in ``contended_network``) in arrays with an entry a rank; only the
completions of exchanges also know time.

[Note: The model]
- A segment is ready when its last gradient is; a rank hands its segments over in order.
- An exchange starts once the last rank has handed it over; at most two are in flight. Its latency
  comes first, then its bytes; where two exchanges ask for more than the network has, both slow
  down.
- While an exchange is in flight, compute runs at ``1 / (1 + compute_slowdown)`` of its speed; while
  ranks compute, latency takes ``1 + latency_slowdown`` and bytes ``1 + exchange_slowdown`` times as
  long, less if only some ranks compute. While one exchange transfers its bytes, the latency of the
  other is at least ``queue_share`` of that transfer and at most ``queue_seconds``: its messages
  queue behind the other's.
- A rank updates its parameters when all exchanges have ended.

[Note: Where an iteration begins]
Exchanges end on all ranks at once, and each rank then updates its parameters. In the long run a
rank therefore begins an iteration by its own ``optimizer`` seconds later than the last exchange
ended, and an iteration takes as long as it is to the next such end. ``settle`` finds that start, so
that the first simulated iteration is as good as the hundredth.

[Note: Readers that cannot keep up]
Workers read beside the training, into a queue that holds the batches of an update. A batch is read
``reading`` seconds after the one before it, or after it has found room: then a faster exchange only
waits for longer. They need cores, as computing does, so their time is work, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slipstream.errors import StrategyError
from slipstream.planner.iteration.contended_network import Completion, Job, NetworkClock, run
from slipstream.planner.iteration.local_cost import local_seconds
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.tasks import comm_tasks, gather_tasks
from slipstream.planner.iteration.transport_cost import GATHERS, RECIPES, sends_early, updated_part
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.fit import Array
from slipstream.planner.network.profile import NetworkProfile
from slipstream.strategy import Strategy

_SETTLING = 100
_SAME = 1e-9


def seconds_of(strategy: Strategy, workload: Workload, network: NetworkProfile) -> float:
    """Predict an update under a strategy in the long run.

    Raises:
        StrategyError: the strategy does not fit the gradients, or its codec was not measured.
        ClusterError: the transport needs a network that was not measured.
    """
    if strategy.local is not None:
        return local_seconds(strategy, workload, network)
    return predict(workload, CommPlan.of(strategy, workload.gradients, network.codecs), network)


def predict(workload: Workload, plan: CommPlan, network: NetworkProfile) -> float:
    """Seconds of an iteration in the long run, on as many ranks as the network has.

    Raises:
        StrategyError: the plan is for another number of gradients.
        ClusterError: the transport needs a network that was not measured.
    """
    return IterationModel(workload, plan, network).settle().seconds


class Pass(NamedTuple):
    """One batch: when a rank waits for it, begins forward, begins backward, and ends backward."""

    waits: Array
    forward: Array
    backward: Array
    ends: Array


class SimulatedIteration(NamedTuple):
    """The moments of one iteration.

    ``ready`` has a column a gradient; ``handed_over`` one a task: when the rank gave it to the
    network; ``decoded`` one a task that a codec made smaller. ``exchanges`` are the completions of
    the tasks, ``gathers`` those of the all-gathers of parameters.
    """

    start: Array
    passes: tuple[Pass, ...]
    exchanges: tuple[Completion, ...]
    gathers: tuple[Completion, ...]
    ready: Array
    handed_over: Array
    decoded: Array
    update: Array
    end: Array
    read: Array
    """When the last batch was read that a rank has taken."""


class Settled(NamedTuple):
    """An iteration in the long run: when each rank begins it, when its last batch before it was
    read, and the seconds that it takes."""

    start: Array
    read: Array
    seconds: float


class IterationModel:
    """The part that all iterations of a workload under a plan have in common; `run` simulates one.

    Raises:
        StrategyError: the plan is for another number of gradients.
        ClusterError: the transport needs a network that was not measured.
    """

    def __init__(self, workload: Workload, plan: CommPlan, network: NetworkProfile) -> None:
        if plan.cuts[-1:] != (len(workload.gradients),):
            raise StrategyError(
                f"the plan's last cut is {plan.cuts[-1:]}, but there are {len(workload.gradients)} "
                "gradients; the last cut must be their number"
            )
        work = workload.for_ranks(network.world_size).computed(plan.half, network.half_speed)
        self.workload = work
        self.plan = plan
        recipe = RECIPES[plan.transport]
        self._in_order = recipe.in_order
        self._contention = network.contention(recipe.direct)
        self.tasks = comm_tasks(work, plan, network)
        self.gather_tasks = gather_tasks(work, plan, network)
        self.optimizer = work.optimizer
        if plan.transport in GATHERS:
            part = updated_part(work.gradients, plan.replicated, work.num_ranks)
            own = network.sharding_seconds * len(work.gradients)
            self.optimizer = work.optimizer * part + own
        self._backward = work.backward + plan.recompute_share * work.forward
        stretch = self._backward / np.maximum(work.backward, 1e-30)
        self._ready = work.ready * stretch[:, None]
        starts = [0, *plan.cuts[:-1]]
        latest = np.maximum.reduceat(self._ready, starts, axis=1)
        # Segments are handed over in order: none before the one ahead of it.
        self._segments_ready = np.maximum.accumulate(latest, axis=1)
        self._encode, self.decode_seconds = self._codec_seconds()

    def settle(self) -> Settled:
        """Simulate until iterations repeat: an iteration in the long run.

        The first guess is right unless a rank is not ready when the last exchange has ended, or
        waits for those who read.
        """
        start = self.optimizer - self.optimizer.min()
        read = np.full(len(start), -np.inf)
        for _ in range(_SETTLING if self.workload.reading is None else 4 * _SETTLING):
            clock = NetworkClock()
            simulated = self.run(start, clock, read)
            end, before = clock.times_of(simulated.end), read
            seconds, read = end - start, simulated.read - simulated.end.min()
            if np.ptp(seconds) <= _SAME and (
                self.workload.reading is None or np.allclose(read, before, rtol=0, atol=_SAME)
            ):
                break
            start = end - end.min()
        return Settled(start, read, float(seconds.max()))

    def run(self, start: Array, clock: NetworkClock, read: Array) -> SimulatedIteration:
        """Simulate one iteration; the clock advances to its last completion.

        Args:
            start: the work at which each rank begins.
            clock: stands at the last completion of the iteration before.
            read: the work at which the last batch of that one was read for each rank; -inf: this
                one begins without any.
        """
        work, at = self.workload, start + self.workload.other
        passes: list[Pass] = []
        gathers: tuple[Completion, ...] = ()
        for number in range(self.plan.accumulate):
            loaded = at + work.data_wait
            if work.reading is not None:
                loaded = np.maximum(loaded, read + work.reading)
                full = loaded - self.plan.accumulate * work.reading
                read = np.where(np.isneginf(read), loaded, np.maximum(read + work.reading, full))
            forward_ends = loaded + work.forward
            if number == 0 and self.gather_tasks:
                updated = float(start.max())
                gathers, forward_ends = self._forward_under_gathers(loaded, updated, clock)
            ends = forward_ends + self._backward
            passes.append(Pass(at, loaded, forward_ends, ends))
            at = ends
        ready, handed_over, busy = self._hand_over(passes[-1])
        if self.plan.overlap:
            passes[-1] = passes[-1]._replace(ends=busy)
        exchanges = self._exchange(handed_over, busy, clock)
        done = np.maximum(busy, max((one.work for one in exchanges), default=-np.inf))
        decoded = self._decoded(busy, exchanges)
        if decoded.size:
            done = np.maximum(done, decoded[:, -1])
        handing = {"ready": ready, "handed_over": handed_over, "decoded": decoded}
        update = {"update": done, "end": done + self.optimizer}
        update["read"] = read
        return SimulatedIteration(start, tuple(passes), exchanges, gathers, **handing, **update)

    def _codec_seconds(self) -> tuple[Array, Array]:
        """Seconds to encode each task (0 for buffers), and to decode each one but buffers."""
        codec = self.plan.codec
        if codec is None:
            return np.zeros(len(self.tasks)), np.zeros(0)
        sizes = np.array([t.num_bytes for t in self.tasks if t.segment is not None], dtype=float)
        encode = codec.startup + codec.encode * sizes
        buffers = np.zeros(len(self.tasks) - len(sizes))  # they come first
        return np.concatenate([buffers, encode]), codec.startup + codec.decode * sizes

    def _hand_over(self, last: Pass) -> tuple[Array, Array, Array]:
        """When gradients are ready, tasks handed over, and the computing thread has nothing to do.

        Encoding is work of the thread that computes, so it delays everything after it.
        """
        begins, ends = last.backward[:, None], last.ends[:, None]
        segments = np.array([-1 if t.segment is None else t.segment for t in self.tasks])
        encoded = np.cumsum(self._encode)
        if not len(segments):
            return begins + self._ready, np.zeros((len(begins), 0)), last.ends
        when = np.where(segments < 0, begins, begins + self._segments_ready[:, segments])
        if not self.plan.overlap:
            handed_over = np.where(segments < 0, begins, ends) + encoded
            return begins + self._ready, handed_over, np.maximum(last.ends, handed_over[:, -1])
        gradients = np.arange(self._ready.shape[1])
        segment_of = np.searchsorted(np.array(self.plan.cuts), gradients, side="right")
        first_task = np.searchsorted(segments, segment_of)  # of each gradient's segment
        delay = np.concatenate([[0.0], encoded])[first_task]
        return begins + self._ready + delay, when + encoded, last.ends + encoded[-1]

    def _exchange(
        self, handed_over: Array, busy: Array, clock: NetworkClock
    ) -> tuple[Completion, ...]:
        """Run the tasks; each starts when the last rank has handed it over."""
        latest, begun = handed_over.max(axis=0), np.full(len(self.tasks), np.inf)
        if sends_early(self.plan.transport):
            begun = handed_over.mean(axis=0)
        jobs = [
            Job(float(last), task.phases, float(early))
            for last, task, early in zip(latest, self.tasks, begun, strict=True)
        ]
        idle = np.sort(busy).tolist()
        return tuple(run(jobs, clock, lambda _: idle, self._contention, self._in_order))

    def _decoded(self, busy: Array, exchanges: Sequence[Completion]) -> Array:
        """When each task is decoded: in order, after backward and after its exchange."""
        columns, at = [], busy
        coded = exchanges[len(exchanges) - len(self.decode_seconds) :]  # all but buffers
        for one, seconds in zip(coded, self.decode_seconds, strict=True):
            at = np.maximum(at, one.work) + seconds
            columns.append(at)
        return np.stack(columns, axis=1) if columns else np.zeros((len(busy), 0))

    def _forward_under_gathers(
        self, loaded: Array, available: float, clock: NetworkClock
    ) -> tuple[tuple[Completion, ...], Array]:
        """Completions of all-gathers, and the end of a forward that waits for each in turn."""
        starts = [0, *self.plan.gather_cuts[:-1]]
        # replicated parameters, which nothing waits for, come last: they count to the last share
        shares = np.add.reduceat(self.workload.forward_times, starts, axis=1)
        jobs = [Job(available, task.phases) for task in self.gather_tasks]

        def idle_from(completions: Sequence[Completion | None]) -> Sequence[float]:
            idle: list[float] = np.sort(_forward_ends(loaded, shares, completions)).tolist()
            return idle

        completions = run(jobs, clock, idle_from, self._contention, self._in_order)
        return tuple(completions), _forward_ends(loaded, shares, completions)


def _forward_ends(loaded: Array, shares: Array, completions: Sequence[Completion | None]) -> Array:
    """Follow forward until it stops at a segment that was not gathered."""
    at, latest = loaded, -np.inf
    for completion, share in zip(completions, shares.T, strict=True):
        if completion is None:
            break
        latest = max(latest, completion.work)
        at = np.maximum(at, latest) + share
    return at
