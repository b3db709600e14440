"""``split: optimal`` in a session: trace the default split, solve, take turns, keep the faster.

Never measures an iteration itself (the recording does) and never computes a split (the planner).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

from slipstream.cluster.connect import Cluster
from slipstream.comm.agreement import together
from slipstream.errors import SlipstreamError
from slipstream.gradients.engine import Engine
from slipstream.gradients.layout import plan_segments
from slipstream.planner.calibrate import SIZES, calibrate
from slipstream.planner.candidates import optimal_split
from slipstream.planner.cost import Cluster as Measured
from slipstream.planner.exchange import Plan
from slipstream.planner.plan import prepare
from slipstream.planner.simulate import predict
from slipstream.planner.trials import iterations
from slipstream.strategy import ByBytes, ByIndex, Split, Strategy
from slipstream.trace.event import Trace

CALIBRATION_SECONDS = 4.0
SETTLING = 2
"""Iterations after a change of the split that are not measured: new buckets, cold connections."""


WINDOWS = 4
"""Two of each split, by turns: what drifts while they run is no split's."""


@dataclass(frozen=True)
class _Proposal:
    """What rank 0 found: the last gradient of each segment (None: the default split), and why."""

    last: tuple[int, ...] | None
    outcome: str


class LiveSplit:
    """Windows of iterations, by turns under the default split and under the computed one.

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
        self._seconds: tuple[list[float], list[float]] = [], []  # of the default, of the new split
        self._windows = 0
        self._proposal: _Proposal | None = None
        self.outcome = f"not yet: {steps} iterations of the default split are measured first"
        self.settled = False

    def proceed(self, trace: Trace | None) -> bool:
        """Act on a window that was traced (rank 0 holds it); whether another one is needed.

        A collective; it falls between two updates, so no exchange is under way.

        Raises:
            ExchangeError: another rank is gone.
        """
        with together("the choice of the split"):
            if trace is not None:
                self._seconds[self._windows % 2].extend(iterations(trace))
            self._windows += 1
            if self._proposal is None:
                return self._propose(trace)
            if self._windows < WINDOWS:
                self._install(self._proposal.last if self._windows % 2 else None)
                return True
            self._keep_the_faster()
            return False

    def settle(self, split: Split, outcome: str) -> None:
        """No more changes: ``split`` was chosen before."""
        self.outcome, self.settled = outcome, True
        if self._engine.order is not None:
            self._engine.install(self._engine.order, split)

    def _propose(self, trace: Trace | None) -> bool:
        """Measure the network, solve on rank 0, install the solution on all ranks, if there is."""
        measured = calibrate(self._ranks, sizes=SIZES[::2], seconds=CALIBRATION_SECONDS, rounds=3)
        self._proposal = self._agreed(None if trace is None else self._solve(trace, measured))
        self.outcome = self._proposal.outcome
        if self._proposal.last is None:
            self.settled = True
            return False
        self._install(self._proposal.last)
        return True

    def _install(self, last: tuple[int, ...] | None) -> None:
        """On all ranks: the segments that end with these gradients, or the default's."""
        assert self._engine.order is not None
        self._engine.install(self._engine.order, ByBytes() if last is None else ByIndex(last=last))

    def _solve(self, trace: Trace, measured: Measured) -> _Proposal:
        """On rank 0, whose trace holds all ranks."""
        gradients = self._engine.gradients
        try:
            workload, cluster = prepare(trace, measured)
            split = optimal_split(workload, cluster, [self._base])
            chosen = self._base.gradients.model_copy(update={"split": split})
            plan = Plan.of(self._base.model_copy(update={"gradients": chosen}), gradients)
            seconds = predict(workload, plan, cluster)
        except SlipstreamError as error:  # training goes on as it is
            return _Proposal(None, f"the default split stays: {error}")
        if split.last == self._last():
            return _Proposal(None, "the default split is the optimum")
        return _Proposal(split.last, f"{len(split.last)} segments, predicted {seconds:.4f} s")

    def _keep_the_faster(self) -> None:
        """Rank 0 compares what was measured; all ranks do as it says."""
        verdict = None
        if self._seconds[0]:
            assert self._proposal is not None
            before, after = map(median, self._seconds)
            verdict = _Proposal(
                self._proposal.last if after <= before else None,
                f"{self.outcome}, measured {after:.4f} s against {before:.4f} s in turn: "
                f"{'kept' if after <= before else 'taken back'}",
            )
        agreed = self._agreed(verdict)
        split = ByBytes() if agreed.last is None else ByIndex(last=agreed.last)
        self.settle(split, agreed.outcome)

    def _last(self) -> tuple[int, ...]:
        """Index of the last gradient of each segment that is installed."""
        segments = plan_segments(self._engine.gradients, self._engine.split)
        return tuple(segment.stop - 1 for segment in segments)

    def _agreed(self, found: _Proposal | None) -> _Proposal:
        """What rank 0 found."""
        box: list[_Proposal | None] = [found]
        dist.broadcast_object_list(box, group=self._control, group_src=0)
        assert box[0] is not None
        return box[0]
