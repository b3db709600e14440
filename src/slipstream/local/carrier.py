"""Carriers: what brings changes from island to island. One is in use by each session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from slipstream.transport.channel import Channel, Label
from slipstream.transport.requests import ExchangeSteps

Exchange = Callable[[], ExchangeSteps]
"""Begins an exchange; again from the start, if ranks that took part are gone."""


class Carrier(Protocol):
    """Carries out exchanges, one at a time, in the same order on all islands."""

    def start(self, label: Label, exchange: Exchange) -> None:
        """Begin an exchange beside the training."""

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> None:
        """Return when what was started is done.

        Raises:
            ExchangeError: another rank is gone.
        """

    @property
    def fixed(self) -> bool:
        """Whether the same islands meet to the end."""

    @property
    def newcomers(self) -> bool:
        """Whether islands wait to be admitted, as all know alike."""

    def admit(self) -> None:
        """Admit them; on all islands, where nothing is on its way."""

    def close(self) -> bool:
        """Whether all islands close together; what follows is exchanged for the last time."""


class FixedCarrier:
    """Carries changes between islands that stay to the end; by a channel, whose owner closes it."""

    fixed, newcomers = True, False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def start(self, label: Label, exchange: Exchange) -> None:
        self._channel.start(label, exchange())

    @property
    def arrived(self) -> bool:
        return self._channel.arrived

    def wait(self) -> None:
        if self._channel.in_flight:
            self._channel.wait()

    def admit(self) -> None:
        pass

    def close(self) -> bool:
        return True
