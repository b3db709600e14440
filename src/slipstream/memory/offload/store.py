"""The interface of stores: where tensors are kept that are not needed for a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class Traffic:
    """Bytes copied so far, and how long training waited for copies."""

    bytes_out: int = 0
    bytes_back: int = 0
    seconds_waited: float = 0.0


class Store(Protocol):
    """Keeps the bytes of tensors and brings the same bits back.

    The life of a ticket: ``put`` starts the copy out, ``settle`` makes the memory of the source
    reusable, ``fetch`` starts the copy back, ``take`` returns the bytes, ``drop`` forgets the
    ticket. A ticket can be taken several times; each time it is fetched anew.
    """

    @property
    def traffic(self) -> Traffic:
        """Bytes copied so far, and seconds waited."""

    def put(self, raw: torch.Tensor, what: str) -> Any:
        """Start to copy ``raw`` (bytes, one axis) out; return a ticket. ``what`` is for errors."""

    def settle(self, ticket: Any) -> None:
        """From here on the memory of what was put may be overwritten."""

    def fetch(self, ticket: Any) -> None:
        """Start to copy the bytes back, unless they are in memory or on their way."""

    def take(self, ticket: Any) -> torch.Tensor:
        """The bytes, readable by the caller's stream."""

    def drop(self, ticket: Any) -> None:
        """Forget the ticket, in any state; any thread may call this, at any time, even the garbage
        collector in the middle of another method of the store."""

    @property
    def reserved_bytes(self) -> int:
        """Host memory or disk space that the store occupies."""

    def close(self) -> None:
        """Free everything; no ticket may be used any more."""
