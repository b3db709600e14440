"""The handle of training that meets rarely: counts updates, and holds the meetings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream.codecs import Ranks
from slipstream.errors import ExchangeError, ModelError, UsageError
from slipstream.gradients.segments import NamedParameter
from slipstream.local.carrier import Carrier, Exchange
from slipstream.local.delay_trial import DelayTrial
from slipstream.local.engine import LocalEngine
from slipstream.local.exchanges import IslandExchanges, JoinedAgain
from slipstream.local.fragments import cut, sent_after
from slipstream.local.inner_state import InnerOptimizers, average_state
from slipstream.local.island import Island
from slipstream.local.meeting import ALIKE, CLOSES, Flight, Meeting
from slipstream.local.outer_view import modes_kept, outer_view
from slipstream.local.pace import Pace
from slipstream.local.saved_state import check_settings, own_part
from slipstream.local.shared_buffers import learned_buffers
from slipstream.local.written import WrittenSince
from slipstream.precision.model_precision import ModelPrecision
from slipstream.pytree import mapped
from slipstream.strategy import LocalConfig, Row
from slipstream.strategy.local import CHOSEN
from slipstream.trace.event import meeting_span
from slipstream.trace.recorder import Recorder
from slipstream.transport.channel import Label


class LocalTraining:
    """Meetings of one model, driven by its updates.

    Args:
        model, optimizer: the user's; the optimizer steps on this rank's gradients.
        trained: the parameters that meet.
        config: of the strategy.
        ranks: that share the data.
        engine: averages gradients while ranks warm up, and those of this island from then on.
        carrier: brings changes from island to island; None: this rank meets no other.
        precision: has the loss scale, which ranks change on their own.
        recorder: gets a span for each exchange, and each wait for one.
        at: names this rank in an error.
        norms: let the span of a meeting have the norms of changes.

    Attributes:
        ranks: that share the data.
        updates: of this rank, skipped ones included.
        evaluates: inside `evaluating`.
        own_state: `rank_state` of a checkpoint under way; None: there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trained: Sequence[NamedParameter],
        config: LocalConfig,
        ranks: Ranks,
        engine: LocalEngine,
        carrier: Carrier | None,
        precision: ModelPrecision,
        recorder: Recorder | None,
        at: str,
        *,
        norms: bool = False,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._norms = norms and recorder is not None
        self._trained, self.ranks, self._engine = tuple(trained), ranks, engine
        met = {t.parameter for t in trained}
        self._optimizers = InnerOptimizers(optimizer, met)
        self._frozen = [(name, p) for name, p in model.named_parameters() if p not in met]
        self._buffers = {*learned_buffers(model)}  # at the start
        self._precision = precision
        device = self._trained[0].parameter.device
        self._exchanges = IslandExchanges(
            carrier, engine.island, device, self._landed, recorder, at
        )
        self._pace = Pace(config.stretch, self._exchanges, device)
        self._begun: Mapping[str, torch.Tensor] = {}  # buffers that all share, until fragments do
        self._use(config)
        self._auto = self._undecided = config.auto
        self._why = ""
        self._trial: DelayTrial | None = None
        self.updates = 0
        self._clock = 0  # of the schedule, the same on all ranks: it stops for slower ones
        self._sent_ahead = False  # the last update is counted, and not merged yet
        self._fresh = True  # a script may load the model that the first round begins with
        self._resumes = False  # it may load one that merges what was on its way
        self.evaluates = False
        self.own_state: Mapping[str, Any] | None = None
        self._written = WrittenSince(self._trained)
        self._note()
        engine.leave(not self.warms_up)

    def _use(self, config: LocalConfig) -> None:
        """Let meetings be as ``config`` says."""
        self._config = config
        fragments = () if config.auto else cut(self._model, self._trained, config.fragments)
        shared = {**dict(self._model.named_buffers()), **self._begun}
        self._meetings = [
            Meeting(self._model, fragment, config, self.island, number, shared)
            for number, fragment in enumerate(fragments)
        ]
        self._weights = [0] * len(self._meetings)  # updates since each was last sent
        self._share_buffers()

    def _share_buffers(self) -> None:
        """Take buffers of the model for what all ranks share, if there are no fragments that do."""
        named = self._model.named_buffers() if self._config.auto else ()
        self._begun = {name: buffer.detach().clone() for name, buffer in named}

    @property
    def island(self) -> Island:
        """The island of this rank."""
        return self._exchanges.island

    @property
    def failed(self) -> bool:
        """Whether a meeting was broken off, so that ranks are out of step."""
        return self._exchanges.failure is not None

    @property
    def warms_up(self) -> bool:
        """Whether gradients are still averaged at every update."""
        return self._config.auto or self.updates < self._config.warm_up

    @property
    def undecided(self) -> bool:
        """Whether ``auto`` is still to choose."""
        return self._undecided

    @property
    def in_use(self) -> LocalConfig | None:
        """The meetings of ranks; None: ``auto`` has not chosen yet, or none."""
        return None if self._config.auto else self._config

    def decide(self, config: LocalConfig | None, reason: str) -> None:
        """Take over what ``auto`` has chosen, where an update ends; None: gradients are averaged to
        the end.

        Args:
            config: says when and how ranks meet; all else stays as the user's says.
            reason: a sentence, for the report.
        """
        self._undecided, self._why = False, reason
        if config is not None:
            self._clock = 0  # of a state that was loaded meanwhile
            self._take_over(config, max(self._config.warm_up, self.updates + 1))
            self._begin_trial()

    def _begin_trial(self) -> None:
        """Measure the next rounds; not under ``stretch``, where ranks wait for each other."""
        device = self._trained[0].parameter.device
        trial = DelayTrial(self._config, self.island.islands, device, self._clock)
        self._trial = None if trial.over or self._config.stretch else trial

    def _take_over(self, config: LocalConfig, warm_up: int) -> None:
        """Let what ``auto`` leaves open be as in ``config``."""
        chosen = {name: getattr(config, name) for name in CHOSEN}
        given = {"auto": False, "updates": None, "warm_up": warm_up}
        self._use(self._config.model_copy(update=chosen | given))

    # The loop.

    def check(self) -> None:
        """Refuse a backward pass where it has no meaning.

        Raises:
            UsageError: inside `evaluating`, or a parameter trains that was frozen at the start.
            ExchangeError: a meeting was broken off.
        """
        if self._exchanges.failure is not None:
            raise ExchangeError(self._exchanges.failure)
        self.check_outside("backward")
        self._take_outer()
        self._fresh, self._resumes = self._fresh and self.warms_up, False
        for name, p in self._frozen:
            if p.requires_grad:
                raise UsageError(
                    f"parameter {name} was frozen at accelerate() and trains now: no meeting "
                    "averages it; close() the session, thaw it, and accelerate() again"
                )

    def check_shared_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that has exchanged something inside its step.

        Raises:
            ModelError: ranks are to train on their own.
        """
        if self.in_use is not None:
            name = type(optimizer).__name__
            raise ModelError(
                f"{name}.step() exchanges with other ranks, as one that deals its work out to them "
                "does, but under local each rank must update all parameters by its own gradients: "
                "use a class that steps on one rank alone, or leave local out; if a hook on its "
                "steps does that, as one that adds up the load of experts over ranks, call it "
                "between backward() and step()"
            )

    def check_outside(self, verb: str) -> None:
        """Refuse what would take the outer parameters for this rank's.

        Raises:
            UsageError: inside `evaluating`.
        """
        if self.evaluates:
            raise UsageError(
                f"{verb}() inside session.evaluating(): the model has the outer parameters there; "
                f"call {verb}() after the with block"
            )

    @torch.no_grad()
    def updated(self, worked: bool) -> None:
        """An update has ended, all ranks alike; ``worked``: this rank has changed its parameters.

        Raises:
            ExchangeError: another rank is gone.
        """
        trial = None if self.warms_up else self._trial
        with nullcontext() if trial is None else trial.meeting():
            if self._sent_ahead:
                self._sent_ahead = False
                self._merge(lambda flight: flight.due <= self._clock)
            else:
                self._count(worked)
        self._note()

    def _try_delay(self, trial: DelayTrial, seconds: torch.Tensor) -> None:
        """Let exchanges take longer, where the trial has shown that ranks wait."""
        before, longer = self._config.delay, trial.longer(self._clock, seconds)
        if longer is None:
            return
        if longer > before:
            self._config = self._config.model_copy(update={"delay": longer})
            for meeting in self._meetings:
                meeting.config = self._config
            self._why += f"; delay {longer} since update {self.updates}, as ranks waited"
            if self.ranks.rank == 0:
                said = f"delay {longer} instead of {before}, as ranks wait for fragments"
                print(f"slipstream: local: auto: {said}", file=sys.stderr)
        if longer == before or trial.over:
            self._trial = None

    def stepped(self, optimizer: torch.optim.Optimizer, *, exchanged: bool) -> None:
        """Another optimizer of the script has stepped; it may hold parameters that meet.

        Args:
            optimizer: which one.
            exchanged: whether ranks have exchanged something in its step.

        Raises:
            ModelError: as `check_shared_step`.
        """
        if not self._optimizers.stepped(optimizer):
            return
        if exchanged:
            self.check_shared_step(optimizer)
        self._note()

    @torch.no_grad()
    def send_ahead(self, worked: bool) -> None:
        """Send what is due after an update while a graph waits for its backward, if nothing must be
        merged before; `updated` follows. Others wait for it, and this rank may need a word of them
        in its backward pass: who has a batch."""
        merges = any(meeting.flight is not None for meeting in self._meetings)
        carrier = self._exchanges.carrier
        comes_and_goes = carrier is not None and not carrier.fixed
        if not (self._sent_ahead or self.warms_up or merges or comes_and_goes):
            self._sent_ahead = True
            self._count(worked)

    def _count(self, worked: bool) -> None:
        self.updates += 1
        if self.warms_up:
            return
        if self.updates == self._config.warm_up:
            self._take_outer()
            self._engine.leave(True)
            return
        for number in range(len(self._weights)):
            self._weights[number] += worked
        if self._pace.waited is None:
            self._clock += 1
            self._merge(lambda flight: flight.due <= self._clock)
            if all(meeting.flight is None for meeting in self._meetings):
                self._exchanges.admit()
        self._take_turn()

    def _take_turn(self) -> None:
        """Send what is due; once more where this island has joined again meanwhile, and is at the
        update of the others."""
        exchanges, again = self._exchanges, True
        while again:
            exchanges.joined_again = False
            if self._due and not self._pace.waits() and not exchanges.joined_again:
                self._meet()
            again = exchanges.joined_again

    @property
    def _due(self) -> list[int]:
        """Fragments to send now."""
        numbers = sent_after(self._clock, self._config.steps, self._config.fragments)
        return [n for n in numbers if n < len(self._meetings)]

    def _meet(self) -> None:
        if self._pace.last_round:
            return
        for number in self._due:
            self._send(number)
        if not self._sent_ahead:
            self._merge(lambda flight: flight.due <= self._clock)

    @torch.no_grad()
    def _take_outer(self) -> None:
        """Begin with what the model has now, if no round has begun since it was loaded."""
        if self._fresh and not self.warms_up:
            for meeting in self._meetings:
                meeting.take_outer()
        if self._resumes:
            for meeting in self._meetings:
                meeting.take_sent()

    def _send(self, number: int) -> None:
        self._check_buffers()
        meeting, weight = self._meetings[number], self._weights[number]
        self._weights[number] = 0
        seconds = None if self._trial is None else self._trial.seconds(self._clock)
        meeting.send(weight, self._clock + self._config.delay, seconds)
        # all ranks count alike: codecs have a step
        step = self._config.warm_up + self._clock
        label = self._label(number)
        exchange: Exchange = partial(meeting.exchange, step)
        if self._norms:
            args = dict(label.args)
            label = replace(label, args=args)
            exchange = partial(meeting.with_norms, exchange, args)
        self._exchanges.begin(label, exchange)

    def _check_buffers(self) -> None:
        """Refuse a buffer that came later: no meeting averages it."""
        if came := [name for name in learned_buffers(self._model) if name not in self._buffers]:
            raise UsageError(
                f"buffer {came[0]} came after accelerate(), so no meeting averages it; let it be "
                "there before (run a forward pass, or prune, first), close() the session and "
                "accelerate() again, or register it with persistent=False if ranks have it alike"
            )

    def _merge(self, due: Callable[[Flight], bool]) -> None:
        for number, meeting in enumerate(self._meetings):
            if not meeting.flies(due):
                continue
            with nullcontext() if self._trial is None else self._trial.waiting():
                self._exchanges.land()
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
            if self._trial is not None and len(seconds):
                self._try_delay(self._trial, seconds)
            if lost:  # the rest of this rank is not finite either, or will not be for long
                for other in self._meetings:
                    other.adopt(self._optimizers.forget)
                self._weights = [0] * len(self._meetings)

    def _landed(self) -> None:
        for meeting in self._meetings:
            meeting.landed()

    def _average(self, number: int, values: torch.Tensor, *, counts: bool = True) -> bool:
        label = replace(self._label(number), span="meeting_average")
        return self._exchanges.average(label, values, counts=counts)

    def _label(self, number: int) -> Label:
        names = self._meetings[number].fragment.names
        which = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        words = f"update {self.updates}, the meeting of fragment {number + 1} ({which})"
        args = {"bytes": self._meetings[number].sent_bytes, "update": self.updates}
        return Label(meeting_span(number + 1), lambda: words, args, words)

    def _averages_state(self, meeting: Meeting) -> bool:
        every = self._config.average_every
        averages = self._config.inner_state == "averaged" and self.island.islands.count > 1
        return averages and (meeting.done + 1) % every == 0

    @property
    def _position(self) -> int:
        """Updates of the run by its schedule; a meeting that was announced and not held is still
        ahead."""
        if self.warms_up:
            return self.updates
        return self._config.warm_up + self._clock - (self._pace.waited is not None)

    @property
    def all_updates(self) -> int:
        """Updates of all ranks together that meetings have averaged; after the last meeting of all
        ranks each one counts its own, too."""
        return self._met_updates + (self._weights[0] if self._pace.last_round else 0)

    @property
    def _met_updates(self) -> int:
        if self._config.auto:
            return self.updates * self.ranks.count
        first = min(self.updates, self._config.warm_up) * self.ranks.count
        return first + (self._meetings[0].counted if self._meetings else 0)

    @property
    def is_awaited(self) -> bool:
        """Whether others wait for this rank within a meeting, or count by it."""
        return bool(self._config.stretch) or self._config.inner_state == "averaged"

    def common_updates(self, *, uncounted: int) -> int:
        """Count updates as all ranks do alike; ``uncounted``: those that `updated` will be told
        of."""
        if self._config.stretch:
            return self._met_updates
        return self.updates + uncounted - self._sent_ahead

    # The outer parameters.

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model has the outer parameters, and buffers as of the last meetings."""
        if self.warms_up or self.evaluates:
            yield
            return
        self._take_outer()
        trained = [t.parameter for t in self._trained]
        with (
            modes_kept(self._optimizers),
            outer_view(self._model, self._meetings, trained, self._frozen),
        ):
            self.evaluates = True
            try:
                yield
            finally:
                self.evaluates = False

    # State.

    def _settle_down(self) -> None:
        """Wait for what is on its way, unless this rank has announced a meeting: slower ranks
        answer that only later, and may be saving, too."""
        if self._pace.waited is not None:
            return
        self._exchanges.land()
        if self._exchanges.joined_again:
            with torch.no_grad():
                self._take_turn()
            self._exchanges.land()

    @property
    def meetings(self) -> int:
        """Fragments merged so far, on all ranks in the same order."""
        return sum(meeting.done for meeting in self._meetings)

    def meetings_in(self, updates: int) -> int:
        """Count the fragments that meet in so many updates; at least 1."""
        return max(1, updates * len(self._meetings) // self._config.steps)

    def alike(self) -> dict[str, torch.Tensor]:
        """List what all ranks have the same bits of, once they have merged as many meetings."""
        return {
            f"the outer parameters of fragment {number + 1} ({meeting.fragment.names[0]} ...)": (
                meeting.outer
            )
            for number, meeting in enumerate(self._meetings)
        }

    @property
    def place(self) -> dict[str, str]:
        """Say whether this rank waits for a meeting; all ranks that restore must do alike."""
        if not self._config.stretch:
            return {}
        waits = self._pace.waited is not None
        here = "ready to meet, waiting for others" if waits else "not ready to meet"
        return {"where it restores (allowed: where session.all_updates has just changed)": here}

    def state(self) -> dict[str, Any]:
        """State that all ranks have alike: outer parameters, momentum, means not merged yet; but
        for the number of updates under ``stretch``."""
        self._settle_down()
        self._take_outer()
        return {
            "updates": self._position,
            "config": self._config.document(full=True),
            "settled": not self._undecided,
            "tries": self._trial is not None,  # a longer delay
            "meetings": [meeting.state() for meeting in self._meetings],
        }

    def rank_state(self) -> dict[str, Any]:
        """State that this rank has alone, its model included."""
        self.check_outside("checkpoint")
        self._settle_down()
        model = mapped(dict(self._model.state_dict()), torch.Tensor.clone)
        own = [meeting.rank_state() for meeting in self._meetings]
        scale = self._precision.state_dict()
        return {"model": model, "weights": [*self._weights], "meetings": own, "loss_scale": scale}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any] | None, steps: int) -> None:
        """Go on from `state`, and from ``own_state`` where this rank has one.

        Args:
            state: None: of a run that averaged gradients; its ``steps`` count as warm-up.
            steps: updates of the run that was saved.

        Raises:
            UsageError: its fragments are others.
        """
        self.check_outside("restore")
        self._exchanges.land()  # a thread still writes into what is replaced
        own, self.own_state = self.own_state, None
        saved = None if state is None else LocalConfig.model_validate(state["config"])
        if state is not None and saved is not None and self._config.auto:
            if state.get("settled") or not saved.auto:  # the saved run has chosen already
                self._undecided, self._why = False, "as in the run that was saved"
            if not saved.auto:
                self._take_over(saved, saved.warm_up)
        if state is None or saved is None or saved.auto or state["updates"] < saved.warm_up:
            self._go_to(steps if state is None else state["updates"])  # all is in common
            self.parameters_loaded()
        else:
            check_settings(state, saved, self._config)
            own = own_part(state, own, self._meetings, self.island.name)
            self._go_to(state["updates"])
            self._load_meetings(state, own)
            # jobs of one start take this from the first: a script may load the model then, too
            self._fresh = own is None and state["updates"] == saved.warm_up
            self._resumes = own is None
        self._trial = None
        if self._auto and state is not None and state.get("tries"):
            self._begin_trial()
        self._engine.leave(not self.warms_up)

    def _go_to(self, updates: int) -> None:
        """Count on from so many updates of the run; no word of this rank is on its way."""
        self.updates = updates
        self._clock = max(updates - self._config.warm_up, 0)
        self._pace.waited = None

    def _load_meetings(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        self._weights = [0] * len(self._meetings)
        if own is not None:
            self._model.load_state_dict(own["model"])
            self._weights = [*own["weights"]]
            self._precision.load_state_dict(own["loss_scale"])
        parts = own["meetings"] if own else [None] * len(self._meetings)
        for meeting, shared, mine in zip(self._meetings, state["meetings"], parts, strict=True):
            meeting.load(shared, mine)
        self._note()

    @torch.no_grad()
    def parameters_loaded(self) -> None:
        """The model was loaded from elsewhere: it is what all ranks begin with."""
        self.check_outside("restore")
        self._exchanges.land()
        self._weights, self.own_state, self._fresh = [0] * len(self._meetings), None, True
        self._resumes = False
        self._share_buffers()
        for meeting in self._meetings:
            meeting.begin_anew()

    def check_restore(self, verb: str) -> None:
        """Refuse a state that others would not have; ranks of one job restore together."""

    # The handle.

    @torch.no_grad()
    def close(self) -> None:
        """Average what ranks have done since they met, and leave the mean on all of them.

        A collective. The last, partial round is no step of the outer optimizer, whose momentum
        would count as if it were a whole one.

        Raises:
            ExchangeError: another rank is gone, or still trains without ``stretch``.
        """
        # others wait for a word of a rank of another speed, though it has made no update
        if self.failed or self.warms_up or not (self.updates or self._config.stretch):
            return
        self.check_outside("close")
        self._take_outer()
        with self._written.kept(self._meetings):
            self._merge(lambda flight: True)
            together = self._closes_with_others()
        if not together:
            for meeting in self._meetings:
                meeting.write(meeting.outer)
            return
        for number, meeting in enumerate(self._meetings):
            mine, buffers = meeting.read(), meeting.buffers.offer()
            self.island.average(buffers)
            counts = self.updates > 0 and meeting.can_meet(mine, buffers)
            both = torch.cat([mine, buffers])
            if self._exchanges.carrier is not None or self.ranks.count > 1:
                try:
                    counts = self._average(number, both, counts=counts)
                except JoinedAgain:
                    counts = False
            own, others = both.split([len(mine), len(buffers)])
            meeting.write(own if counts else meeting.outer)
            agreed = meeting.buffers.agreed(others) if counts else meeting.buffers.shared
            meeting.buffers.write(agreed)

    def _note(self) -> None:
        """Remember the parameters as an update has left them, where a meeting is to end."""
        flies = any(meeting.flight is not None for meeting in self._meetings)
        self._written.note(flies or self._pace.waited is not None)

    def _closes_with_others(self) -> bool:
        """Tell the others that this rank ends; whether they do, too."""
        carrier = self._exchanges.carrier
        if carrier is None:
            return True
        if not self._config.stretch:
            if carrier.fixed:
                self._check_all_close()
            return carrier.close()
        if self._pace.waited is not None:
            self._pace.hear()
            self._meet()
            self._merge(lambda flight: True)
        self._pace.close()
        return self._pace.last_round and carrier.close()

    def _check_all_close(self) -> None:
        """Refuse to end while others meet: by what a meeting begins with, which fits theirs.

        Raises:
            ExchangeError: another rank is at a meeting.
        """
        weights = torch.zeros(2, dtype=torch.float64, device=self._meetings[0].device)
        weights[1] = CLOSES
        if self._trial is not None:
            weights = torch.cat([weights, self._trial.seconds(self._clock)])
        self._exchanges.sum(Label("meeting_ready", lambda: "the end of the training"), weights)
        self._exchanges.land()
        if weights[1] != CLOSES * self.island.islands.count:
            self._exchanges.failure = (
                f"{self.island.name}: the session closes after update {self.updates}, where "
                f"another rank meets and goes on; {ALIKE}"
            )
            raise ExchangeError(self._exchanges.failure)

    def abandon(self) -> None:
        """Meet nobody after an error: the other ranks may not be there."""

    def report_rows(self) -> list[Row]:
        """Report the rounds, and what they send."""
        config = self._config
        if config.auto:
            outcome = self._why or "measures the first updates"
            return [Row("local", "auto", outcome)]
        if self.warms_up:
            left = config.warm_up - self.updates
            return [Row("local", f"{left} updates of warm-up left", "gradients are averaged")]
        done = sum(meeting.done for meeting in self._meetings)
        sent = sum(meeting.sent_bytes for meeting in self._meetings)
        rate = f"{sent / 2**20 / config.steps:.3g} MB an update"
        note = f"{len(self._meetings)} fragments, {rate} in place of gradients"
        note += f"; {self._why}" if self._why else ""
        return [Row("local", f"{done} meetings", note, "lossy")]
