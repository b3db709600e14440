"""Training in jobs that come and go: what one takes over when it joins, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakMethod

import torch

from slipstream.checks.digest import digest
from slipstream.codecs import Ranks
from slipstream.errors import UsageError
from slipstream.local.open_carrier import OpenCarrier
from slipstream.local.training import LocalTraining


class OpenTraining(LocalTraining):
    """The training of one job among those that meet at a rendezvous.

    Attributes:
        slot: the share of the data of this job.
    """

    slot = 0
    _begins = False  # with others, and has not trained yet
    _save: Callable[[], Callable[[], dict[str, Any]] | None]
    _restore: Callable[[], Callable[[Mapping[str, Any]], None] | None]

    @property
    def at_least(self) -> int:
        """Jobs that begin together."""
        assert self._config.rendezvous is not None
        return self._config.rendezvous.at_least

    def join(
        self, save: Callable[[], dict[str, Any]], restore: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Join the other jobs, and go on as they are.

        Args:
            save, restore: methods of a session, which may end before this.
        """
        self._save, self._restore = WeakMethod(save), WeakMethod(restore)
        carrier = self._rounds.exchanges.carrier
        assert isinstance(carrier, OpenCarrier)
        carrier.resident = self
        met = {t.name: t.parameter for t in self._trained}
        named = {**met, **dict(self._model.named_buffers())}
        shapes = [(name, str(value.dtype), tuple(value.shape)) for name, value in named.items()]
        own = self._config.model_copy(update={"rendezvous": None}).document(full=True)
        optimizer = type(self._optimizer).__name__
        found = own, self.at_least, shapes, optimizer  # shares of the data are at_least
        carrier.same("strategy local, model or optimizer", repr(found))
        carrier.join()
        self._begins = not self.updates
        with torch.no_grad():
            self._rounds.take_turn()

    def check(self) -> None:
        """Refuse a backward pass where it has no meaning, as `LocalTraining.check` does.

        Raises:
            ClusterError: another job of this start has loaded another model, or restored another
                state.
        """
        super().check()
        if self._begins:
            self._begins = False
            carrier = self._rounds.exchanges.carrier
            assert isinstance(carrier, OpenCarrier)
            own = self._position, [digest([meeting.outer]) for meeting in self._rounds.meetings]
            carrier.same("loaded model or restored state", repr(own))

    def check_restore(self, verb: str) -> None:
        """Refuse to restore what other jobs do not have.

        Raises:
            UsageError: they have trained already.
        """
        if self.updates:
            raise UsageError(
                f"{verb}() at update {self.updates} of jobs that come and go: this one has their "
                "state, and they would not have this; write: if session.updates == 0: "
                f"session.{verb}(...), and let all jobs of a start restore the same"
            )

    def save(self) -> dict[str, Any]:
        """Save this rank's session, for one that joins."""
        save = self._save()
        assert save is not None
        # nothing is on its way, and nothing may begin: what is due is sent in the next view
        joined, self._rounds.exchanges.joined_again = self._rounds.exchanges.joined_again, False
        state = save()
        self._rounds.exchanges.joined_again = joined
        return state

    def settle(self, state: Mapping[str, Any], *, again: bool) -> None:
        """Go on from the state of another island; ``again``: what this rank has done since the last
        meeting stays a part of its next change."""
        self._rounds.exchanges.joined_again = True
        if not again:
            restore = self._restore()
            assert restore is not None
            restore(state)
            return
        lags = []
        for meeting in self._rounds.meetings:
            flight, base = meeting.flight, meeting.outer.to(meeting.device)
            if flight is not None and flight.done:  # the others have merged it
                base = flight.sent
            lags.append(base - meeting.read())
        weights, fresh = self._rounds.weights, self._fresh
        self.load(state["session"]["local"], self.updates)
        self._rounds.weights, self._fresh = weights, self._fresh and fresh
        self._resumes = False
        for meeting, lag in zip(self._rounds.meetings, lags, strict=True):
            meeting.write(meeting.outer.to(meeting.device) - lag)

    def drop(self) -> None:
        """Take back a change that the others have gone on without: it is a part of the next."""
        self._rounds.exchanges.joined_again = True
        for number, meeting in enumerate(self._rounds.meetings):
            if meeting.flight is not None and not meeting.flight.done:
                self._rounds.weights[number] += int(meeting.flight.weights[0])
                meeting.flight = None

    def meet_as(self, islands: Ranks, slot: int) -> None:
        """Be one of so many islands from now on."""
        self.slot = slot
        self._rounds.exchanges.island = replace(self.island, islands=islands)
        for meeting in self._rounds.meetings:
            meeting.meet_as(self.island)
