"""``split: optimal`` and ``transport: auto``: find the fastest exchange while the training runs.

The first choice (the default split, the first transport) is traced for a window of iterations.
Where a split is searched for, the network is measured and the optimal split computed for each
transport. Then the choices take turns, and the one measured fastest stays, until the speed of
updates changes for good: then the same search runs again, with the choice in use among them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Protocol

import torch.distributed as dist

from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import Cluster
from slipstream.errors import ModelError, SlipstreamError
from slipstream.gradients.engine import Engine
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.transport_cost import curves_of, transport_kind
from slipstream.planner.network.profile import NetworkProfile
from slipstream.sharding.watch import GradientWatch
from slipstream.strategy import (
    PlainCodecConfig,
    Row,
    ShardedConfig,
    SplitConfig,
    Strategy,
    TransportConfig,
)
from slipstream.trace.event import Trace
from slipstream.transport.consistency import any_of, broadcast_from_first, collective_errors
from slipstream.transport.switch import Switch
from slipstream.transport.transport import Transport
from slipstream.tuner.predicted_choices import predict_choices, promising
from slipstream.tuner.search_space import Choice, SearchSpace, fastest
from slipstream.tuner.speed_watch import SpeedWatch
from slipstream.tuner.trials import iterations
from slipstream.tuner.turns import SETTLING, TURNS

CALIBRATION_SECONDS = 4 / 3
"""For the exchanges that are timed, for each transport."""

_Decision = tuple[tuple[Choice, ...], str]
"""What rank 0 decided: the choices to measure, the first one first, or the one to keep; and why."""


class Sharding(Protocol):
    """Begins and ends sharded updates; the session's."""

    watch: GradientWatch
    """Of gradients that the script looks at."""

    @property
    def waited(self) -> float:
        """Seconds that forwards have waited for parameters since the sharding last changed."""

    def use(
        self, config: ShardedConfig | None, transport: Transport | None, engine: Engine
    ) -> None:
        """Update as ``config`` says from now on; None: every rank updates everything."""


class OnlineSearch:
    """Runs windows of iterations under several choices in turn and keeps the fastest.

    Only rank 0 decides, from the times of all ranks; the others follow. So ranks of different speed
    cannot come to different choices.

    Args:
        engine: installs the splits.
        sharding: begins and ends sharded updates.
        switches: exchange the transports.
        ranks: the ranks whose network is measured after the first window.
        control: a group of CPU tensors.
        strategy: the user's.
        space: what it leaves open.

    Attributes:
        steps: iterations in the next window.
        settled: whether the choice stays as it is, until updates become slower or faster.
        choice: in use.
        watch: sees that updates have become slower or faster for good; None: nobody asked for it.
    """

    def __init__(
        self,
        engine: Engine,
        sharding: Sharding,
        switches: Sequence[Switch],
        ranks: Cluster,
        control: dist.ProcessGroup,
        strategy: Strategy,
        space: SearchSpace,
    ) -> None:
        self._engine, self._sharding, self._switches = engine, sharding, switches
        self._left_out: dict[str, str] = {}  # by kind of transport, the reason
        self._due: tuple[Choice, bool] | None = None
        self._ranks, self._control, self._space = ranks, control, space
        self._first = Choice(space.transports[0], engine.split, space.overlap[0])
        self._base = strategy.with_gradients(**self._first._asdict())
        self._transports = space.transports
        self._has_sharded = False  # at any time: the script does nothing that it refuses
        self._kept: Choice | None = None  # by the search before this one
        self._earlier: list[str] = []  # outcomes
        self._why = ""  # this one was begun
        self.watch: SpeedWatch | None = None
        if space.replan:
            self.watch = SpeedWatch(control, lambda: sharding.waited)
        self._begin()

    def _begin(self) -> None:
        """Measure the first choice in the next window."""
        self.choice = self._first
        self.steps = self._space.first_window
        self._choices: tuple[Choice, ...] = ()
        self._seconds: list[list[list[float]]] = []  # of each choice and turn, on rank 0
        self._windows = self._updates = 0
        what = "the default split" if self._space.split else self.choice.transport.kind
        self._found = f"not yet: {self.steps} iterations of {what} are measured first"
        self.settled = False

    @property
    def outcome(self) -> str:
        """The result so far, as a sentence; of a later search, why there was one, too."""
        return f"{self._why}; {self._found}" if self._why else self._found

    def changed(self, update: int) -> bool:
        """Begin the search anew if the speed of updates has changed for good; whether it has.

        A collective every few updates, called between two of them.

        Args:
            update: number of the last one, for the log.

        Raises:
            ExchangeError: another rank is gone.
        """
        change = None if self.watch is None else self.watch.updated()
        if change is None:
            return False
        self._kept = self.choice
        self._has_sharded |= isinstance(self.choice.transport, ShardedConfig)
        self._transports, self._left_out = self._space.transports, {}
        if self._tries_sharded and not self._has_sharded and self._space.replan != "may_shard":
            others = (one for one in self._transports if not isinstance(one, ShardedConfig))
            self._transports = tuple(others)
            why = "only the first search begins it; replan: may_shard lets later ones"
            self._left_out[ShardedConfig().kind] = why
        self._earlier.append(self.outcome)
        self._why = f"searched again from update {update} of this session on, as {change}"
        if dist.get_rank(self._control) == 0:
            _log(f"transport: auto: {self._why}")
        self._begin()
        self._due = self._first, False
        return True

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
                self.settle(self._choices[0])
            elif self._windows == TURNS * count:
                self._keep_the_fastest()
            else:
                self.steps = self._space.window(count, self._windows, self._updates)
                self.choice = self._choices[self._windows % count]
                self._due = self.choice, False
            return not self.settled

    def settle(self, choice: Choice) -> None:
        """Stay with ``choice``."""
        self.settled = True
        self.choice, self._due = choice, (choice, True)

    def resume(
        self,
        split: SplitConfig | None,
        transport: TransportConfig | None,
        overlap: bool,
        speed: Mapping[str, Any] | None = None,
    ) -> None:
        """Stay with what was chosen before a checkpoint, if that is all that is open here.

        Args:
            split: that was chosen; None: none was searched for, or not yet found.
            transport: likewise.
            overlap: that was chosen with them.
            speed: of updates then, as `speed_state` says it; None: it is measured now.
        """
        space = self._space
        known = transport is not None and transport.kind in {t.kind for t in space.transports}
        if (space.split is not None and split is None) or (len(space.transports) > 1 and not known):
            return
        kept = self._engine.split if split is None or space.split is None else split
        only = transport if transport is not None and known else space.transports[0]
        if not self._can_use(only):
            return
        beside = overlap if overlap in space.overlap else space.overlap[0]
        self._why, self._found = "", "chosen before the checkpoint"
        self.settle(Choice(only, kept, beside))
        if self.watch is not None:
            self.watch.detector.load(speed)
            self.watch.restart()

    @property
    def speed_state(self) -> dict[str, Any] | None:
        """The speed that later updates are compared with; None until the search is over."""
        return self.watch.detector.state() if self.settled and self.watch is not None else None

    @property
    def chosen_split(self) -> SplitConfig | None:
        """The split that stays; None until the search is over, or if none was searched for."""
        return self.choice.split if self.settled and self._space.split else None

    @property
    def chosen_transport(self) -> TransportConfig | None:
        """The transport that stays, likewise."""
        searched = len(self._space.transports) > 1
        return self.choice.transport if self.settled and searched else None

    @property
    def chosen_overlap(self) -> bool | None:
        """Whether exchanges run beside backward from now on, likewise."""
        return self.choice.overlap if self.settled and len(self._space.overlap) > 1 else None

    def report_rows(self) -> list[Row]:
        """Report what has come of the search so far."""
        open_transport = len(self._space.transports) > 1
        name = "auto" if open_transport else "optimal"
        note = "measured in turn" if open_transport else "split computed and measured"
        left_out = [Row(name, f"not {kind}", why) for kind, why in self._left_out.items()]
        earlier = [Row(name, outcome, "before") for outcome in self._earlier]
        return [*earlier, Row(name, self.outcome, note), *left_out]

    @property
    def watches(self) -> bool:
        """Whether gradients are watched, to see if the script does what ``sharded`` refuses."""
        return not self._choices and not self.settled and self._tries_sharded

    @property
    def _tries_sharded(self) -> bool:
        return any(isinstance(transport, ShardedConfig) for transport in self._transports)

    @property
    def in_use(self) -> dict[str, Any]:
        """Settings that the search has put in the place of the strategy's."""
        transport = self.choice.transport.document(full=True)
        return {"gradients": {"transport": transport, "overlap": self.choice.overlap}}

    def install_due(self) -> None:
        """Install what was chosen since the last call; a collective.

        Where a backward pass begins: a search ends inside ``optimizer.step()`` if the script calls
        that by itself, and there the parameters may be this rank's shards.
        """
        if self._due is None:
            return
        (choice, for_good), self._due = self._due, None
        try:
            self._install(choice, for_good)
        except BaseException as error:  # in the middle of a collective, maybe
            self._engine.fail(error)
            raise

    def _install(self, choice: Choice, for_good: bool) -> None:
        config = choice.transport if isinstance(choice.transport, ShardedConfig) else None
        if config is None:  # gathers by the transport that is given up
            self._sharding.use(None, None, self._engine)
        self._engine.overlap = choice.overlap
        for switch in self._switches:
            switch.use(choice.transport)
        if config is not None:
            self._sharding.use(config, self._switches[0].made(config), self._engine)
        if self._engine.order is not None and choice.split != self._engine.split:
            self._engine.install(self._engine.order, choice.split)
        if for_good:
            for switch in self._switches:
                switch.keep(choice.transport)

    # The choices to measure.

    def _propose(self, trace: Trace | None) -> None:
        """List what to measure, alike on all ranks; rank 0 computes the splits."""
        usable = [transport for transport in self._transports if self._can_use(transport)]
        if self._space.split is None:
            choices = self._space.unpredicted(self._engine.split)
            self._choices = tuple(choice for choice in choices if choice.transport in usable)
            self._found = "" if usable[1:] else "no other transport can be used here"
        else:
            network = self._measure_network(usable)
            self._receive(None if trace is None else self._solve(trace, network, usable))
        self._seconds = [[] for _ in self._choices]

    def _can_use(self, transport: TransportConfig) -> bool:
        """Whether a transport can be made on all groups, alike on all ranks; a collective."""
        for switch in self._switches:
            error: Exception | None = None
            try:
                switch.make(transport)
                if isinstance(transport, ShardedConfig) and self._sharding.watch.seen:
                    raise ModelError(
                        "the script looks at gradients between backward() and step(), when a rank "
                        "would have its shard alone (to clip: session.clip_grad_norm_)"
                    )
            except (SlipstreamError, OSError) as failure:
                error = failure
            if any_of(error is not None, self._control):
                self._leave_out(transport, error)
                return False
        return True

    def _leave_out(self, transport: TransportConfig, error: Exception | None) -> None:
        for switch in self._switches:
            switch.drop(transport)
        why = str(error or "another rank cannot use it")
        if transport.kind not in self._left_out and dist.get_rank(self._control) == 0:
            _log(f"transport: auto leaves {transport.kind} out: {why}")
        self._left_out[transport.kind] = why

    def _measure_network(self, transports: Sequence[TransportConfig]) -> NetworkProfile:
        codec = self._base.gradients.codec
        return calibrate(
            self._ranks,
            sizes=SIZES[::2],
            seconds=CALIBRATION_SECONDS * len(transports),
            rounds=3,
            curves=curves_of(map(transport_kind, transports)),
            codecs=[codec] if isinstance(codec, PlainCodecConfig) else [],
        )

    def _receive(self, decision: _Decision | None) -> None:
        """Take over what rank 0 decided."""
        agreed = broadcast_from_first(decision, self._control)
        assert agreed is not None
        self._choices, self._found = agreed

    def _solve(
        self, trace: Trace, network: NetworkProfile, transports: Sequence[TransportConfig]
    ) -> _Decision:
        """The choices to measure; only rank 0 has the trace of all ranks."""
        try:
            forecast = Forecast.of(trace, network, self._base)
            predicted = predict_choices(forecast, transports, self._space.overlap)
        except SlipstreamError as error:  # the training goes on with the default
            return (self.choice,), f"the default split stays: {error}"
        choices = promising(predicted)
        kept = self._kept
        if kept is not None and kept.transport.kind in {one.kind for one in transports}:
            choices += () if kept in choices else (kept,)
        if len(choices) == 1:
            return choices, "the default split is the optimum"
        first, seconds = min(predicted, key=lambda pair: pair[1])
        return choices, f"computed: {self._name(first, in_full=True)}, predicted {seconds:.4f} s"

    # The choice that stays.

    def _keep_the_fastest(self) -> None:
        """Rank 0 compares what was measured; all ranks install its choice."""
        decision = None
        if self._seconds[0]:
            kept = self._choices[fastest(self._seconds)]
            decision = (kept,), self._in_words(kept)
            _log(decision[1])
        self._receive(decision)
        self.settle(self._choices[0])

    def _in_words(self, kept: Choice) -> str:
        medians = [median(time for turn in turns for time in turn) for turns in self._seconds]
        pairs = zip(self._choices, medians, strict=True)
        times = ", ".join(f"{self._name(choice)}: {seconds:.4f} s" for choice, seconds in pairs)
        keys = ["transport"] if len(self._space.transports) > 1 else []
        keys += ["segments"] if self._space.split is not None else []
        words = f"measured in turn, by {' and '.join(keys)}: {times}; {self._name(kept)} kept"
        if self._kept is not None:
            words += " again" if kept == self._kept else f" instead of {self._name(self._kept)}"
        return f"{self._found}; {words}" if self._found else words

    def _name(self, choice: Choice, *, in_full: bool = False) -> str:
        """Name a choice by what tells it from the others: transport, number of segments, or
        both."""
        transport = choice.transport
        words: list[str] = [transport.kind] if len(self._space.transports) > 1 else []
        if isinstance(transport, ShardedConfig) and transport.replicated:
            words.append(f"({transport.replicated:.0%} replicated)")
        if self._space.split is not None:
            count = len(self._engine.split_points(choice.split))
            words.append(str(count))
            words += ["segment" if count == 1 else "segments"] * in_full
        if choice.overlap != self._space.overlap[0]:
            words.append("after backward")
        return " ".join(words)


def _log(line: str) -> None:
    """Write a line to stderr at once, as other processes may write to the same pipe."""
    sys.stderr.write(f"slipstream: {line}\n")
