"""``split: optimal`` in a session: trace the default split, solve, take turns, keep the fastest.

Never measures an iteration itself (the recording does) and never computes a split (the planner).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import Cluster
from slipstream.errors import SlipstreamError
from slipstream.gradients.engine import Engine
from slipstream.planner.candidates import optimal_split
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.comm_plan import Plan
from slipstream.planner.contention_fit import prepare
from slipstream.planner.simulate import predict
from slipstream.strategy import ByBytes, PlainCodec, Split, Strategy
from slipstream.trace.event import Trace
from slipstream.transport.consistency import collective_errors
from slipstream.tuner.trials import iterations

CALIBRATION_SECONDS = 4.0
SETTLING = 2
"""Iterations after a change of the split that are not measured: new buckets, cold connections."""


TURNS = 2
"""Windows of each split, by turns: what drifts while they run is no split's."""

LARGER = (ByBytes(megabytes=16), ByBytes(megabytes=25))
"""Measured beside the computed split: the cost of one more segment is what is known least."""

MOST_WINDOWS = TURNS * (2 + len(LARGER))


@dataclass(frozen=True)
class _Found:
    """What rank 0 has found: the splits to measure, the default first, or the one to keep."""

    splits: tuple[Split, ...]
    outcome: str


class OnlineSplit:
    """Windows of iterations, by turns under the default split, the computed one and some larger.

    Args:
        engine: installs the splits.
        ranks: whose network is measured after the first window.
        control: a group of CPU tensors.
        strategy: what the user asked for, with ``split: optimal``.
        steps: iterations a window.

    Attributes:
        outcome: what has come of it so far, in a sentence.
        settled: whether the split stays as it is from now on.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: Cluster,
        control: dist.ProcessGroup,
        strategy: Strategy,
        steps: int,
    ) -> None:
        self._engine, self._ranks, self._control, self.steps = engine, ranks, control, steps
        gradients = strategy.gradients.model_copy(update={"split": ByBytes()})
        self._base = strategy.model_copy(update={"gradients": gradients})
        self._splits: tuple[Split, ...] = ()
        self._seconds: list[list[float]] = []  # of each split, on rank 0
        self._windows = 0
        self.outcome = f"not yet: {steps} iterations of the default split are measured first"
        self.settled = False

    def proceed(self, trace: Trace | None) -> bool:
        """Act on a window that was traced (rank 0 holds it); whether another one is needed.

        A collective; it falls between two updates, so no exchange is under way.

        Raises:
            ExchangeError: another rank is gone.
        """
        with collective_errors("the choice of the split"):
            if not self._splits:
                self._propose(trace)
            if trace is not None:
                self._seconds[self._windows % len(self._splits)].extend(iterations(trace))
            self._windows += 1
            if len(self._splits) == 1:
                self.settle(self._splits[0], self.outcome)
            elif self._windows == TURNS * len(self._splits):
                self._keep_the_fastest()
            else:
                self._install(self._splits[self._windows % len(self._splits)])
            return not self.settled

    def settle(self, split: Split, outcome: str) -> None:
        """No more changes: ``split`` was chosen before."""
        self.outcome, self.settled = outcome, True
        if self._engine.order is not None:
            self._engine.install(self._engine.order, split)

    def _propose(self, trace: Trace | None) -> None:
        """Measure the network; rank 0 solves, and all ranks know what is to be measured."""
        codec = self._base.gradients.codec
        measured = calibrate(
            self._ranks,
            sizes=SIZES[::2],
            seconds=CALIBRATION_SECONDS,
            rounds=3,
            codecs=[codec] if isinstance(codec, PlainCodec) else [],
        )
        found = self._agreed(None if trace is None else self._solve(trace, measured))
        self._splits, self.outcome = found.splits, found.outcome
        self._seconds = [[] for _ in self._splits]

    def _install(self, split: Split) -> None:
        assert self._engine.order is not None
        self._engine.install(self._engine.order, split)

    def _solve(self, trace: Trace, measured: NetworkProfile) -> _Found:
        """On rank 0, whose trace holds all ranks."""
        default = self._engine.split
        try:
            workload, cluster = prepare(trace, measured)
            best = optimal_split(workload, cluster, [self._base])
            chosen = self._base.gradients.model_copy(update={"split": best})
            config = self._base.model_copy(update={"gradients": chosen})
            seconds = predict(
                workload, Plan.of(config, self._engine.gradients, cluster.codecs), cluster
            )
        except SlipstreamError as error:  # training goes on as it is
            return _Found((default,), f"the default split stays: {error}")
        splits = self._distinct([default, best, *LARGER])
        if len(splits) == 1:
            return _Found(splits, "the default split is the optimum")
        return _Found(splits, f"computed: {len(best.last)} segments, predicted {seconds:.4f} s")

    def _keep_the_fastest(self) -> None:
        """Rank 0 compares what was measured; all ranks do as it says."""
        found = None
        if self._seconds[0]:
            medians = [median(seconds) for seconds in self._seconds]
            fastest = medians.index(min(medians))  # of equal ones the default
            by_split = zip(self._splits, medians, strict=True)
            measured = ", ".join(f"{len(self._cuts(s))}: {t:.4f} s" for s, t in by_split)
            verdict = f"{len(self._cuts(self._splits[fastest]))} kept"
            outcome = f"{self.outcome}; measured in turn, by segments: {measured}; {verdict}"
            found = _Found((self._splits[fastest],), outcome)
        agreed = self._agreed(found)
        self.settle(agreed.splits[0], agreed.outcome)

    def _distinct(self, splits: Sequence[Split]) -> tuple[Split, ...]:
        """Without those that cut the gradients as an earlier one does."""
        found: dict[tuple[int, ...], Split] = {}
        for split in splits:
            found.setdefault(self._cuts(split), split)
        return tuple(found.values())

    def _cuts(self, split: Split) -> tuple[int, ...]:
        """Behind the last gradient of each segment."""
        return self._engine.cuts(split)

    def _agreed(self, found: _Found | None) -> _Found:
        """What rank 0 found."""
        box: list[_Found | None] = [found]
        dist.broadcast_object_list(box, group=self._control, group_src=0)
        assert box[0] is not None
        return box[0]
