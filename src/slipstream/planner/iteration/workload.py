"""A workload: one iteration's computing, and the bytes of its gradients, freed of any strategy.

A workload holds compute times, ready times and bytes, and nothing about exchanges.

[Note: Contention]
While an exchange is in flight, compute runs at ``1 / (1 + compute_slowdown)`` of its speed. So
there are two clocks: seconds, and *work*, the seconds that compute would have taken without
exchanges. Work advances at the same rate on all ranks, since all take part in an exchange. A
workload is in work; the simulator turns it into seconds again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.errors import TraceError
from slipstream.gradients.layout import Gradient
from slipstream.planner.network.costs import HalfSpeed
from slipstream.planner.network.fit import Array

MEDIANS = ("data_wait", "forward", "optimizer", "other", "samples")
"""What has an entry a rank and is measured as it is."""

_COMPUTED = ("forward", "backward", "ready", "late")
"""Seconds of forward and backward, which are longer where a rank computes for longer."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One iteration without accumulation: seconds of work by rank, bytes by gradient.

    ``data_wait``, ``forward``, ``backward``, ``optimizer`` and ``other`` (what the script does
    besides) have an entry a rank; ``ready`` has a row a rank and a column a gradient, in ready
    order, counted from the start of backward. ``samples`` are those of one batch of each rank, 0
    where unknown. ``hosts`` and ``model`` are the names in the trace. ``optimizer_bytes`` is the
    optimizer's whole state, 0 where unknown; ``shardable`` says whether ranks may each update a
    share of the parameters, ``sgd`` whether DGC may take the optimizer's momentum over.
    ``convolutions`` is the part of the layers that are such, ``half`` says whether weights have 16
    bits. ``reading`` are the seconds from batch to batch of workers or threads that read beside the
    training and cannot keep up, 0 of those that can; None: of all ranks. ``first_part`` is the part
    of forward within which all parameters are needed: less than all where forward holds that of
    earlier micro-batches, too. ``change_bytes`` are those of a change of all parameters with
    gradients, in fp32 or wider, 0 where unknown. ``not_proposed`` are settings that the framework
    has itself whose loop trains. ``late`` are the seconds of backward by which it is longer than
    the rank's own: an exchange ends later on some ranks than on others, which begin so much later,
    and now and then one takes longer than it mostly does; None: 0.
    """

    gradients: tuple[Gradient, ...]
    data_wait: Array
    forward: Array
    backward: Array
    ready: Array
    optimizer: Array
    other: Array
    samples: Array
    buffers_bytes: int = 0
    model: str = ""
    hosts: tuple[str, ...] = ()
    optimizer_bytes: int = 0
    shardable: bool = False
    sgd: bool = True
    convolutions: float = 0.0
    half: bool = False
    reading: Array | None = None
    first_part: float = 1.0
    change_bytes: int = 0
    not_proposed: frozenset[str] = frozenset()
    late: Array | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks that the arrays describe."""
        return len(self.forward)

    @property
    def borders(self) -> tuple[int, ...]:
        """Places in ready order where another dtype begins: no collective reaches across."""
        types = [gradient.dtype for gradient in self.gradients]
        return tuple(i for i in range(1, len(types)) if types[i] != types[i - 1])

    @property
    def forward_times(self) -> Array:
        """Seconds of forward until each parameter's successor is needed, in forward order, by rank;
        behind the last parameter the rest of forward.

        A layer is assumed to take the same share of forward as of backward.
        """
        ready = np.maximum.accumulate(self.ready, axis=1)
        gaps = np.diff(ready, axis=1, prepend=0.0)[:, ::-1] + 1e-12
        first = self.first_part * self.forward
        times = np.asarray(first[:, None] * gaps / gaps.sum(axis=1, keepdims=True))
        times[:, -1] += self.forward - first
        return times

    def alone(self, batches: int) -> Array:
        """Seconds of an iteration of each rank, of so many batches, without any exchange.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, one)
            >>> pair.alone(batches=2)
            array([8., 8.])
        """
        late = 0.0 if self.late is None else self.late
        batch = self.data_wait + self.forward + self.backward - late
        seconds = batches * batch + self.optimizer + self.other
        return seconds if self.reading is None else np.maximum(seconds, batches * self.reading)

    def for_ranks(self, count: int) -> Workload:
        """The same work on another number of ranks: the ranks' profiles, repeated in order.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, one)
            >>> pair.for_ranks(5).num_ranks
            5
        """
        if count == self.num_ranks:
            return self
        rows = np.arange(count) % self.num_ranks
        names = (*MEDIANS, "backward", "ready")
        profiles: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        for name in ("reading", "late"):
            values = getattr(self, name)
            profiles[name] = None if values is None else values[rows]
        hosts = tuple(self.hosts[row] for row in rows) if self.hosts else ()
        return replace(self, **profiles, hosts=hosts)

    def computed(self, half: bool, speed: HalfSpeed | None) -> Workload:
        """The same with weights of 16 bits or of 32; what ``speed`` does not tell stays.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, one)
            >>> pair.computed(half=True, speed=HalfSpeed(dense=4.0, convolutional=2.0)).forward
            array([0.25, 0.25])
        """
        if half == self.half or speed is None:
            return self
        factor = 1 / speed.of(self.convolutions) if half else speed.of(self.convolutions)
        return replace(self.slowed(factor), half=half)

    def slowed(self, times: float | Array) -> Workload:
        """The same where forward and backward take so many times as long; may have an entry a rank.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, one)
            >>> pair.slowed(np.array([1.0, 2.0])).backward
            array([1., 2.])
        """
        rows = np.broadcast_to(times, self.forward.shape)
        changed = {name: (values.T * rows).T for name, values in self._computed.items()}
        return replace(self, **changed)

    @property
    def _computed(self) -> dict[str, Array]:
        values = {name: getattr(self, name) for name in _COMPUTED}
        return {name: each for name, each in values.items() if each is not None}

    def with_batch(self, samples: float) -> Workload:
        """The same model on batches of so many samples a rank.

        Loading, forward and backward are taken to grow with the batch; the optimizer and the bytes
        stay.

        Raises:
            TraceError: how many samples the workload has is not known.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, samples=4 * one)
            >>> pair.with_batch(8).forward
            array([2., 2.])
        """
        if not self.samples.all():
            raise TraceError(
                "the trace does not say how many samples a batch has: they are counted from the "
                "first tensor of the model's forward, or from all in its containers, which must be "
                "as long; give it such, and record the trace again"
            )
        times = samples / self.samples
        names = [n for n in ("data_wait", "reading", "samples") if getattr(self, n) is not None]
        grown = {name: getattr(self, name) * times for name in names}
        return replace(self.slowed(times), **grown)

    def fed(self, times: float | None = None) -> Workload:
        """The same with ``times`` as many readers; None: every batch is there in time.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, one, reading=8 * one)
            >>> pair.fed(2).reading, pair.fed().reading
            (array([4., 4.]), None)
        """
        if times is None:
            return replace(self, data_wait=np.zeros_like(self.data_wait), reading=None)
        return replace(self, reading=None if self.reading is None else self.reading / times)

    def evened(self) -> Workload:
        """The same where all ranks compute for equally long: as long as they do on average.

        Example:
            >>> one, two = np.ones(2), np.array([2.0, 4.0])
            >>> Workload((), one, one, two, np.ones((2, 0)), one, one, one).evened().backward
            array([3., 3.])
        """
        means = {n: each.mean(axis=0, keepdims=True) for n, each in self._computed.items()}
        return replace(self, **{n: m.repeat(self.num_ranks, axis=0) for n, m in means.items()})
