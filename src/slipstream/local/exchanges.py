"""Exchanges of an island with the others: one at a time, beside the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from slipstream.errors import ClusterError, ExchangeError, SlipstreamError
from slipstream.local.carrier import Carrier, Exchange
from slipstream.local.island import Island
from slipstream.trace.event import MEETING_WAIT
from slipstream.trace.recorder import Recorder
from slipstream.transport.channel import Label
from slipstream.transport.requests import AllReduce, ExchangeSteps


class JoinedAgain(Exception):
    """The other islands have gone on without this one, which has joined them again since."""


class IslandExchanges:
    """The exchanges of this island with others, in order.

    Args:
        carrier: brings it there; None: this rank meets no other island.
        island: of this rank; `IslandExchanges.island` may be replaced later.
        device: of what is sent.
        landed: called where an exchange has landed, on each rank of the island.
        recorder: gets a span for each exchange, and for each wait.
        at: names this rank in an error.

    Attributes:
        failure: what broke an exchange off, so that ranks are out of step; None: nothing.
        joined_again: this island has taken over the state of the others, since it was looked at.
    """

    def __init__(
        self,
        carrier: Carrier | None,
        island: Island,
        device: torch.device,
        landed: Callable[[], None],
        recorder: Recorder | None,
        at: str,
    ) -> None:
        self.carrier, self.island, self._device = carrier, island, device
        self._landed, self._recorder, self._at = landed, recorder, at
        self.failure: str | None = None
        self.joined_again = False
        self._in_flight = False

    def begin(self, label: Label, exchange: Exchange) -> None:
        """Begin an exchange; `land` ends it."""
        self._in_flight = True
        recorded = partial(self._recorded, label, exchange)
        with self._unbroken(label.describe):
            if self.carrier is not None:
                self.carrier.start(label, recorded)
            elif self.island.leads:  # and is the only one
                for _ in recorded():
                    pass

    def admit(self) -> None:
        """Admit islands that wait for it; nothing is on its way."""
        if self.carrier is not None and self.carrier.newcomers:
            with self._unbroken(lambda: "the admission of others"):
                self.carrier.admit()

    @contextmanager
    def _unbroken(self, describe: Callable[[], str]) -> Iterator[None]:
        """Note what was broken off, by Ctrl-C, too: nobody knows how far it has come."""
        try:
            yield
        except BaseException as error:
            self.failure = f"{self._at}: {describe()} was broken off: {error!r}"
            raise

    def land(self) -> None:
        """Return when nothing is on its way, in this island either.

        Raises:
            ExchangeError: another rank is gone, or was before.
        """
        if self.failure is not None:
            raise ExchangeError(
                f"{self.failure}; this session saves and restores no more, as it may have half of "
                "an exchange: go on from a checkpoint of before, in a new one "
                '(session.checkpoint("model") still has the outer parameters)'
            )
        if not self._in_flight:
            return
        try:
            with self._recorded_wait():
                if self.carrier is not None:
                    self.carrier.wait()
                self._landed()
        except (ExchangeError, ClusterError) as error:
            # among islands that come and go the error itself says what is wrong
            fixed = self.carrier is None or self.carrier.fixed
            what, cause = str(error), error.__cause__
            lost = fixed and isinstance(cause, RuntimeError) and what.endswith(f": {cause}")
            if lost and not isinstance(cause, SlipstreamError):
                what = (
                    f"{what.removesuffix(f': {cause}')} failed. Most often another rank has ended, "
                    f"failed or left its loop: look at the first error of all ranks: {cause}"
                )
            else:
                cause, gone = error, "; another rank is gone, or has left the loop"
                what += gone * fixed
            self.failure = f"{self._at}: {what}"
            raise ExchangeError(self.failure) from cause  # of torch, which heartbeats explain
        except BaseException:  # Ctrl-C, where this island joined again and landed meanwhile
            self._in_flight = True
            raise
        self._in_flight = False

    def sum(self, label: Label, values: torch.Tensor) -> None:
        """Begin to add up ``values`` over islands, in place."""
        self.begin(label, partial(_sum_of, values, values.clone()))

    def average(self, label: Label, values: torch.Tensor, *, counts: bool = True) -> bool:
        """Average what islands have apart from each other, by their ranks, but for those of which
        it does not count; whether there is one. Nothing else is on its way.

        Raises:
            JoinedAgain: the others have gone on without this island.
        """
        size = len(self.island.ranks) if counts else 0
        own = values * size if counts else torch.zeros_like(values)
        weighted = torch.cat([own, values.new_full((1,), size)])
        joined, self.joined_again = self.joined_again, False
        self.sum(label, weighted)
        self.land()
        if self.joined_again:
            raise JoinedAgain
        self.joined_again = joined
        self.island.hand_on(weighted)
        if not weighted[-1]:
            return False
        torch.div(weighted[:-1], weighted[-1], out=values)
        return True

    # Spans of a trace.

    def _recorded(self, label: Label, exchange: Exchange) -> ExchangeSteps:
        """An exchange, as the thread that carries it out sees it."""
        recorder = self._recorder
        if recorder is None:
            yield from exchange()
            return
        start = recorder.stamp(self._device)
        yield from exchange()
        recorder.add(label.span, start, recorder.stamp(self._device), **label.args)

    @contextmanager
    def _recorded_wait(self) -> Iterator[None]:
        recorder = self._recorder
        if recorder is None or not recorder.active:
            yield
            return
        start = recorder.stamp(self._device)
        yield
        recorder.add(MEETING_WAIT, start, recorder.stamp(self._device))


def _sum_of(values: torch.Tensor, own: torch.Tensor) -> ExchangeSteps:
    """Leave the sum over islands of their ``own`` in ``values``; may begin anew."""
    values.copy_(own)
    yield AllReduce(values)
