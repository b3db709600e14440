"""The handle of training that meets rarely: counts updates, and holds the meetings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.codecs import Ranks, wire_bytes
from slipstream.errors import ExchangeError, UsageError
from slipstream.gradients.segments import NamedParameter
from slipstream.local.engine import LocalEngine
from slipstream.local.fragments import cut
from slipstream.local.meeting import Flight, Meeting
from slipstream.local.schedule import MeetingSchedule
from slipstream.optim.elementwise import COUNTERS
from slipstream.precision.model_precision import ModelPrecision
from slipstream.strategy import LocalConfig, Row
from slipstream.strategy.local import CHOSEN
from slipstream.transport.channel import Channel, Label
from slipstream.transport.requests import AllReduce, ExchangeSteps


class LocalTraining:
    """Meetings of one model, driven by its updates.

    Args:
        model, optimizer: the user's; the optimizer steps on this rank's gradients.
        trained: the parameters that meet.
        config: of the strategy.
        ranks: that meet.
        engine: averages gradients while ranks warm up.
        channel: carries changes; None: there is one rank.
        precision: has the loss scale, which ranks change on their own.
        at: names this rank in an error.

    Attributes:
        ranks: that meet.
        updates: of the run, skipped ones included.
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
        channel: Channel | None,
        precision: ModelPrecision,
        at: str,
    ) -> None:
        self._model, self._optimizer, self._at = model, optimizer, at
        self._trained, self.ranks, self._engine = tuple(trained), ranks, engine
        self._channel, self._precision = channel, precision
        self._use(config)
        self._undecided, self._why = config.auto, ""
        self._failure: str | None = None
        self.updates = 0
        self.evaluates = False
        self.own_state: Mapping[str, Any] | None = None
        engine.leave(not self.warms_up)

    def _use(self, config: LocalConfig) -> None:
        """Let meetings be as ``config`` says."""
        self._config, self._schedule = config, MeetingSchedule.of(config)
        fragments = () if config.auto else cut(self._model, self._trained, config.fragments)
        self._meetings = [
            Meeting(self._model, fragment, config, self.ranks, number)
            for number, fragment in enumerate(fragments)
        ]
        self._weights = [0] * len(self._meetings)  # updates since each was last sent

    @property
    def failed(self) -> bool:
        """Whether a meeting was broken off, so that ranks are out of step."""
        return self._failure is not None

    @property
    def warms_up(self) -> bool:
        """Whether gradients are still averaged at every update."""
        return self._config.auto or self.updates < self._config.warm_up

    @property
    def undecided(self) -> bool:
        """Whether ``auto`` is still to choose."""
        return self._undecided

    def decide(self, config: LocalConfig | None, reason: str) -> None:
        """Take over what ``auto`` has chosen, where an update ends; None: gradients are averaged to
        the end.

        Args:
            config: says when and how ranks meet; all else stays as the user's says.
            reason: a sentence, for the report.
        """
        self._undecided, self._why = False, reason
        if config is not None:
            self._take_over(config, max(self._config.warm_up, self.updates + 1))

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
        if self._failure is not None:
            raise ExchangeError(self._failure)
        self.check_outside("backward")
        if not self.warms_up and self.updates == self._config.warm_up:
            self._begin()  # a script may have loaded a model until now
        known = {t.parameter for t in self._trained}
        for name, p in self._model.named_parameters():
            if p.requires_grad and p not in known:
                raise UsageError(
                    f"parameter {name} was frozen at accelerate() and trains now: no meeting "
                    "averages it; close() the session, thaw it, and accelerate() again"
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
        self.updates += 1
        if self.warms_up:
            return
        if self.updates == self._config.warm_up:
            self._begin()
            return
        for number in range(len(self._weights)):
            self._weights[number] += worked
        now = self.updates - self._config.warm_up
        self._merge(lambda flight: flight.due <= now)
        for number in self._schedule.sent(now):
            if number < len(self._meetings):
                self._send(number, now)
        self._merge(lambda flight: flight.due <= now)

    @torch.no_grad()
    def _begin(self) -> None:
        """The warm-up is over: all ranks have the same parameters."""
        for meeting in self._meetings:
            meeting.take_outer()
        self._engine.leave(True)

    def _send(self, number: int, now: int) -> None:
        meeting, weight = self._meetings[number], self._weights[number]
        self._weights[number] = 0
        exchange = meeting.send(weight, now + self._config.delay, self.updates)
        if self._channel is None:
            for _ in exchange:
                pass
            return
        self._channel.start(self._label(number), exchange)

    def _merge(self, due: Callable[[Flight], bool]) -> None:
        for number, meeting in enumerate(self._meetings):
            if meeting.flight is None or not due(meeting.flight):
                continue
            self._land()
            if self._averages_state(meeting):
                self._average_state(number)
            meeting.merge(self._forget)

    def _land(self) -> None:
        """Return when nothing is on the wire."""
        if self._channel is None or not self._channel.in_flight:
            return
        try:
            self._channel.wait()
        except ExchangeError as error:
            self._failure = f"{self._at}: {error}; another rank is gone, or has left the loop"
            raise ExchangeError(self._failure) from error

    def _label(self, number: int) -> Label:
        names = self._meetings[number].fragment.names
        which = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        words = f"update {self.updates}, the meeting of fragment {number + 1} ({which})"
        return Label(f"meeting{number + 1}", lambda: words)

    # The state of the user's optimizer.

    def _forget(self, parameter: nn.Parameter) -> None:
        self._optimizer.state.pop(parameter, None)

    def _averages_state(self, meeting: Meeting) -> bool:
        every = self._config.average_every
        averages = self._config.inner_state == "averaged" and self._channel is not None
        return averages and (meeting.done + 1) % every == 0

    def _average_state(self, number: int) -> None:
        """Average what the optimizer keeps for each value; all ranks must keep the same."""
        meeting = self._meetings[number]
        found = [
            piece.of(value)
            for piece in meeting.fragment.pieces
            for key, value in sorted(self._optimizer.state.get(piece.parameter, {}).items())
            if isinstance(value, torch.Tensor)
            and key not in COUNTERS
            and value.is_floating_point()
            and value.shape == piece.parameter.shape
        ]
        assert self._channel is not None
        count = torch.tensor(
            [sum(v.numel() for v in found), 1], dtype=torch.float64, device=meeting.read().device
        )
        flat = [v.reshape(-1).to(meeting.dtype) for v in found]
        mine = torch.cat([*flat, count.new_zeros(0, dtype=meeting.dtype)])
        total = count.clone()
        label = self._label(number)
        self._channel.start(label, _one(AllReduce(total)))
        self._land()
        # ranks that have not updated yet keep nothing: then there is nothing to average
        if total[0] != count[0] * total[1] or not len(mine):
            return
        self._channel.start(label, _one(AllReduce(mine)))
        self._land()
        mine /= self.ranks.count
        for value, part in zip(found, mine.split([v.numel() for v in found]), strict=True):
            value.copy_(part.view(value.shape))

    # The outer parameters.

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model has the outer parameters, and buffers as of the last meetings."""
        if self.warms_up or self.evaluates:
            yield
            return
        with torch.no_grad():
            parameters = [*self._model.parameters()]
            kept = [p.detach().clone() for p in parameters]
            buffers = [meeting.read_buffers() for meeting in self._meetings]
            for meeting in self._meetings:
                meeting.write(meeting.outer)
                if meeting.done:
                    meeting.write_buffers(meeting.buffers)
        self.evaluates = True
        try:
            yield
        finally:
            self.evaluates = False
            with torch.no_grad():
                for p, value in zip(parameters, kept, strict=True):
                    p.copy_(value)
                for meeting, values in zip(self._meetings, buffers, strict=True):
                    meeting.write_buffers(values)

    # State.

    def state(self) -> dict[str, Any]:
        """State that all ranks have alike: outer parameters, momentum, means not merged yet."""
        self._land()
        return {
            "updates": self.updates,
            "config": self._config.document(full=True),
            "meetings": [meeting.state() for meeting in self._meetings],
        }

    def rank_state(self) -> dict[str, Any]:
        """State that this rank has alone, its model included."""
        self.check_outside("checkpoint")
        self._land()
        model = {k: v.clone() for k, v in self._model.state_dict().items()}
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
        self._land()  # a thread still writes into what is replaced
        saved = None if state is None else LocalConfig.model_validate(state["config"])
        if state is None or saved is None or saved.auto:
            self.updates = steps if state is None else state["updates"]
            self.own_state = None  # ranks that average gradients have all in common
            self.parameters_loaded()
            self._engine.leave(not self.warms_up)
            return
        if self._config.auto:  # the saved run has chosen already
            self._take_over(saved, saved.warm_up)
            self._undecided, self._why = False, "as in the run that was saved"
        if saved.fragments != self._config.fragments:
            raise UsageError(
                f"this state has local.fragments {saved.fragments}, this run "
                f"{self._config.fragments}; "
                "allowed: the same, or session.restore({'model': ...}), which begins new rounds"
            )
        self.updates = state["updates"]
        own, self.own_state = self.own_state, None
        if own is not None:
            self._model.load_state_dict(own["model"])
            self._weights = [*own["weights"]]
            self._precision.load_state_dict(own["loss_scale"])
        parts: Sequence[Any] = own["meetings"] if own else [None] * len(self._meetings)
        for meeting, shared, mine in zip(self._meetings, state["meetings"], parts, strict=True):
            meeting.load(shared, mine)
        self._engine.leave(not self.warms_up)

    @torch.no_grad()
    def parameters_loaded(self) -> None:
        """The model was loaded from elsewhere: it is what all ranks begin with."""
        self.check_outside("restore")
        self._land()
        self._weights = [0] * len(self._meetings)
        for meeting in self._meetings:
            meeting.begin_anew()

    # The handle.

    @torch.no_grad()
    def close(self) -> None:
        """Average what ranks have done since they met, and leave the mean on all of them.

        A collective. The last, partial round is no step of the outer optimizer, whose momentum
        would count as if it were a whole one.
        """
        if self.failed or self.warms_up or not self.updates:
            return
        self.check_outside("close")
        self._merge(lambda flight: True)
        for number, meeting in enumerate(self._meetings):
            mine = meeting.read()
            buffers = meeting.read_buffers()
            both = torch.cat([mine, buffers])
            if self._channel is not None:
                both /= self.ranks.count
                self._channel.start(self._label(number), _one(AllReduce(both)))
                self._land()
            meeting.write(both[: len(mine)])
            meeting.write_buffers(both[len(mine) :])

    def abandon(self) -> None:
        """After an error the other ranks may not be there to meet."""

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
        sent = sum(
            wire_bytes(config.codec, piece.to(meeting.dtype))
            for meeting in self._meetings
            for piece in meeting.wire_shapes
        )
        rate = f"{sent / 2**20 / config.steps:.3g} MB an update"
        note = f"{len(self._meetings)} fragments, {rate} in place of gradients"
        note += f"; {self._why}" if self._why else ""
        return [Row("local", f"{done} meetings", note, "lossy")]


def _one(request: AllReduce) -> ExchangeSteps:
    """An exchange of one request, which a thread of the channel carries out."""
    yield request
