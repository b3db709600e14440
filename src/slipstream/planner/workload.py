"""What one iteration computes and exchanges, read from a trace and freed of its strategy.

A workload holds compute times, ready times and bytes, and nothing about exchanges.

[Note: Contention]
While an exchange is in flight, compute runs at ``1 / (1 + compute_slowdown)`` of its speed. So
there are two clocks: seconds, and *work*, the seconds that compute would have taken without
exchanges. Work advances at the same rate on all ranks, since all take part in an exchange. A
workload is in work; the simulator turns it into seconds again.

[Note: Typical ranks]
Which rank is late changes from iteration to iteration, and exchanges wait for the last one. The
median of each rank alone would lose that some rank is always late. So the ready times of each
gradient are sorted over ranks in each iteration; the median over iterations is taken of the
earliest, the second ... the last; and these go to the ranks in the order in which they end
backward. Predictions need no more: an exchange waits for the last rank, whichever it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.errors import TraceError
from slipstream.gradients.layout import Gradient
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.fit import Array
from slipstream.planner.traced_step import Step, complete_steps, measure
from slipstream.trace.event import BUFFERS, Trace

_MEDIANS = ("data_wait", "forward", "optimizer", "other", "samples")
"""What has an entry a rank and is measured as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One iteration without accumulation: seconds of work by rank, bytes by gradient.

    ``data_wait``, ``forward``, ``backward``, ``optimizer`` and ``other`` (what the script does
    besides) have an entry a rank; ``ready`` has a row a rank and a column a gradient, in ready
    order, counted from the start of backward. ``samples`` are those of one batch of each rank, 0
    where unknown. ``hosts`` and ``model`` are the names in the trace.
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

    @property
    def num_ranks(self) -> int:
        """Ranks that the arrays describe."""
        return len(self.forward)

    @property
    def borders(self) -> tuple[int, ...]:
        """Where in ready order another dtype begins: no collective reaches across."""
        types = [gradient.dtype for gradient in self.gradients]
        return tuple(i for i in range(1, len(types)) if types[i] != types[i - 1])

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
        names = (*_MEDIANS, "backward", "ready")
        profiles: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        hosts = tuple(self.hosts[row] for row in rows) if self.hosts else ()
        return replace(self, **profiles, hosts=hosts)

    @classmethod
    def from_trace(cls, trace: Trace, network: NetworkProfile) -> Workload:
        """What is typical of the iterations of a trace, with the network's contention taken out.

        Where a trace has no ready times of gradients (one process), they are interpolated by bytes.

        Raises:
            TraceError: the trace does not list the model's gradients, no step is complete on all
                ranks, or ranks disagree about what they exchanged.
            ClusterError: the trace has another number of ranks than the network.
        """
        if (world_size := int(trace.meta.get("world_size", 1))) > 1:
            network.check_world(world_size)
        gradients = gradients_of(trace)
        steps = complete_steps(trace)
        measured = [measure(step, gradients, network.compute_slowdown) for step in steps]
        stacked = {name: np.array([one[name] for one in measured]) for name in measured[0]}
        typical = {name: np.median(stacked[name], axis=0) for name in _MEDIANS}
        passes = np.median(stacked["passes"], axis=0)
        # Ranks begin an iteration by their own optimizer later than the last exchange ended.
        exchanges_ended = np.median(stacked["start"] - typical["optimizer"], axis=1)
        since = _typical_ranks(stacked["marks"] - exchanges_ended[:, None, None])
        spent = since[:, -1] - typical["optimizer"] - typical["other"]
        before = typical["data_wait"] + typical["forward"]
        backward = np.maximum(spent / passes - before, 0.0)
        ready = since[:, :-1] - (since[:, -1] - backward)[:, None]
        hosts = tuple(str(host) for host in trace.meta.get("hosts") or ())
        return cls(
            gradients=gradients,
            **typical,
            backward=backward,
            ready=np.clip(ready, 0.0, backward[:, None]),
            buffers_bytes=_buffers_bytes(steps[0]),
            model=str(trace.meta.get("model", "")),
            hosts=hosts if len(hosts) == len(backward) else (),
        )


def gradients_of(trace: Trace) -> tuple[Gradient, ...]:
    """The gradients that a trace lists, in ready order.

    Raises:
        TraceError: it lists none.
    """
    listed = trace.meta.get("gradients")
    if not listed:
        raise TraceError(
            "the trace does not list the model's gradients (meta.gradients), so nothing can be "
            "planned from it; record it again with this version of slipstream"
        )
    try:
        return tuple(Gradient(g["name"], g["layer"], int(g["bytes"]), g["dtype"]) for g in listed)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"the trace is damaged: its list of gradients cannot be read ({error!r:.80}); each one "
            "has name, layer, bytes and dtype: record the trace again"
        ) from error


def _typical_ranks(times: Array) -> Array:
    """Steps x ranks x points to ranks x points; see the note at the top of the file."""
    in_order = np.median(np.sort(times, axis=1), axis=0)
    ends = np.median(times[:, :, -1], axis=0)
    return np.asarray(in_order[np.argsort(np.argsort(ends, kind="stable"))])


def _buffers_bytes(step: Step) -> int:
    return sum(e.args.get("bytes", 0) for e in step[0].exchanges if e.name == BUFFERS)
