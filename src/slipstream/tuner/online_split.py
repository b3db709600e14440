"""``split: optimal``: find the split while the training runs.

The default split is traced for a window of iterations; the network is measured and the optimal
split computed; then the default, the computed split and two larger ones take turns, and the one
measured fastest stays.
"""

from __future__ import annotations

from statistics import median

import torch.distributed as dist

from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import Cluster
from slipstream.errors import SlipstreamError
from slipstream.gradients.engine import Engine
from slipstream.planner.candidates import optimal_split, with_gradients
from slipstream.planner.comm_plan import CURVES, Plan
from slipstream.planner.contention_fit import prepare
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.simulate import predict
from slipstream.strategy import ByBytes, PlainCodec, Row, Split, Strategy
from slipstream.trace.event import Trace
from slipstream.transport.consistency import broadcast_from_first, collective_errors
from slipstream.tuner.trials import iterations

CALIBRATION_SECONDS = 4 / 3
"""For the exchanges that are timed: flat all-reduces are one curve."""
SETTLING = 2
"""Iterations after a change of the split that are not measured: new buckets, cold connections."""

TURNS = 2
"""Windows of each split, in turn, so that a drift of the machine affects all splits alike."""

LARGER = (ByBytes(megabytes=16), ByBytes(megabytes=25))
"""Measured besides the computed split: the cost of one more segment is the least certain part."""

MOST_WINDOWS = TURNS * (2 + len(LARGER))


_Decision = tuple[tuple[Split, ...], str]
"""What rank 0 decided: the splits to measure, the default first, or the one to keep; and why."""


class OnlineSplit:
    """Runs windows of iterations under several splits in turn and keeps the fastest.

    Args:
        engine: installs the splits.
        ranks: the ranks whose network is measured after the first window.
        control: a group of CPU tensors.
        strategy: the user's, with ``split: optimal``.
        steps: iterations in a window.

    Attributes:
        outcome: the result so far, as a sentence.
        settled: whether the split no longer changes.
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
        self._base = with_gradients(strategy, split=ByBytes())
        self._splits: tuple[Split, ...] = ()
        self._seconds: list[list[float]] = []  # of each split, on rank 0
        self._windows = 0
        self.outcome = f"not yet: {steps} iterations of the default split are measured first"
        self.settled = False

    def proceed(self, trace: Trace | None) -> bool:
        """Act on a traced window; returns whether another one is needed.

        A collective, called between two updates, while no exchange is in flight.

        Args:
            trace: of the window, on rank 0; None on the others.

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
        """Stay with ``split``: it was chosen now, or before a checkpoint."""
        self.outcome, self.settled = outcome, True
        if self._engine.order is not None:
            self._install(split)

    @property
    def chosen(self) -> Split | None:
        """The split that stays; None until the search is over."""
        return self._engine.split if self.settled else None

    def report_rows(self) -> list[Row]:
        """What has come of the search so far."""
        return [Row("optimal", self.outcome, "split computed and measured")]

    def _install(self, split: Split) -> None:
        assert self._engine.order is not None
        self._engine.install(self._engine.order, split)

    def _propose(self, trace: Trace | None) -> None:
        """Measure the network; rank 0 computes the splits to measure and sends them to all."""
        gradients = self._base.gradients
        network = calibrate(
            self._ranks,
            sizes=SIZES[::2],
            seconds=CALIBRATION_SECONDS,
            rounds=3,
            curves=CURVES[gradients.transport.kind],
            codecs=[gradients.codec] if isinstance(gradients.codec, PlainCodec) else [],
        )
        self._receive(None if trace is None else self._solve(trace, network))
        self._seconds = [[] for _ in self._splits]

    def _receive(self, decision: _Decision | None) -> None:
        """Take over what rank 0 decided."""
        agreed = broadcast_from_first(decision, self._control)
        assert agreed is not None
        self._splits, self.outcome = agreed

    def _solve(self, trace: Trace, network: NetworkProfile) -> _Decision:
        """The splits to measure; only rank 0 has the trace of all ranks."""
        default = self._engine.split
        try:
            workload, network = prepare(trace, network)
            best = optimal_split(workload, network, [self._base])
            strategy = with_gradients(self._base, split=best)
            plan = Plan.of(strategy, self._engine.gradients, network.codecs)
            seconds = predict(workload, plan, network)
        except SlipstreamError as error:  # the training goes on with the default
            return (default,), f"the default split stays: {error}"
        distinct: dict[tuple[int, ...], Split] = {}
        for split in (default, best, *LARGER):
            distinct.setdefault(self._engine.split_points(split), split)
        splits = tuple(distinct.values())
        if len(splits) == 1:
            return splits, "the default split is the optimum"
        return splits, f"computed: {len(best.last)} segments, predicted {seconds:.4f} s"

    def _keep_the_fastest(self) -> None:
        """Rank 0 compares what was measured; all ranks install its choice."""
        decision = None
        if self._seconds[0]:
            medians = [median(seconds) for seconds in self._seconds]
            fastest = self._splits[medians.index(min(medians))]  # of equal ones the default
            sizes = {split: len(self._engine.split_points(split)) for split in self._splits}
            pairs = zip(sizes.values(), medians, strict=True)
            measured = ", ".join(f"{size}: {seconds:.4f} s" for size, seconds in pairs)
            words = f"measured in turn, by segments: {measured}; {sizes[fastest]} kept"
            decision = (fastest,), f"{self.outcome}; {words}"
        self._receive(decision)
        self.settle(self._splits[0], self.outcome)
