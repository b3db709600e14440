"""Speed of each technique on more and more ranks, and where another one takes over.

A training is placed on each number of ranks: a workload and a network, from a trace or from a
shape. The simulator of an iteration says what an update takes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.planner.iteration.model import seconds_of
from slipstream.planner.iteration.transport_cost import (
    ALTERNATIVES,
    is_priced,
    transport_kind,
)
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.scale_out.shape import FabricConfig
from slipstream.planner.scale_out.stragglers import slowest
from slipstream.planner.search import candidates
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import MARGIN, exactness
from slipstream.strategy import (
    ByBytesConfig,
    FlatConfig,
    LocalConfig,
    ShardedConfig,
    SingleConfig,
    Strategy,
    takes_momentum,
)

STEPS = (16, 64, 128)
"""Updates from meeting to meeting of ``local``."""


class Placement(NamedTuple):
    """A training on a number of ranks: its computing, and the network of its exchanges."""

    workload: Workload
    network: NetworkProfile


Placing = Callable[[int], Placement]
"""From a number of ranks to the place."""


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """The prediction of a technique for a number of ranks.

    Attributes:
        ranks: of the whole training.
        technique: its name.
        strategy: the fastest of the technique's variants there.
        seconds: of an update.
        speed_up: samples a second, in times of those of the base on the fewest ranks.
        rank_hours: of 1,000 updates.
        exactness: beside that of the base.
    """

    ranks: int
    technique: str
    strategy: Strategy
    seconds: float
    speed_up: float
    rank_hours: float
    exactness: str


class Takeover(NamedTuple):
    """The number of ranks from which on ``technique`` is ``times`` as fast as the one before."""

    ranks: int
    technique: str
    times: float


@dataclass(frozen=True, slots=True)
class Growth:
    """Techniques on several numbers of ranks.

    Attributes:
        base: the technique that others are compared with.
        points: of all techniques that each number of ranks allows.
        notes: how the network on most ranks was extrapolated, and what is doubtful in it.
    """

    base: str
    points: tuple[GrowthPoint, ...]
    notes: tuple[str, ...] = ()

    @property
    def numbers(self) -> list[int]:
        """The numbers of ranks, ascending."""
        return sorted({point.ranks for point in self.points})

    @property
    def techniques(self) -> list[str]:
        """Names, the base first."""
        return list(dict.fromkeys(point.technique for point in self.points))

    def at(self, ranks: int) -> dict[str, GrowthPoint]:
        """Look up the points of a number of ranks, by technique."""
        return {point.technique: point for point in self.points if point.ranks == ranks}

    def chosen(self) -> list[GrowthPoint]:
        """Choose a technique for each number of ranks, ascending.

        The one before stays until another is faster by `MARGIN`, what a prediction may be off;
        then the first one follows that is as fast, which keeps the most of the mathematics.
        """
        kept, found = self.base, []
        for ranks in self.numbers:
            here = self.at(ranks)
            enough = min(point.seconds for point in here.values()) * (1 + MARGIN)
            if kept not in here or here[kept].seconds > enough:
                kept = next(point.technique for point in here.values() if point.seconds <= enough)
            found.append(here[kept])
        return found

    def takeovers(self) -> list[Takeover]:
        """List where another technique is chosen than on fewer ranks, or than the base."""
        before, found = self.base, []
        for point in self.chosen():
            if point.technique != before:
                other = self.at(point.ranks).get(before, point)
                times = other.seconds / point.seconds
                found.append(Takeover(point.ranks, point.technique, times))
                before = point.technique
        return found


def grow(
    place: Placing,
    numbers: Sequence[int],
    base: Strategy,
    fabric: FabricConfig,
    *,
    lossy: bool = False,
) -> Growth:
    """Predict all techniques on all numbers of ranks.

    Args:
        place: the training.
        numbers: of ranks.
        base: the strategy that others are compared with; their other settings are its.
        fabric: how unequal ranks are.
        lossy: also codecs whose cost is known, and ranks that meet rarely.

    Raises:
        ClusterError, StrategyError: the training cannot be placed on a number of ranks.
    """
    points: list[GrowthPoint] = []
    unit = 0.0
    for ranks in sorted(numbers):
        here = place(ranks)
        network = here.network
        for name, variants in techniques(base, here, lossy=lossy).items():
            work = here.workload.slowed(slowest(ranks, fabric, _apart(variants[0])))
            timed = [(seconds_of(one, work, network), one) for one in variants]
            seconds, best = min(timed, key=lambda pair: pair[0])
            samples = float(work.samples.sum() or work.num_ranks)
            speed = samples * best.gradients.accumulate / seconds
            unit = unit or speed
            hours = ranks * seconds * 1000 / 3600
            exact = exactness(best, base)
            points.append(GrowthPoint(ranks, name, best, seconds, speed / unit, hours, exact))
    others = {point.technique for point in points if point.strategy != base}
    kept = (point for point in points if point.technique in {label(base), *others})
    return Growth(label(base), tuple(kept))


def techniques(
    base: Strategy, place: Placement, *, lossy: bool = False
) -> Mapping[str, list[Strategy]]:
    """List what a place allows: variants by name, the base first.

    A variant differs in its split alone: that of the base, 25 MB, and one for all gradients.

    Args:
        base: the strategy whose other settings stay.
        place: workload and network.
        lossy: also codecs whose cost is known, and ranks that meet rarely.
    """
    work, network = place
    transports = [one for one in ALTERNATIVES if is_priced(one, network)]
    if network.backend == "nccl":  # GPUs refuse sums inside hosts, and send by the backend
        transports = [one for one in transports if isinstance(one, FlatConfig)]
    found = {label(base): [base]}
    for transport in transports:
        own = transport.kind == transport_kind(base.gradients.transport)
        name = f"{transport.kind}, other split" if own else transport.kind
        found[name] = _splits(base.with_gradients(transport=transport))
    momentum = takes_momentum(base.gradients.codec)
    if work.shardable and not momentum and is_priced(ShardedConfig(), network):
        found["sharded"] = _splits(base.with_gradients(transport=ShardedConfig()))
    if not lossy:
        return found
    for one in candidates.coded(base, work, network):
        if one != base and one.gradients.codec is not None:
            found.setdefault(one.gradients.codec.kind, _splits(one))
    plain = base.with_gradients(transport=FlatConfig(), split=ByBytesConfig(), codec=None)
    for steps in STEPS:
        found[f"local, {steps} steps"] = [
            plain.model_copy(update={"local": LocalConfig(steps=steps)})
        ]
    return found


def _splits(strategy: Strategy) -> list[Strategy]:
    splits = (strategy.gradients.split, ByBytesConfig(megabytes=25), SingleConfig())
    return [strategy.with_gradients(split=split) for split in dict.fromkeys(splits)]


def _apart(strategy: Strategy) -> int:
    """Updates from one meeting of ranks to the next."""
    return strategy.local.steps if strategy.local else 1
