"""Views: the islands that meet, of those that come and go; see the note in ``rendezvous``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.errors import ClusterError
from slipstream.files.document import Unreadable, decoded, parse_json


@dataclass(frozen=True)
class View:
    """Islands that meet, in order.

    Attributes:
        number: of the view, from 1.
        islands: numbers of those that joined, each in the order of joining.
        slots: of these islands: the share of the data that each trains on.
        fresh: islands that have no state yet, which the first one gives them.
        asked: how many islands have asked to join so far.
    """

    number: int
    islands: tuple[int, ...]
    slots: tuple[int, ...]
    fresh: tuple[int, ...]
    asked: int

    @classmethod
    def first(cls, asked: int, gone: Sequence[int] = ()) -> View:
        """The view of those that begin together; the first one has the state."""
        islands = tuple(island for island in range(1, asked + 1) if island not in gone)
        return cls(1, islands, tuple(range(len(islands))), islands[1:], asked)

    def led_by(self, island: int) -> View:
        """The same view, in which ``island`` comes first, and has the state.

        Example:
            >>> View(4, (5, 6), (0, 1), (5, 6), 6).led_by(6)
            View(number=4, islands=(6, 5), slots=(1, 0), fresh=(5,), asked=6)
        """
        pairs = [*zip(self.islands, self.slots, strict=True)]
        pairs.sort(key=lambda pair: pair[0] != island)
        islands, slots = zip(*pairs, strict=True)
        return replace(self, islands=islands, slots=slots, fresh=islands[1:])

    @classmethod
    def read(cls, document: bytes) -> View:
        """A view from the store."""
        try:
            values: dict[str, Any] = parse_json(decoded(document))
            read: dict[str, Any] = {
                name: tuple(map(int, value)) if isinstance(value, list) else int(value)
                for name, value in values.items()
            }
            return cls(**read)
        except (AttributeError, TypeError, ValueError, Unreadable) as error:
            raise ClusterError(f"the store has a view that is none: {error!s:.80}") from None

    def without(self, gone: Sequence[int]) -> View:
        """The next view, after some have left.

        Example:
            >>> View.first(3).without([2])
            View(number=2, islands=(1, 3), slots=(0, 2), fresh=(3,), asked=3)
        """
        left = [(i, s) for i, s in zip(self.islands, self.slots, strict=True) if i not in gone]
        return replace(
            self,
            number=self.number + 1,
            islands=tuple(island for island, _ in left),
            slots=tuple(slot for _, slot in left),
            fresh=tuple(island for island in self.fresh if island not in gone),
        )

    def admitting(self, asked: int) -> View:
        """The next view, with all that have asked to join; each takes a slot that is free.

        Example:
            >>> View.first(2).without([1]).admitting(3)
            View(number=3, islands=(2, 3), slots=(1, 0), fresh=(2, 3), asked=3)
        """
        new, slots = tuple(range(self.asked + 1, asked + 1)), [*self.slots]
        for _ in new:
            slots.append(next(slot for slot in range(len(slots) + 1) if slot not in slots))
        return View(self.number + 1, self.islands + new, tuple(slots), self.fresh + new, asked)
