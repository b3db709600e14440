"""Ranks of different speed: the faster ones go on training, within bounds, instead of waiting."""

from __future__ import annotations

import torch

from slipstream.local.exchanges import IslandExchanges
from slipstream.transport.channel import Label


class Pace:
    """When this rank is at a meeting to which others are still on their way.

    Args:
        stretch: updates that it makes meanwhile, at most.
        exchanges: of its island.
        device: of what is sent.

    Attributes:
        waited: updates since it was ready to meet; None: it is on its way itself.
        last_round: a rank has closed its session, so that there is no further meeting.
    """

    def __init__(self, stretch: int, exchanges: IslandExchanges, device: torch.device) -> None:
        self._stretch, self._exchanges, self._device = stretch, exchanges, device
        self.waited: int | None = None
        self.last_round = False
        self._closing = torch.zeros(2)

    def waits(self) -> bool:
        """Whether this rank goes on by itself, as others have not made as many updates yet."""
        carrier = self._exchanges.carrier
        if not self._stretch or carrier is None or self.last_round:
            return False
        if self.waited is None:
            self.waited = 0
            self._tell(closing=False)
        else:
            self.waited += 1
        if self.waited < self._stretch and not carrier.arrived:
            return True
        self.hear()
        return False

    def close(self) -> None:
        """Tell the others that this rank ends, and hear what they do."""
        if not self.last_round:
            self._tell(closing=True)
            self.hear()

    def _tell(self, *, closing: bool) -> None:
        """Tell all ranks that this one is ready to meet, or closes; they hear when all have."""
        self._closing = torch.tensor([float(closing), 1.0], device=self._device)
        self._exchanges.sum(
            Label("meeting_ready", lambda: "the wait for slower ranks"), self._closing
        )

    def hear(self) -> None:
        """Wait until all ranks are ready."""
        self._exchanges.land()
        self.waited = None
        if self._exchanges.joined_again:  # the others, who have not told it
            return
        closing, islands = self._closing.tolist()
        carrier = self._exchanges.carrier
        assert carrier is not None
        # islands that come and go do so without asking the others, but all at once
        self.last_round = closing == islands or (closing > 0 and carrier.fixed)
