"""``split: optimal`` in a session: trace the default split, solve, switch, keep the faster.

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


@dataclass(frozen=True)
class _Proposal:
    """What rank 0 found: the last gradient of each segment (None: the default split), and why."""

    last: tuple[int, ...] | None
    outcome: str


class LiveSplit:
    """Two windows of iterations, one under the default split and one under the computed one.

    Args:
        engine: installs the splits.
        ranks: whose network is measured between the windows.
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
        self._before: float | None = None
        self.outcome = f"not yet: {steps} iterations of the default split are measured first"
        self.settled = False

    def proceed(self, trace: Trace | None) -> bool:
        """Act on a window that was traced (rank 0 holds it); whether another one is needed.

        A collective; it falls between two updates, so no exchange is under way.

        Raises:
            ExchangeError: another rank is gone.
        """
        with together("the choice of the split"):
            if self._before is None:
                return self._switch(trace)
            self._keep_the_faster(trace)
            return False

    def settle(self, split: Split, outcome: str) -> None:
        """No more changes: ``split`` was chosen before."""
        self.outcome, self.settled = outcome, True
        if self._engine.order is not None:
            self._engine.install(self._engine.order, split)

    def _switch(self, trace: Trace | None) -> bool:
        """Measure the network, solve on rank 0, install the solution on all ranks."""
        measured = calibrate(self._ranks, sizes=SIZES[::2], seconds=CALIBRATION_SECONDS, rounds=3)
        proposal = self._agreed(None if trace is None else self._solve(trace, measured))
        self._before = 0.0 if trace is None else median(iterations(trace))
        self.outcome = proposal.outcome
        if proposal.last is None:
            self.settled = True
            return False
        assert self._engine.order is not None
        self._engine.install(self._engine.order, ByIndex(last=proposal.last))
        return True

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

    def _keep_the_faster(self, trace: Trace | None) -> None:
        """Rank 0 compares both windows; all ranks do as it says."""
        verdict = None
        if trace is not None:
            assert self._before is not None
            after = median(iterations(trace))
            verdict = _Proposal(
                self._last() if after <= self._before else None,
                f"{self.outcome}, measured {after:.4f} s against {self._before:.4f} s: "
                f"{'kept' if after <= self._before else 'taken back'}",
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
