"""Base of stores: they keep tensors that are not needed for a while."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.memory.offload.slots import Slots


@dataclass(slots=True)
class Traffic:
    """Bytes copied so far, and how long training waited for copies."""

    bytes_out: int = 0
    bytes_back: int = 0
    seconds_waited: float = 0.0


class TensorStore(ABC):
    """Keeps the bytes of tensors and brings the same bits back.

    The life of a ticket: ``put`` starts the copy out, ``settle`` makes the memory of the source
    reusable, ``fetch`` starts the copy back, ``take`` returns the bytes, ``drop`` forgets the
    ticket. A ticket can be taken several times; each time it is fetched anew.
    """

    def __init__(self, slab_bytes: int, budget_bytes: int | None, rank: int) -> None:
        self._slots = Slots(self._add_slab, slab_bytes, budget_bytes)
        self._rank = rank
        self._traffic = Traffic()
        self._dropped: deque[Any] = deque()

    @property
    def traffic(self) -> Traffic:
        """Bytes copied so far, and seconds waited."""
        return self._traffic

    @property
    def reserved_bytes(self) -> int:
        """Host memory or disk space that the store occupies."""
        return self._slots.reserved_bytes

    @abstractmethod
    def put(self, raw: torch.Tensor, what: str) -> Any:
        """Start to copy ``raw`` (bytes, one axis) out; return a ticket. ``what`` is for errors."""

    @abstractmethod
    def settle(self, ticket: Any) -> None:
        """Note that the memory of what was put may be overwritten from here on."""

    @abstractmethod
    def fetch(self, ticket: Any) -> None:
        """Start to copy the bytes back, unless they are in memory or on their way."""

    @abstractmethod
    def take(self, ticket: Any) -> torch.Tensor:
        """The bytes, readable by the caller's stream."""

    def drop(self, ticket: Any) -> None:
        """Forget the ticket, in any state; any thread may call this, at any time.

        Only takes note, as the garbage collector may call this inside of any other method.
        """
        self._dropped.append(ticket)

    @abstractmethod
    def close(self) -> None:
        """Free everything; no ticket may be used any more."""

    @abstractmethod
    def _add_slab(self, num_bytes: int) -> None:
        """Make so many more bytes available."""
