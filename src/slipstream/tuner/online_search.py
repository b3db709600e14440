"""``split: optimal`` and ``transport: auto``: find the fastest exchange while the training runs.

The first choice (the default split, the first transport) is traced for a window of iterations.
Where a split is searched for, the network is measured and the optimal split computed for each
transport. Then the choices take turns, and the one measured fastest stays.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from statistics import median

import torch.distributed as dist

from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import Cluster
from slipstream.errors import SlipstreamError
from slipstream.gradients.engine import Engine
from slipstream.planner.candidates import optimal_split, with_gradients
from slipstream.planner.comm_plan import Plan
from slipstream.planner.contention_fit import prepare
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.simulate import predict
from slipstream.planner.transport_cost import curves_of, transport_kind
from slipstream.strategy import ByBytes, PlainCodec, Row, Split, Strategy, Transport
from slipstream.trace.event import Trace
from slipstream.transport.consistency import broadcast_from_first, collective_errors
from slipstream.transport.switch import Switch
from slipstream.tuner.search_space import MOST, SETTLING, TURNS, Choice, SearchSpace, fastest
from slipstream.tuner.trials import iterations

CALIBRATION_SECONDS = 4 / 3
"""For the exchanges that are timed, for each transport."""

LARGER = (ByBytes(megabytes=16), ByBytes(megabytes=25))
"""Measured besides the computed split: the cost of one more segment is the least certain part."""

_Decision = tuple[tuple[Choice, ...], str]
"""What rank 0 decided: the choices to measure, the first one first, or the one to keep; and why."""


class OnlineSearch:
    """Runs windows of iterations under several choices in turn and keeps the fastest.

    Only rank 0 decides, from the times of all ranks; the others follow. So ranks of different speed
    cannot come to different choices.

    Args:
        engine: installs the splits.
        switches: exchange the transports.
        ranks: the ranks whose network is measured after the first window.
        control: a group of CPU tensors.
        strategy: the user's.
        space: what it leaves open.

    Attributes:
        steps: iterations in the next window.
        outcome: the result so far, as a sentence.
        settled: whether the choice no longer changes.
        transport: that is in use.
    """

    def __init__(
        self,
        engine: Engine,
        switches: Sequence[Switch],
        ranks: Cluster,
        control: dist.ProcessGroup,
        strategy: Strategy,
        space: SearchSpace,
    ) -> None:
        self._engine, self._switches = engine, switches
        self._ranks, self._control, self._space = ranks, control, space
        self._base = with_gradients(strategy, transport=space.transports[0], split=engine.split)
        self.transport: Transport = space.transports[0]
        self.steps = space.first_window
        self._choices: tuple[Choice, ...] = ()
        self._seconds: list[list[list[float]]] = []  # of each choice and turn, on rank 0
        self._windows = self._updates = 0
        what = "the default split" if space.split else self.transport.kind
        self.outcome = f"not yet: {self.steps} iterations of {what} are measured first"
        self.settled = False

    def proceed(self, trace: Trace | None) -> bool:
        """Act on a traced window; returns whether another one is needed.

        A collective, called between two updates, while no exchange is in flight.

        Args:
            trace: of the window, on rank 0; None on the others.

        Raises:
            ExchangeError: another rank is gone.
        """
        with collective_errors("the choice of the exchange"):
            if not self._choices:
                self._propose(trace)
            count = len(self._choices)
            if trace is not None:
                self._seconds[self._windows % count].append(iterations(trace))
            self._windows += 1
            self._updates += SETTLING + self.steps
            if count == 1:
                self.settle(self._choices[0], self.outcome)
            elif self._windows == TURNS * count:
                self._keep_the_fastest()
            else:
                self.steps = self._space.window(count, self._windows, self._updates)
                self._install(self._choices[self._windows % count])
            return not self.settled

    def settle(self, choice: Choice, outcome: str) -> None:
        """Stay with ``choice``: it was made now, or before a checkpoint."""
        self.outcome, self.settled = outcome, True
        self._install(choice)
        for switch in self._switches:
            switch.keep(choice.transport)

    def resume(self, split: Split | None, transport: Transport | None) -> None:
        """Stay with what was chosen before a checkpoint, if that is all that is open here.

        Args:
            split: that was chosen; None: none was searched for, or not yet found.
            transport: likewise.
        """
        space = self._space
        if (space.split is not None and split is None) or (
            len(space.transports) > 1 and transport not in space.transports
        ):
            return
        kept = self._engine.split if split is None or space.split is None else split
        only = transport if transport in space.transports else space.transports[0]
        assert only is not None
        self.settle(Choice(only, kept), "chosen before the checkpoint")

    @property
    def chosen_split(self) -> Split | None:
        """The split that stays; None until the search is over, or if none was searched for."""
        return self._engine.split if self.settled and self._space.split else None

    @property
    def chosen_transport(self) -> Transport | None:
        """The transport that stays, likewise."""
        return self.transport if self.settled and len(self._space.transports) > 1 else None

    def report_rows(self) -> list[Row]:
        """What has come of the search so far."""
        open_transport = len(self._space.transports) > 1
        name = "auto" if open_transport else "optimal"
        note = "measured in turn" if open_transport else "split computed and measured"
        return [Row(name, self.outcome, note)]

    def _install(self, choice: Choice) -> None:
        self.transport = choice.transport
        for switch in self._switches:
            switch.use(choice.transport)
        if self._engine.order is not None and choice.split != self._engine.split:
            self._engine.install(self._engine.order, choice.split)

    # The choices to measure.

    def _propose(self, trace: Trace | None) -> None:
        """The same choices on all ranks; those with a split are computed on rank 0."""
        if self._space.split is None:
            pairs = product(self._space.transports, [self._engine.split])
            self._choices = tuple(Choice(*pair) for pair in pairs)
            self.outcome = ""
        else:
            network = self._measure_network()
            self._receive(None if trace is None else self._solve(trace, network))
        self._seconds = [[] for _ in self._choices]

    def _measure_network(self) -> NetworkProfile:
        codec, transports = self._base.gradients.codec, self._space.transports
        return calibrate(
            self._ranks,
            sizes=SIZES[::2],
            seconds=CALIBRATION_SECONDS * len(transports),
            rounds=3,
            curves=curves_of(map(transport_kind, transports)),
            codecs=[codec] if isinstance(codec, PlainCodec) else [],
        )

    def _receive(self, decision: _Decision | None) -> None:
        """Take over what rank 0 decided."""
        agreed = broadcast_from_first(decision, self._control)
        assert agreed is not None
        self._choices, self.outcome = agreed

    def _solve(self, trace: Trace, network: NetworkProfile) -> _Decision:
        """The choices to measure; only rank 0 has the trace of all ranks."""
        default = Choice(self.transport, self._engine.split)
        computed: dict[tuple[Transport, tuple[int, ...]], tuple[Choice, float]] = {}
        try:
            workload, network = prepare(trace, network)
            for transport in self._space.transports:
                base = with_gradients(self._base, transport=transport)
                best = optimal_split(workload, network, [base])
                for split in (default.split, best, *LARGER):
                    strategy = with_gradients(base, split=split)
                    plan = Plan.of(strategy, self._engine.gradients, network.codecs)
                    seconds = predict(workload, plan, network)
                    key = transport, self._engine.split_points(split)
                    computed.setdefault(key, (Choice(transport, split), seconds))
        except SlipstreamError as error:  # the training goes on with the default
            return (default,), f"the default split stays: {error}"
        choices = promising(list(computed.values()))
        if len(choices) == 1:
            return choices, "the default split is the optimum"
        first, seconds = min(computed.values(), key=lambda pair: pair[1])
        return choices, f"computed: {self._name(first)} segments, predicted {seconds:.4f} s"

    # The choice that stays.

    def _keep_the_fastest(self) -> None:
        """Rank 0 compares what was measured; all ranks install its choice."""
        decision = None
        if self._seconds[0]:
            kept = self._choices[fastest(self._seconds)]
            decision = (kept,), self._in_words(kept)
            print(f"slipstream: {decision[1]}", file=sys.stderr)
        self._receive(decision)
        self.settle(self._choices[0], self.outcome)

    def _in_words(self, kept: Choice) -> str:
        medians = [median(time for turn in turns for time in turn) for turns in self._seconds]
        pairs = zip(self._choices, medians, strict=True)
        times = ", ".join(f"{self._name(choice)}: {seconds:.4f} s" for choice, seconds in pairs)
        keys = ["transport"] if len(self._space.transports) > 1 else []
        keys += ["segments"] if self._space.split is not None else []
        words = f"measured in turn, by {' and '.join(keys)}: {times}; {self._name(kept)} kept"
        return f"{self.outcome}; {words}" if self.outcome else words

    def _name(self, choice: Choice) -> str:
        """What tells a choice from the others: its transport, its number of segments, or both."""
        words: list[str] = [choice.transport.kind] if len(self._space.transports) > 1 else []
        if self._space.split is not None:
            words.append(str(len(self._engine.split_points(choice.split))))
        return " ".join(words)


def promising(predicted: Sequence[tuple[Choice, float]]) -> tuple[Choice, ...]:
    """The choices to measure of those predicted: the first of all, then by rising seconds.

    The best one of every transport is among them: what one costs against another is less certain
    than what a split costs against another.

    Example:
        >>> from slipstream.strategy import Direct, Flat, Single
        >>> one, other = Choice(Flat(), Single()), Choice(Direct(), Single())
        >>> [choice.transport.kind for choice in promising([(one, 1.0), (other, 2.0)])]
        ['flat', 'direct']
    """
    default = predicted[0][0]
    ranked = [default, *(c for c, _ in sorted(predicted, key=lambda p: p[1]) if c != default)]
    best = {choice.transport: choice for choice in reversed(ranked[1:])}  # of each transport
    chosen = [c for c in ranked if c == default or c == best[c.transport]]
    chosen += [c for c in ranked if c not in chosen][: max(MOST - len(chosen), 0)]
    return tuple(c for c in ranked if c in chosen)
