"""Choices that a training may make while it runs, how long that takes, and which was fastest.

Pure: ``online_search`` measures, and carries the choice out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Literal, NamedTuple

from slipstream.strategy import (
    AutoConfig,
    DirectConfig,
    OptimalConfig,
    Row,
    ShardedConfig,
    SplitConfig,
    Strategy,
    TransportConfig,
)
from slipstream.transport.place import Place
from slipstream.transport.transport import exact_transports
from slipstream.tuner.turns import MOST, SETTLING, TURNS

SHARDED = (ShardedConfig(), ShardedConfig(replicated=0.33))
"""Tried where nothing predicts the part that every rank should update; the first one stands for
all where something does."""


class Choice(NamedTuple):
    """One way to exchange the gradients."""

    transport: TransportConfig
    split: SplitConfig
    overlap: bool = True


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The settings that a strategy leaves open on these ranks.

    Attributes:
        transports: to choose among, the one to begin with first; one where the strategy names it.
        split: ``split: optimal``, if the split is searched for.
        updates: that the search may take, if ``transport: auto`` says so.
        overlap: whether to exchange beside backward; both where that is to be found out.
        not_sharded: why ``sharded`` is not among them; None: it is, or is not searched for.
        replan: whether to search again where the speed of updates has changed for good.
    """

    transports: tuple[TransportConfig, ...]
    split: OptimalConfig | None = None
    updates: int | None = None
    overlap: tuple[bool, ...] = (True,)
    not_sharded: str | None = None
    replan: Literal[True, False, "may_shard"] = False

    @classmethod
    def of(cls, strategy: Strategy, place: Place, not_sharded: str | None) -> SearchSpace:
        """Find what ``strategy`` leaves open; where ranks share a model, their transport stays.

        Exchanging after backward is only tried where the cores that compute also exchange, all
        ranks being on one host, or where a prediction says whether it may pay. ``sharded`` is
        tried between hosts, unless ``not_sharded`` says why it cannot be.
        """
        config = strategy.gradients
        optimal = config.split if isinstance(config.split, OptimalConfig) else None
        if not isinstance(config.transport, AutoConfig):
            return cls((config.transport,), optimal, None, (config.overlap,))
        usable = exact_transports(place)
        if config.codec is not None and not config.codec.summed:  # they would code something else
            usable = tuple(one for one in usable if not one.between_hosts)
        usable = usable[:1] if strategy.parallel.active else usable
        after = len(usable) > 1 and config.overlap and (place.one_host or optimal is not None)
        overlap = (True, False) if after else (config.overlap,)
        if DirectConfig() in usable and config.overlap and not_sharded is None:
            usable += SHARDED if optimal is None else SHARDED[:1]
        timed = place.device.type == "cpu" and not strategy.parallel.active
        replan = config.transport.replan if timed else False
        return cls(usable, optimal, config.transport.updates, overlap, not_sharded, replan)

    def unpredicted(self, split: SplitConfig) -> tuple[Choice, ...]:
        """The choices under one split, all to be measured: each transport, then the last of them
        without overlap, if that is open."""
        choices = [Choice(transport, split, self.overlap[0]) for transport in self.transports]
        others = [Choice(self.transports[-1], split, overlap) for overlap in self.overlap[1:]]
        return (*choices, *others)

    @property
    def is_open(self) -> bool:
        """Whether there is anything to choose."""
        return self.split is not None or len(self.transports) > 1

    @property
    def first_window(self) -> int:
        """Updates that are measured before it is known how many choices there are."""
        return self.window(MOST if self.split else len(self.transports) + len(self.overlap) - 1, 0)

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
        """The only transport of ``auto``, if there is but one, and what it leaves out."""
        if self.updates is None:
            return []
        rows = []
        if len(self.transports) == 1:
            only = self.transports[0].kind
            rows.append(Row("auto", only, "no other exact transport to choose here"))
        elif DirectConfig() in self.transports and self.not_sharded is not None:
            rows.append(Row("auto", "not sharded", self.not_sharded))
        return rows


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
