"""The handle of training that meets rarely: when it begins, what it saves, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.codecs import Ranks
from slipstream.errors import ExchangeError, ModelError, UsageError
from slipstream.gradients.segments import NamedParameter
from slipstream.local.carrier import Carrier
from slipstream.local.engine import LocalEngine
from slipstream.local.inner_state import InnerOptimizers
from slipstream.local.island import Island
from slipstream.local.outer_view import modes_kept, outer_view
from slipstream.local.rounds import Rounds
from slipstream.local.saved_state import check_settings, own_part
from slipstream.local.written import WrittenSince
from slipstream.precision.model_precision import ModelPrecision
from slipstream.pytree import mapped
from slipstream.strategy import LocalConfig, Row
from slipstream.strategy.local import CHOSEN
from slipstream.trace.recorder import Recorder


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
        self._trained, self.ranks, self._engine = tuple(trained), ranks, engine
        met = {t.parameter for t in trained}
        self._optimizers = InnerOptimizers(optimizer, met)
        self._frozen = [(name, p) for name, p in model.named_parameters() if p not in met]
        self._precision = precision
        self._rounds = Rounds(
            model,
            self._optimizers,
            self._trained,
            config,
            ranks,
            engine.island,
            carrier,
            recorder,
            at,
            norms=norms,
        )
        self._auto = self._undecided = config.auto
        self._why = ""
        self._fresh = True  # a script may load the model that the first round begins with
        self._resumes = False  # it may load one that merges what was on its way
        self.evaluates = False
        self.own_state: Mapping[str, Any] | None = None
        self._written = WrittenSince(self._trained)
        self._note()
        engine.leave(not self.warms_up)

    @property
    def _config(self) -> LocalConfig:
        return self._rounds.config

    @property
    def updates(self) -> int:
        """Updates of this rank, skipped ones included."""
        return self._rounds.updates

    @property
    def island(self) -> Island:
        """The island of this rank."""
        return self._rounds.island

    @property
    def failed(self) -> bool:
        """Whether a meeting was broken off, so that ranks are out of step."""
        return self._rounds.exchanges.failure is not None

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
            self._take_over(config, max(self._config.warm_up, self.updates + 1))
            self._rounds.try_delays()

    def _take_over(self, config: LocalConfig, warm_up: int) -> None:
        """Let what ``auto`` leaves open be as in ``config``."""
        chosen = {name: getattr(config, name) for name in CHOSEN}
        given = {"auto": False, "updates": None, "warm_up": warm_up}
        self._rounds.use(self._config.model_copy(update=chosen | given))

    # The loop.

    def check(self) -> None:
        """Refuse a backward pass where it has no meaning.

        Raises:
            UsageError: inside `evaluating`, or a parameter trains that was frozen at the start.
            ExchangeError: a meeting was broken off.
        """
        if (failure := self._rounds.exchanges.failure) is not None:
            raise ExchangeError(failure)
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
        if self.warms_up:
            self._warm_up()
        else:
            self._rounds.updated(worked)
        self._note()

    def _warm_up(self) -> None:
        """Count an update in which gradients were averaged; the last of them begins the rounds."""
        self._rounds.updates += 1
        if not self.warms_up:
            self._take_outer()
            self._engine.leave(True)

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
        """Send what is due after an update while a graph waits for its backward; `updated`
        follows."""
        if not self.warms_up:
            self._rounds.send_ahead(worked)

    @torch.no_grad()
    def _take_outer(self) -> None:
        """Begin with what the model has now, if no round has begun since it was loaded."""
        if self._fresh and not self.warms_up:
            for meeting in self._rounds.meetings:
                meeting.take_outer()
        if self._resumes:
            for meeting in self._rounds.meetings:
                meeting.take_sent()

    @property
    def _position(self) -> int:
        """Updates of the run, as its schedule counts them."""
        return self.updates if self.warms_up else self._rounds.position

    @property
    def all_updates(self) -> int:
        """Updates of all ranks together that meetings have averaged; after the last meeting of all
        ranks each one counts its own, too."""
        rounds = self._rounds
        return self._met_updates + (rounds.weights[0] if rounds.pace.last_round else 0)

    @property
    def _met_updates(self) -> int:
        if self._config.auto:
            return self.updates * self.ranks.count
        first = min(self.updates, self._config.warm_up) * self.ranks.count
        meetings = self._rounds.meetings
        return first + (meetings[0].counted if meetings else 0)

    @property
    def is_awaited(self) -> bool:
        """Whether others wait for this rank within a meeting, or count by it."""
        return bool(self._config.stretch) or self._config.inner_state == "averaged"

    def common_updates(self, *, uncounted: int) -> int:
        """Count updates as all ranks do alike; ``uncounted``: those that `updated` will be told
        of."""
        if self._config.stretch:
            return self._met_updates
        return self.updates + uncounted - self._rounds.sent_ahead

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
            outer_view(self._model, self._rounds.meetings, trained, self._frozen),
        ):
            self.evaluates = True
            try:
                yield
            finally:
                self.evaluates = False

    # State.

    @property
    def meetings(self) -> int:
        """Fragments merged so far, on all ranks in the same order."""
        return sum(meeting.done for meeting in self._rounds.meetings)

    def meetings_in(self, updates: int) -> int:
        """Count the fragments that meet in so many updates; at least 1."""
        return max(1, updates * len(self._rounds.meetings) // self._config.steps)

    def alike(self) -> dict[str, torch.Tensor]:
        """List what all ranks have the same bits of, once they have merged as many meetings."""
        return {
            f"the outer parameters of fragment {number + 1} ({meeting.fragment.names[0]} ...)": (
                meeting.outer
            )
            for number, meeting in enumerate(self._rounds.meetings)
        }

    @property
    def place(self) -> dict[str, str]:
        """Say whether this rank waits for a meeting; all ranks that restore must do alike."""
        if not self._config.stretch:
            return {}
        waits = self._rounds.pace.waited is not None
        here = "ready to meet, waiting for others" if waits else "not ready to meet"
        return {"where it restores (allowed: where session.all_updates has just changed)": here}

    def state(self) -> dict[str, Any]:
        """State that all ranks have alike: outer parameters, momentum, means not merged yet; but
        for the number of updates under ``stretch``."""
        self._rounds.settle_down()
        self._take_outer()
        return {
            "updates": self._position,
            "config": self._config.document(full=True),
            "settled": not self._undecided,
            "tries": self._rounds.trial is not None,  # a longer delay
            "meetings": [meeting.state() for meeting in self._rounds.meetings],
        }

    def rank_state(self) -> dict[str, Any]:
        """State that this rank has alone, its model included."""
        self.check_outside("checkpoint")
        self._rounds.settle_down()
        model = mapped(dict(self._model.state_dict()), torch.Tensor.clone)
        own = [meeting.rank_state() for meeting in self._rounds.meetings]
        scale = self._precision.state_dict()
        return {
            "model": model,
            "weights": [*self._rounds.weights],
            "meetings": own,
            "loss_scale": scale,
        }

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
        self._rounds.exchanges.land()  # a thread still writes into what is replaced
        own, self.own_state = self.own_state, None
        saved = None if state is None else LocalConfig.model_validate(state["config"])
        if state is not None and saved is not None and self._config.auto:
            if state.get("settled") or not saved.auto:  # the saved run has chosen already
                self._undecided, self._why = False, "as in the run that was saved"
            if not saved.auto:
                self._take_over(saved, saved.warm_up)
        if state is None or saved is None or saved.auto or state["updates"] < saved.warm_up:
            self._rounds.go_to(steps if state is None else state["updates"])  # all is in common
            self.parameters_loaded()
        else:
            check_settings(state, saved, self._config)
            own = own_part(state, own, self._rounds.meetings, self.island.name)
            self._rounds.go_to(state["updates"])
            self._load_meetings(state, own)
            # jobs of one start take this from the first: a script may load the model then, too
            self._fresh = own is None and state["updates"] == saved.warm_up
            self._resumes = own is None
        self._rounds.trial = None
        if self._auto and state is not None and state.get("tries"):
            self._rounds.try_delays()
        self._engine.leave(not self.warms_up)

    def _load_meetings(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        rounds = self._rounds
        rounds.weights = [0] * len(rounds.meetings)
        if own is not None:
            self._model.load_state_dict(own["model"])
            rounds.weights = [*own["weights"]]
            self._precision.load_state_dict(own["loss_scale"])
        parts = own["meetings"] if own else [None] * len(rounds.meetings)
        for meeting, shared, mine in zip(rounds.meetings, state["meetings"], parts, strict=True):
            meeting.load(shared, mine)
        self._note()

    @torch.no_grad()
    def parameters_loaded(self) -> None:
        """The model was loaded from elsewhere: it is what all ranks begin with."""
        self.check_outside("restore")
        self._rounds.begin_anew()
        self.own_state, self._fresh, self._resumes = None, True, False

    def check_restore(self, verb: str) -> None:
        """Refuse a state that others would not have; ranks of one job restore together."""

    # The handle.

    @torch.no_grad()
    def close(self) -> None:
        """Average what ranks have done since they met, and leave the mean on all of them; a
        collective.

        Raises:
            ExchangeError: another rank is gone, or still trains without ``stretch``.
        """
        # others wait for a word of a rank of another speed, though it has made no update
        if self.failed or self.warms_up or not (self.updates or self._config.stretch):
            return
        self.check_outside("close")
        self._take_outer()
        with self._written.kept(self._rounds.meetings):
            together = self._rounds.end()
        if together:
            self._rounds.leave_mean()
        else:
            self._rounds.leave_outer()

    def _note(self) -> None:
        """Remember the parameters as an update has left them, where a meeting is to end."""
        self._written.note(self._rounds.awaits)

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
        sent = sum(meeting.sent_bytes for meeting in self._rounds.meetings)
        rate = f"{sent / 2**20 / config.steps:.3g} MB an update"
        note = f"{len(self._rounds.meetings)} fragments, {rate} in place of gradients"
        note += f"; {self._why}{self._rounds.longer}" if self._why else ""
        return [Row("local", f"{self.meetings} meetings", note, "lossy")]
