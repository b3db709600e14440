"""Measure the network of live ranks: what exchanges cost, and how they and computing contend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from slipstream.calibration.codec_cost import slowest_cost
from slipstream.calibration.collective_timer import COLLECTIVES, CollectiveTimer
from slipstream.calibration.contention import crowd_slowdown, measure_contention
from slipstream.calibration.half_speed import half_speed
from slipstream.calibration.merge_cost import merge_cost
from slipstream.cluster.connect import Cluster
from slipstream.cluster.groups import new_group
from slipstream.cluster.topology import ranks_by_host
from slipstream.planner.network.profile import (
    CollectiveName,
    Curves,
    GroupKind,
    Network,
    NetworkProfile,
)
from slipstream.strategy import DirectConfig, FlatConfig, PlainCodecConfig
from slipstream.transport.consistency import broadcast_from_first, collective_errors
from slipstream.transport.transport import make_transport
from slipstream.version import __version__

Progress = Callable[[float, str], None]

SIZES = tuple(sorted({2**k for k in range(10, 27)} | {3 * 2**k for k in range(9, 25)}))
"""1 KB to 64 MB, two sizes in each doubling."""
SHORT = 3.0
"""Where the exchanges that are timed get fewer seconds than these, codecs and the speed of 16 bits
get as much less than their usual time."""
CROWD_TIMES = 8
"""How many times as long many exchanges together take as those that contention is measured by:
their last messages must not be most of what is timed."""


def calibrate(
    ranks: Cluster,
    *,
    sizes: Sequence[int] = SIZES,
    seconds: float = 20.0,
    rounds: int = 9,
    curves: Curves | None = None,
    codecs: Sequence[PlainCodecConfig] = (),
    half: bool = False,
    merging: bool = False,
    progress: Progress | None = None,
) -> NetworkProfile:
    """Measure the ranks' networks. A collective: every rank calls this and gets the same profile.

    The collectives of the transports (``COLLECTIVES``) are timed in the world and, on several hosts
    with the same number of ranks, 2 or more, also inside the hosts and between them. A point is the
    median over rounds of the slowest rank's time, behind a barrier. Contention is measured in the
    world, with the backend's all-reduce and, where its curve is measured, with that of ``direct``.

    Args:
        ranks: 2 or more, as `connect` gives them.
        sizes: bytes of the tensors, rounded up to whole elements on every rank.
        seconds: about the longest that the timed exchanges may take together; large sizes are left
            out where the time does not suffice. Contention takes some 5 more, and some 12 more
            for direct sends; it and all below take less where this is less than SHORT.
        rounds: the most times that a size is measured.
        curves: measure only these, for a choice that reads no others; the world and all-reduces are
            always measured. None: all.
        codecs: measure the cost of these codecs, too; takes some seconds more.
        half: measure how much faster 16-bit weights compute, too; takes about two seconds more.
        merging: measure what ``local`` computes beside its exchanges, too; takes less than one.
        progress: called with the share that is done, from 0 to 1, and what is being done.

    Raises:
        ClusterError: fewer than two ranks or two sizes.
        ExchangeError: another rank is gone.
    """
    timer = CollectiveTimer(ranks, sizes, rounds)
    report = progress or (lambda share, what: None)
    with (
        collective_errors("the measurement of the network"),
        _groups(ranks, None if curves is None else curves.keys()) as groups,
    ):
        names = {kind: _names(kind, curves, ranks.device) for kind in groups}
        networks = _networks(timer, groups, names, seconds, report)
        report(1.0, "compute beside an exchange")
        part = min(0.075 * seconds / len(names["world"]), 0.3)
        costs = _contention(ranks, timer.world, networks["world"], part)
        if codecs:
            report(1.0, "codecs")
        where, share = (timer.world, ranks.device), min(seconds / SHORT, 1.0)
        by_codec = {codec.kind: slowest_cost(codec, *where, share) for codec in codecs}
        costs["merging"] = merge_cost(*where, share) if merging else 0.0
        costs["half_speed"] = half_speed(*where, share) if half else None
        profile = _profile(ranks, timer.world, networks=networks, codecs=by_codec, **costs)
        return broadcast_from_first(profile, timer.world)


def _profile(ranks: Cluster, world: dist.ProcessGroup, **costs: Any) -> NetworkProfile:
    by_host = ranks_by_host(ranks.hosts)
    return NetworkProfile(
        world_size=ranks.world_size,
        hosts=len(by_host),
        ranks_per_host=max(map(len, by_host.values())),
        backend=str(dist.get_backend(world)),
        date=datetime.now().isoformat(" ", "minutes"),
        versions={"slipstream": __version__, "torch": torch.__version__},
        **costs,
    )


def _contention(
    ranks: Cluster, world: dist.ProcessGroup, network: Network, seconds: float
) -> dict[str, Any]:
    """Measure contention of the backend's collectives and, if these were timed, of direct sends."""

    where = world, ranks.device
    with closing(make_transport(FlatConfig(), world)) as flat:
        costs = dict(measure_contention(*where, flat, network.all_reduce, seconds))
    if (curve := network.direct_all_reduce) is not None:
        with closing(make_transport(DirectConfig(), world)) as direct:
            contention = measure_contention(*where, direct, curve, seconds)
            per_byte = network.fastest("direct_all_reduce")
            crowd = crowd_slowdown(*where, direct, curve, per_byte, CROWD_TIMES * seconds)
        costs["direct"] = contention.model_copy(update={"crowd_slowdown": crowd})
    return costs


@contextmanager
def _groups(
    ranks: Cluster, kinds: Collection[GroupKind] | None
) -> Iterator[dict[GroupKind, dist.ProcessGroup]]:
    """This rank's group of each kind (None: all kinds), the world last; destroyed at the end."""
    assert ranks.world is not None
    hosts = list(ranks_by_host(ranks.hosts).values())
    divisions: dict[GroupKind, Sequence[Sequence[int]]] = {}
    if len({len(members) for members in hosts}) == 1 and 1 < len(hosts) < ranks.world_size:
        divisions = {"intra": hosts, "inter": list(zip(*hosts, strict=True))}
    made: dict[GroupKind, dist.ProcessGroup] = {}
    try:
        for kind, division in divisions.items():
            if kinds is not None and kind not in kinds:
                continue
            for members in division:  # every rank takes part in making every group
                group = new_group(members, like=ranks.world)
                if group is not None:
                    made[kind] = group
        yield made | {"world": ranks.world}
    finally:
        for group in made.values():
            dist.destroy_process_group(group)


def _names(kind: GroupKind, curves: Curves | None, device: torch.device) -> list[CollectiveName]:
    """The collectives to measure; all-reduce is always one of them.

    Shared memory only where it is asked for: host names do not tell who can share it.
    """
    wanted: set[CollectiveName] = set(COLLECTIVES) - {"shared_memory_all_reduce"}
    if curves is not None:
        wanted = {"all_reduce", *curves.get(kind, ())}
    sends = {"direct_all_reduce"} if device.type != "cpu" else set()
    return [name for name in COLLECTIVES if name in wanted and name not in sends]


def _networks(
    timer: CollectiveTimer,
    groups: Mapping[GroupKind, dist.ProcessGroup],
    names: Mapping[GroupKind, Sequence[CollectiveName]],
    seconds: float,
    report: Progress,
) -> dict[GroupKind, Network]:
    """A network for each kind of groups; what one curve leaves of its time goes to the others."""
    curves: dict[GroupKind, dict[str, Any]] = {kind: {} for kind in groups}
    todo = [(kind, name) for kind in groups for name in names[kind]]

    def progress(share: float) -> None:
        report((index + share) / len(todo), f"{kind} {name}")

    for index, (kind, name) in enumerate(todo):
        budget = max(seconds / (len(todo) - index), 1e-3)
        curves[kind][name], left = timer.curve(name, groups[kind], budget, progress)
        seconds -= budget - left
    return {k: Network(kind=k, ranks=group.size(), **curves[k]) for k, group in groups.items()}
