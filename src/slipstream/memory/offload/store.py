"""What a place for tensors that are not needed for a while must be able to do.

Never decides what goes there, nor when it comes back: the offloader does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class Traffic:
    """What has moved so far, and for how long the training waited for it."""

    bytes_out: int = 0
    bytes_back: int = 0
    seconds_waited: float = 0.0


class Store(Protocol):
    """Takes the bytes of tensors away and brings them back: the same bits.

    ``put`` begins to copy ``raw`` (bytes, one axis) out, ``settle`` makes its memory free to be
    used by what follows, ``fetch`` begins to bring a copy back, ``take`` hands it over. A ticket
    can be taken several times, each time it is fetched anew. ``drop`` forgets a ticket; it may be
    called in any state, by any thread, at any time, also by the garbage collector.
    """

    @property
    def traffic(self) -> Traffic:
        """What has moved so far."""

    def put(self, raw: torch.Tensor, what: str) -> Any:
        """Begin to copy out; ``what`` it is, for errors. Returns a ticket."""

    def settle(self, ticket: Any) -> None:
        """From here on the memory of what was put may be overwritten."""

    def fetch(self, ticket: Any) -> None:
        """Begin to bring it back, if it is away."""

    def take(self, ticket: Any) -> torch.Tensor:
        """The bytes, to be read by the caller's stream."""

    def drop(self, ticket: Any) -> None:
        """It is needed no more."""

    @property
    def reserved_bytes(self) -> int:
        """What the store takes up, of host memory or disk."""

    def close(self) -> None:
        """Give everything back; no ticket may be used any more."""
