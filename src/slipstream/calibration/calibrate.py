"""Measure what exchanges cost on live ranks, and what they and computing cost each other.

Never leaves a process group behind, and never lets one rank measure what another does not: what is
measured next follows from times that all ranks agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.calibration.codec_cost import slowest_cost
from slipstream.calibration.contention import contention
from slipstream.cluster import connect
from slipstream.cluster.topology import ranks_by_host
from slipstream.errors import ClusterError
from slipstream.planner.cost import CodecCost, Collective, Curve, Kind, Network, NetworkProfile
from slipstream.strategy import PlainCodec
from slipstream.transport.consistency import collective_errors
from slipstream.version import __version__

Progress = Callable[[float, str], None]

SIZES = tuple(sorted({2**k for k in range(10, 27)} | {3 * 2**k for k in range(9, 25)}))
"""1 KB to 64 MB, two sizes in each doubling."""

# torch below 2.13 knows these two by their older names only.
_NEW = hasattr(dist, "reduce_scatter_single")
_reduce_scatter = dist.reduce_scatter_single if _NEW else dist.reduce_scatter_tensor
_all_gather = dist.all_gather_single if _NEW else dist.all_gather_into_tensor

Start = Callable[[Tensor, Tensor, dist.ProcessGroup], object]
COLLECTIVES: Mapping[Collective, Start] = {
    "all_reduce": lambda whole, _, group: dist.all_reduce(whole, group=group),
    "reduce_scatter": lambda whole, part, group: _reduce_scatter(part, whole, group=group),
    "all_gather": lambda whole, part, group: _all_gather(whole, part, group=group),
}

SECONDS = 20.0
ELEMENT = 4
"""Bytes of the elements that travel: float32."""
WARM_UP = 5
"""Exchanges before the first that counts."""
BLOCK = 0.01
"""Seconds that are timed at once, if one exchange takes less ..."""
MOST_AT_ONCE = 64
"""... and these exchanges do not suffice for it."""
ENOUGH = 0.25
"""Seconds after which three rounds will do."""
SHORT = 0.1
"""Seconds of an exchange for which warming up means something."""
LONG = 1.0
"""Seconds of an exchange that is measured once."""


def calibrate(
    ranks: connect.Cluster,
    *,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
    rounds: int = 9,
    codecs: Sequence[PlainCodec] = (),
    progress: Progress | None = None,
) -> NetworkProfile:
    """Measure the ranks' networks; every rank calls this and gets the same.

    All-reduce, reduce-scatter and all-gather, of the world, of the ranks of each host and of the
    ranks that share a place on their hosts (where these differ: several hosts of several ranks
    each). A point is the median over rounds of the slowest rank's time, behind a barrier.

    Args:
        ranks: as `connect` gives them, 2 or more.
        sizes: bytes of the tensors, rounded up to whole elements on every rank.
        seconds: about the longest that the exchanges may take together; large sizes are left out
            where the time does not suffice for them. Contention takes some 5 more.
        rounds: the most times that a size is measured.
        codecs: whose cost is measured, too, on all ranks at once: some seconds more.
        progress: called with the share that is done, from 0 to 1, and what is being done.

    Raises:
        ClusterError: one rank alone, or fewer than two sizes.
        ExchangeError: another rank is gone.
    """
    if ranks.world is None or ranks.world_size < 2:
        raise ClusterError(
            f"{ranks.world_size} rank has no network to measure; start 2 or more, e.g. "
            "slipstream doctor network --ranks 2"
        )
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise ClusterError(f"sizes {list(sizes)}: must be two or more different numbers of bytes")
    with collective_errors("the measurement of the network"), _groups(ranks) as groups:
        report = progress or (lambda share, what: None)
        networks = _Bench(ranks, sizes, seconds, rounds).networks(groups, report)
        report(1.0, "compute beside an exchange")
        slowdowns = contention(
            ranks.world, ranks.device, networks["world"].all_reduce, min(seconds / 40, 0.3)
        )
        if codecs:
            report(1.0, "codecs")
        costs: dict[str, CodecCost] = {
            codec.kind: slowest_cost(codec, ranks.world, ranks.device) for codec in codecs
        }
        by_host = ranks_by_host(ranks.hosts)
        found = [
            NetworkProfile(
                world_size=ranks.world_size,
                hosts=len(by_host),
                ranks_per_host=max(map(len, by_host.values())),
                networks=networks,
                compute_slowdown=slowdowns.compute,
                exchange_slowdown=slowdowns.exchange,
                latency_slowdown=slowdowns.latency,
                queue_share=slowdowns.queue_share,
                queue_seconds=slowdowns.queue_seconds,
                codecs=costs,
                backend=str(dist.get_backend(ranks.world)),
                date=datetime.now().isoformat(" ", "minutes"),
                versions={"slipstream": __version__, "torch": torch.__version__},
            )
        ]
        dist.broadcast_object_list(found, group=ranks.world, group_src=0)
        return found[0]


@contextmanager
def _groups(ranks: connect.Cluster) -> Iterator[dict[Kind, dist.ProcessGroup]]:
    """This rank's group of each kind, the world last."""
    assert ranks.world is not None
    hosts = list(ranks_by_host(ranks.hosts).values())
    made: dict[Kind, dist.ProcessGroup] = {}
    divisions: dict[Kind, Sequence[Sequence[int]]] = {}
    if len({len(members) for members in hosts}) == 1 and 1 < len(hosts) < ranks.world_size:
        divisions = {"intra": hosts, "inter": list(zip(*hosts, strict=True))}
    try:
        for kind, division in divisions.items():
            for members in division:
                group = dist.new_group(list(members))
                if ranks.rank in members:
                    made[kind] = group
        yield made | {"world": ranks.world}
    finally:
        for group in made.values():
            dist.destroy_process_group(group)


@dataclass
class _Trial:
    """The measurement of one size: seconds of the first exchange, and of those in each block."""

    call: Callable[[], object]
    elements: int
    once: float
    blocks: list[float]

    @property
    def num_bytes(self) -> int:
        return self.elements * ELEMENT

    @property
    def repeat(self) -> int:
        """Exchanges that are timed at once."""
        return min(max(round(BLOCK / self.once), 1), MOST_AT_ONCE)

    @property
    def wanted(self) -> int:
        """Blocks that are worth their time."""
        return 0 if self.once > LONG else max(round(ENOUGH / self.once / self.repeat), 2)

    @property
    def seconds(self) -> float:
        """The median; the first exchange counts where warming up means little, or it is all."""
        first = [self.once] if self.once > SHORT or not self.blocks else []
        return median(self.blocks + first)


class _Bench:
    """Times collectives on all ranks at once, within a budget of seconds."""

    def __init__(
        self, ranks: connect.Cluster, sizes: Sequence[int], seconds: float, rounds: int
    ) -> None:
        assert ranks.world is not None
        self._world, self._device = ranks.world, ranks.device
        self._sizes, self._left, self._rounds = sorted(set(sizes)), seconds, rounds
        elements = self._sizes[-1] // ELEMENT + ranks.world_size
        # Written once, so that no exchange is the first to touch a page of memory.
        self._whole = torch.empty(elements, device=self._device).zero_()
        self._part = torch.empty(elements // 2 + 1, device=self._device).zero_()

    def networks(
        self, groups: Mapping[Kind, dist.ProcessGroup], progress: Progress
    ) -> dict[Kind, Network]:
        """A network for each kind of groups."""
        curves: dict[Kind, dict[Collective, Curve]] = {kind: {} for kind in groups}
        todo = [(kind, name) for kind in groups for name in COLLECTIVES]
        for index, (kind, name) in enumerate(todo):
            seconds = max(self._left / (len(todo) - index), 1e-3)
            left, points = seconds, []
            for trials, left in self._passes(COLLECTIVES[name], groups[kind], seconds):
                share = min(1 - left / seconds, 1.0)
                progress((index + share) / len(todo), f"{kind} {name}")
                points = [(trial.num_bytes, round(trial.seconds, 9)) for trial in trials]
            curves[kind][name] = Curve.fit(points)
            self._left -= seconds - left
        return {
            kind: Network(kind=kind, ranks=group.size(), **curves[kind])
            for kind, group in groups.items()
        }

    def _passes(
        self, start: Start, group: dist.ProcessGroup, left: float
    ) -> Iterator[tuple[list[_Trial], float]]:
        """What is known after each size, then after each round, and the seconds that are left.

        First each size up to the first that would take longer than is left, then all in turn: what
        disturbs the machine for a while disturbs them alike.
        """
        trials: list[_Trial] = []
        for count in sorted({-(-size // ELEMENT // group.size()) for size in self._sizes}):
            elements = count * group.size()
            call = partial(start, self._whole[:elements], self._part[:count], group)
            if len(trials) >= 2 and trials[-1].once * elements / trials[-1].elements > left:
                break
            if not trials:
                self._block(call, WARM_UP)
            (once,) = self._slowest([self._block(call, 1)])
            if once < BLOCK:
                once = min(once, *self._slowest([self._block(call, 1) for _ in range(3)]))
            trials.append(_Trial(call, elements, once, []))
            left -= once
            yield trials, left
        for index in range(self._rounds):
            todo = [trial for trial in trials if index < trial.wanted]
            while todo and sum(trial.once * trial.repeat for trial in todo) > left:
                todo.pop()
            blocks = self._slowest([self._block(trial.call, trial.repeat) for trial in todo])
            for trial, block in zip(todo, blocks, strict=True):
                trial.blocks.append(block)
                left -= block * trial.repeat
            yield trials, left

    def _block(self, call: Callable[[], object], repeat: int) -> float:
        """Seconds of one of ``repeat`` calls in a row, behind a barrier."""
        self._slowest([0.0])
        start = perf_counter()
        for _ in range(repeat):
            call()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (perf_counter() - start) / repeat

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        """The largest of all ranks, each."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self._world)
        return [float(t) for t in times.tolist()]
