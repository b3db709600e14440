"""What a training may choose while it runs, how long that takes, and which choice was fastest.

Pure: ``online_search`` measures, and carries the choice out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import NamedTuple

from slipstream.cluster.connect import Cluster
from slipstream.strategy import Auto, Optimal, Row, Split, Strategy, Transport
from slipstream.transport.transport import exact_transports

SETTLING = 2
"""Updates after a change that are not measured: new buckets, cold connections."""
TURNS = 2
"""Windows of each choice, in turn, so that a drift of the machine affects all alike."""
MOST = 4
"""Choices that are measured, where splits are among them."""


class Choice(NamedTuple):
    """One way to exchange the gradients."""

    transport: Transport
    split: Split


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What a strategy leaves open on these ranks.

    Attributes:
        transports: to choose among, the one to begin with first; one where the strategy names it.
        split: ``split: optimal``, if the split is searched for.
        updates: that the search may take, if ``transport: auto`` says so.
    """

    transports: tuple[Transport, ...]
    split: Optimal | None = None
    updates: int | None = None

    @classmethod
    def of(cls, strategy: Strategy, ranks: Cluster) -> SearchSpace:
        """What ``strategy`` leaves open; where ranks share a model, their transport stays."""
        split, transport = strategy.gradients.split, strategy.gradients.transport
        optimal = split if isinstance(split, Optimal) else None
        if not isinstance(transport, Auto):
            return cls((transport,), optimal)
        usable = exact_transports(ranks)
        usable = usable[:1] if strategy.parallel.active else usable
        return cls(usable, optimal, transport.updates)

    @property
    def is_open(self) -> bool:
        """Whether there is anything to choose."""
        return self.split is not None or len(self.transports) > 1

    @property
    def first_window(self) -> int:
        """Updates that are measured before it is known how many choices there are."""
        return self.window(MOST if self.split else len(self.transports), 0)

    def window(self, choices: int, windows_done: int, updates_done: int = 0) -> int:
        """Updates that are measured in each of the windows to come.

        Example:
            >>> SearchSpace((), updates=60).window(choices=2, windows_done=0)
            13
        """
        steps = [] if self.split is None else [self.split.steps]
        if self.updates is not None:
            windows = TURNS * choices - windows_done
            steps.append(max((self.updates - updates_done) // max(windows, 1) - SETTLING, 1))
        return min(steps)

    def report_rows(self) -> list[Row]:
        """What ``transport: auto`` is where only one transport can be used."""
        if self.updates is None or len(self.transports) > 1:
            return []
        return [Row("auto", self.transports[0].kind, "no other exact transport to choose here")]


def fastest(seconds: Sequence[Sequence[Sequence[float]]]) -> int:
    """The choice to keep: the first, unless others were faster than it in every turn.

    Args:
        seconds: of each choice, in each turn, of each iteration.

    Example:
        >>> fastest([[[2.0], [4.0]], [[1.0], [3.0]]]), fastest([[[2.0], [2.0]], [[1.0], [3.0]]])
        (1, 0)
    """
    default, *others = ([median(turn) for turn in choice] for choice in seconds)
    faster = [
        number
        for number, turns in enumerate(others, start=1)
        if all(mine < its for mine, its in zip(turns, default, strict=True))
    ]
    return min(faster, key=lambda number: median(chain(*seconds[number])), default=0)
