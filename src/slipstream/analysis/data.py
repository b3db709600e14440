"""Data in a trace: whether batches are there in time, and whether ranks get as much.

Iterations in, numbers out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from slipstream.trace.event import BACKWARD, DATA_WAIT, FORWARD
from slipstream.trace.intervals import length
from slipstream.trace.timeline import Iteration


class Queue(NamedTuple):
    """Batches that workers or threads read beside the training.

    Attributes:
        readers: workers or threads of a rank.
        ready: batches that are there when the training asks for one, the median; None: not known.
        empty: the share of the steps in which none is; None: not known.
    """

    readers: int
    ready: float | None
    empty: float | None


def queue(iterations: Iterable[Iteration]) -> Queue | None:
    """The queue of all ranks together; None: the training reads its batches itself, or has no
    loader.

    Example:
        >>> from slipstream.trace.event import Event
        >>> from slipstream.trace.timeline import timeline
        >>> spans = [Event("iteration", 0, step, step, step + 1.0) for step in range(4)]
        >>> for step in range(4):
        ...     args = {"readers": 2, "queued": step}
        ...     spans.append(Event("data_wait", 0, step, step, step + 0.1, args))
        >>> queue(timeline(spans))
        Queue(readers=2, ready=1.5, empty=0.25)
    """
    waits = [e for one in iterations for e in one.events if e.name == DATA_WAIT]
    waits = [event for event in waits if event.args.get("readers")]
    if not waits:
        return None
    readers = median(event.args["readers"] for event in waits)
    queued = [event.args["queued"] for event in waits if "queued" in event.args]
    if not queued:
        return Queue(round(readers), None, None)
    return Queue(round(readers), median(queued), fmean(not ready for ready in queued))


def idle_share(iterations: Sequence[Iteration]) -> float:
    """The share of the ranks' time in forward and backward that they would spend waiting if each
    step ended with the slowest; 0 of one rank.

    Example:
        >>> from slipstream.trace.event import Event
        >>> from slipstream.trace.timeline import timeline
        >>> spans = [Event("iteration", rank, 0, 0.0, 4.0) for rank in range(2)]
        >>> spans += [Event("forward", rank, 0, 0.0, 2.0 + 2 * rank) for rank in range(2)]
        >>> idle_share(timeline(spans))
        0.25
    """
    by_step: dict[int, list[float]] = defaultdict(list)
    for one in iterations:
        by_step[one.step].append(length(one.during(FORWARD)) + length(one.during(BACKWARD)))
    slowest = sum(max(seconds) for seconds in by_step.values())
    return 1 - sum(map(fmean, by_step.values())) / slowest if slowest else 0.0
