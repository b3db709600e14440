"""Rounds of meetings: which fragment is sent after which update, and merged when."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from slipstream.codecs import Ranks
from slipstream.errors import ExchangeError, UsageError
from slipstream.gradients.segments import NamedParameter
from slipstream.local.carrier import Carrier, Exchange
from slipstream.local.delay_trial import DelayTrial
from slipstream.local.exchanges import IslandExchanges, JoinedAgain
from slipstream.local.fragments import cut, sent_after
from slipstream.local.inner_state import InnerOptimizers, average_state
from slipstream.local.island import Island
from slipstream.local.meeting import ALIKE, CLOSES, Flight, Meeting
from slipstream.local.pace import Pace
from slipstream.local.shared_buffers import learned_buffers
from slipstream.strategy import LocalConfig
from slipstream.trace.event import meeting_span
from slipstream.trace.recorder import Recorder
from slipstream.transport.channel import Label


class Rounds:
    """Holds the meetings of one model by a schedule, from its first update without an average on.

    Args:
        model: the user's.
        optimizers: step on this rank's gradients.
        trained: the parameters that meet.
        config: of the strategy.
        ranks: that share the data.
        island: of this rank.
        carrier: brings changes from island to island; None: this rank meets no other.
        recorder: gets a span for each exchange, and each wait for one.
        at: names this rank in an error.
        norms: let the span of a meeting have the norms of changes.

    Attributes:
        config: as given; what ``auto`` has chosen; then with a longer delay, where ranks wait.
        meetings: of each fragment; empty while ``auto`` chooses.
        weights: this rank's updates since each fragment was sent.
        exchanges: of this rank's island.
        pace: that of ranks of different speed.
        updates: of this rank, skipped ones and warm-up included.
        clock: updates by the schedule, the same on all ranks: it stops for slower ones.
        sent_ahead: whether the last update is counted, and not merged yet.
        trial: of longer delays; None: the delay stays.
        longer: what the trial has found, for the report.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: InnerOptimizers,
        trained: Sequence[NamedParameter],
        config: LocalConfig,
        ranks: Ranks,
        island: Island,
        carrier: Carrier | None,
        recorder: Recorder | None,
        at: str,
        *,
        norms: bool,
    ) -> None:
        self._model, self._optimizers, self._trained = model, optimizers, trained
        self._ranks, self._norms = ranks, norms and recorder is not None
        self._buffers = {*learned_buffers(model)}  # at the start
        self._device = trained[0].parameter.device
        self.meetings: list[Meeting] = []
        # no method: a circle would keep the groups of a session that is over
        landed = partial(_hand_on, self.meetings)
        self.exchanges = IslandExchanges(carrier, island, self._device, landed, recorder, at)
        self.pace = Pace(config.stretch, self.exchanges, self._device)
        self.trial: DelayTrial | None = None
        self.longer = ""
        self.updates = 0
        self.sent_ahead = False
        self._begun: Mapping[str, torch.Tensor] = {}  # buffers that all share, until fragments do
        self.use(config)

    def use(self, config: LocalConfig) -> None:
        """Let meetings be as ``config`` says, from the begin of a round."""
        self.config, self.clock = config, 0
        fragments = () if config.auto else cut(self._model, self._trained, config.fragments)
        shared = {**dict(self._model.named_buffers()), **self._begun}
        self.meetings[:] = [
            Meeting(self._model, fragment, config, self.island, number, shared)
            for number, fragment in enumerate(fragments)
        ]
        self.weights = [0] * len(self.meetings)
        self._share_buffers()

    def _share_buffers(self) -> None:
        """Take buffers of the model for what all ranks share, if there are no fragments that do."""
        named = self._model.named_buffers() if self.config.auto else ()
        self._begun = {name: buffer.detach().clone() for name, buffer in named}

    def try_delays(self) -> None:
        """Measure the next rounds; not under ``stretch``, where ranks wait for each other."""
        trial = DelayTrial(self.config, self.island.islands, self._device, self.clock)
        self.trial = None if trial.over or self.config.stretch else trial

    @property
    def island(self) -> Island:
        """The island of this rank."""
        return self.exchanges.island

    @property
    def in_flight(self) -> bool:
        """Whether a change is on its way that is to be merged."""
        return any(meeting.flight is not None for meeting in self.meetings)

    @property
    def awaits(self) -> bool:
        """Whether a meeting is to be merged, or this rank has announced one."""
        return self.in_flight or self.pace.waited is not None

    @property
    def position(self) -> int:
        """Updates of the run by its schedule; a meeting that was announced and not held is still
        ahead."""
        return self.config.warm_up + self.clock - (self.pace.waited is not None)

    # An update.

    def updated(self, worked: bool) -> None:
        """An update has ended, all ranks alike; ``worked``: this rank has changed its parameters.

        Raises:
            ExchangeError: another rank is gone.
        """
        with nullcontext() if self.trial is None else self.trial.meeting():
            if self.sent_ahead:
                self.sent_ahead = False
                self._merge(lambda flight: flight.due <= self.clock)
            else:
                self._count(worked)

    def send_ahead(self, worked: bool) -> None:
        """Send what is due after an update while a graph waits for its backward, if nothing must be
        merged before; `updated` follows. Others wait for it, and this rank may need a word of them
        in its backward pass: who has a batch."""
        carrier = self.exchanges.carrier
        comes_and_goes = carrier is not None and not carrier.fixed
        if not (self.sent_ahead or self.in_flight or comes_and_goes):
            self.sent_ahead = True
            self._count(worked)

    def _count(self, worked: bool) -> None:
        """Count an update, merge what is due after it, and send what is due."""
        self.updates += 1
        for number in range(len(self.weights)):
            self.weights[number] += worked
        if self.pace.waited is None:
            self.clock += 1
            self._merge(lambda flight: flight.due <= self.clock)
            if not self.in_flight:
                self.exchanges.admit()
        self.take_turn()

    def take_turn(self) -> None:
        """Send what is due; once more where this island has joined again meanwhile, and is at the
        update of the others."""
        exchanges, again = self.exchanges, True
        while again:
            exchanges.joined_again = False
            if self._due and not self.pace.waits() and not exchanges.joined_again:
                self._meet()
            again = exchanges.joined_again

    @property
    def _due(self) -> list[int]:
        """Fragments to send now."""
        numbers = sent_after(self.clock, self.config.steps, self.config.fragments)
        return [n for n in numbers if n < len(self.meetings)]

    def _meet(self) -> None:
        """Send the fragments whose turn it is, and merge those that have no delay."""
        if self.pace.last_round:
            return
        for number in self._due:
            self._send(number)
        if not self.sent_ahead:
            self._merge(lambda flight: flight.due <= self.clock)

    def _send(self, number: int) -> None:
        """Begin the meeting of a fragment."""
        self._check_buffers()
        meeting, weight = self.meetings[number], self.weights[number]
        self.weights[number] = 0
        seconds = None if self.trial is None else self.trial.seconds(self.clock)
        meeting.send(weight, self.clock + self.config.delay, seconds)
        # all ranks count alike: codecs have a step
        step = self.config.warm_up + self.clock
        label = self._label(number)
        exchange: Exchange = partial(meeting.exchange, step)
        if self._norms:
            args = dict(label.args)
            label = replace(label, args=args)
            exchange = partial(meeting.with_norms, exchange, args)
        self.exchanges.begin(label, exchange)

    def _check_buffers(self) -> None:
        """Refuse a buffer that came later: no meeting averages it."""
        if came := [name for name in learned_buffers(self._model) if name not in self._buffers]:
            raise UsageError(
                f"buffer {came[0]} came after accelerate(), so no meeting averages it; let it be "
                "there before (run a forward pass, or prune, first), close() the session and "
                "accelerate() again, or register it with persistent=False if ranks have it alike"
            )

    def _merge(self, due: Callable[[Flight], bool]) -> None:
        """Wait for the changes that are ``due``, and let the outer optimizers step by them."""
        for number, meeting in enumerate(self.meetings):
            if not meeting.flies(due):
                continue
            with nullcontext() if self.trial is None else self.trial.waiting():
                self.exchanges.land()
            if not meeting.flies(due):  # this island came too late, and has joined again
                continue
            if not meeting.done:
                self._optimizers.check_copies(meeting.fragment)
            if self._averages_state(meeting):
                with suppress(JoinedAgain):
                    average_state(meeting, self._optimizers.states, partial(self._average, number))
            if not meeting.flies(due):
                continue
            assert meeting.flight is not None
            lost, seconds = meeting.flight.lost, meeting.flight.seconds
            meeting.merge(self._optimizers.forget)
            if self.trial is not None and len(seconds):
                self._try_delay(self.trial, seconds)
            if lost:  # the rest of this rank is not finite either, or will not be for long
                for other in self.meetings:
                    other.adopt(self._optimizers.forget)
                self.weights = [0] * len(self.meetings)

    def _try_delay(self, trial: DelayTrial, seconds: torch.Tensor) -> None:
        """Let exchanges take longer, where the trial has shown that ranks wait."""
        before, longer = self.config.delay, trial.longer(self.clock, seconds)
        if longer is None:
            return
        if longer > before:
            self.config = self.config.model_copy(update={"delay": longer})
            for meeting in self.meetings:
                meeting.config = self.config
            self.longer += f"; delay {longer} since update {self.updates}, as ranks waited"
            if self._ranks.rank == 0:
                said = f"delay {longer} instead of {before}, as ranks wait for fragments"
                print(f"slipstream: local: auto: {said}", file=sys.stderr)
        if longer == before or trial.over:
            self.trial = None

    def _averages_state(self, meeting: Meeting) -> bool:
        every = self.config.average_every
        averages = self.config.inner_state == "averaged" and self.island.islands.count > 1
        return averages and (meeting.done + 1) % every == 0

    def _average(self, number: int, values: torch.Tensor, *, counts: bool = True) -> bool:
        label = replace(self._label(number), span="meeting_average")
        return self.exchanges.average(label, values, counts=counts)

    def _label(self, number: int) -> Label:
        names = self.meetings[number].fragment.names
        which = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        words = f"update {self.updates}, the meeting of fragment {number + 1} ({which})"
        args = {"bytes": self.meetings[number].sent_bytes, "update": self.updates}
        return Label(meeting_span(number + 1), lambda: words, args, words)

    # State.

    def settle_down(self) -> None:
        """Wait for what is on its way, unless this rank has announced a meeting: slower ranks
        answer that only later, and may be saving, too."""
        if self.pace.waited is not None:
            return
        self.exchanges.land()
        if self.exchanges.joined_again:
            with torch.no_grad():
                self.take_turn()
            self.exchanges.land()

    def begin_anew(self) -> None:
        """Begin with what the model has now, on all ranks."""
        self.exchanges.land()
        self.weights = [0] * len(self.meetings)
        self._share_buffers()
        for meeting in self.meetings:
            meeting.begin_anew()

    def go_to(self, updates: int) -> None:
        """Count on from so many updates of the run; no word of this rank is on its way."""
        self.updates = updates
        self.clock = max(updates - self.config.warm_up, 0)
        self.pace.waited = None

    # The end.

    def end(self) -> bool:
        """Merge what is on its way, and tell the others that this rank ends; whether they do, too.

        Raises:
            ExchangeError: another rank is gone, or still trains without ``stretch``.
        """
        self._merge(lambda flight: True)
        carrier = self.exchanges.carrier
        if carrier is None:
            return True
        if not self.config.stretch:
            if carrier.fixed:
                self._check_all_end()
            return carrier.close()
        if self.pace.waited is not None:
            self.pace.hear()
            self._meet()
            self._merge(lambda flight: True)
        self.pace.close()
        return self.pace.last_round and carrier.close()

    def _check_all_end(self) -> None:
        """Refuse to end while others meet: by what a meeting begins with, which fits theirs.

        Raises:
            ExchangeError: another rank is at a meeting.
        """
        weights = torch.zeros(2, dtype=torch.float64, device=self.meetings[0].device)
        weights[1] = CLOSES
        if self.trial is not None:
            weights = torch.cat([weights, self.trial.seconds(self.clock)])
        self.exchanges.sum(Label("meeting_ready", lambda: "the end of the training"), weights)
        self.exchanges.land()
        if weights[1] != CLOSES * self.island.islands.count:
            self.exchanges.failure = (
                f"{self.island.name}: the session closes after update {self.updates}, where "
                f"another rank meets and goes on; {ALIKE}"
            )
            raise ExchangeError(self.exchanges.failure)

    def leave_mean(self) -> None:
        """Average what ranks have done since they met, where all have ended; a collective.

        The last, partial round is no step of the outer optimizer, whose momentum would count as if
        it were a whole one.
        """
        for number, meeting in enumerate(self.meetings):
            mine, buffers = meeting.read(), meeting.buffers.offer()
            self.island.average(buffers)
            counts = self.updates > 0 and meeting.can_meet(mine, buffers)
            both = torch.cat([mine, buffers])
            if self.exchanges.carrier is not None or self._ranks.count > 1:
                try:
                    counts = self._average(number, both, counts=counts)
                except JoinedAgain:
                    counts = False
            own, others = both.split([len(mine), len(buffers)])
            meeting.write(own if counts else meeting.outer)
            agreed = meeting.buffers.agreed(others) if counts else meeting.buffers.shared
            meeting.buffers.write(agreed)

    def leave_outer(self) -> None:
        """Leave the outer parameters, where others train on."""
        for meeting in self.meetings:
            meeting.write(meeting.outer)


def _hand_on(meetings: Sequence[Meeting]) -> None:
    """Hand on to the ranks of this island what has landed."""
    for meeting in meetings:
        meeting.landed()
