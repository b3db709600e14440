"""Profiles: costs of exchanges and codecs on a cluster, measured or scaled, and their file.

The numbers come from ``calibration``; this module never measures and never imports torch. Times are
seconds, sizes are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from slipstream.errors import ClusterError, StrategyError
from slipstream.files.document import MIB, Unreadable, decoded, read_bytes
from slipstream.files.write import write_whole
from slipstream.planner.network.costs import CodecCost, Contention, HalfSpeed
from slipstream.planner.network.curve import Curve
from slipstream.strategy import Strategy
from slipstream.strategy.setting import FrozenModel
from slipstream.strategy.validate import shown
from slipstream.strategy.yaml import format_yaml, parse_yaml

GroupKind = Literal["world", "intra", "inter"]
CollectiveName = Literal[
    "all_reduce",
    "direct_all_reduce",
    "shared_memory_all_reduce",
    "reduce_scatter",
    "all_gather",
]
"""``all_reduce`` is the backend's; ``direct_all_reduce`` and ``shared_memory_all_reduce`` are
those of the transports. On CPUs a reduce-scatter sends each shard
to its owner, and an all-gather each owner's share to the others: gloo's own reduce-scatter would be
an all-reduce inside, of twice the bytes."""
ROUNDS: Mapping[CollectiveName, int] = {
    "all_reduce": 2,
    "direct_all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
}
"""How often a rank sends its part, ``(p - 1) / p`` of the bytes; of collectives that send."""
Curves = Mapping[GroupKind, tuple[CollectiveName, ...]]
"""Names of curves, by kind of groups."""

LONGEST = 4 * MIB
"""Bytes of a file."""
SHARDING = 120e-6
"""Seconds that ``sharded`` computes for each gradient of an update, beside the optimizer: 4 to 5 ms
of CPU time of the thread that trains, for 38 gradients. The CPU is that of the testbeds."""
FRAMES = 1514 / 1448
"""Bytes on an Ethernet link for a byte of TCP payload: headers in frames of 1514 bytes."""


class Network(FrozenModel):
    """Groups of one kind: each has ``ranks`` ranks, and all groups exchange at the same time.

    ``world``: the one group of all ranks. ``intra``: the ranks of each host. ``inter``: one rank of
    each host (the n-th of all hosts form a group); these groups share the links of the hosts.
    A curve that was not measured is None. ``crowded`` are collectives that share links farther
    away, such as the uplink of a rack, and how many times as long they take for it.
    """

    kind: GroupKind
    ranks: int = Field(ge=1)
    all_reduce: Curve
    direct_all_reduce: Curve | None = None
    shared_memory_all_reduce: Curve | None = None
    reduce_scatter: Curve | None = None
    all_gather: Curve | None = None
    crowded: Mapping[CollectiveName, float] | None = None

    @property
    def curves(self) -> dict[CollectiveName, Curve]:
        """The measured curves by collective."""
        curves = {name: getattr(self, name) for name in get_args(CollectiveName)}
        return {name: curve for name, curve in curves.items() if curve is not None}

    def curve(self, name: CollectiveName) -> Curve:
        """The curve of one collective.

        Raises:
            ClusterError: it was not measured.
        """
        if name not in self.curves:
            raise ClusterError(
                f"networks.{self.kind}.{name} was not measured, only {', '.join(self.curves)}; "
                "measure all of them: slipstream doctor network"
            )
        return self.curves[name]

    def fastest(self, name: CollectiveName) -> float:
        """Seconds for a byte of a collective, at the rate of the fastest one in these groups.

        The rate is that of the largest exchange as a whole: slopes between measured points scatter,
        and the smallest of several would be faster than the link.
        """
        largest = {other: c.points[-1] for other, c in self.curves.items() if other in ROUNDS}
        rates = [seconds / size / ROUNDS[other] for other, (size, seconds) in largest.items()]
        return ROUNDS[name] * min(rates) * (self.crowded or {}).get(name, 1.0)

    def scaled(
        self, kind: GroupKind, ranks: int, sharing: float = 1.0, per_byte: float | None = None
    ) -> Network:
        """Groups of ``ranks``, ``sharing`` times as many to a link; see `NetworkProfile.scaled`.

        ``per_byte`` is the known time of an all-reduce for each byte; None: derived from this one.
        """
        latency = (ranks - 1) / (self.ranks - 1)
        bandwidth = sharing * _ring_share(ranks) / _ring_share(self.ranks)
        if per_byte is not None:
            largest, longest = self.all_reduce.points[-1]
            bandwidth = per_byte / (self.all_reduce.per_byte or longest / largest)
        curves: dict[str, Any] = {
            name: curve.scaled(latency, bandwidth) for name, curve in self.curves.items()
        }
        return Network(kind=kind, ranks=ranks, **curves)


class NetworkProfile(Contention):
    """Costs of exchanges on a cluster, and how much they and computing slow each other down.

    Where hosts have different numbers of ranks, ``ranks_per_host`` is the largest. ``codecs`` holds
    what each kind of codec costs a rank, ``half_speed`` what weights of 16 bits bring,
    ``sharding_seconds`` what ``sharded`` computes for each gradient of an update, ``merging`` what
    a rank under ``local`` computes for each byte of a change, seconds of sending it and of merging
    the mean; 0 where it was not measured. The contention is that of the backend's collectives;
    ``direct`` holds that of direct sends. ``extrapolated`` says which part was not measured.

    Example:
        >>> line = Curve.fit([(1024, 0.001), (2**20, 0.021)])
        >>> pair = Network(kind="world", ranks=2, all_reduce=line)
        >>> network = NetworkProfile(
        ...     world_size=2, hosts=2, ranks_per_host=1, networks={"world": pair},
        ...     compute_slowdown=0.2, exchange_slowdown=0.5, latency_slowdown=1.0,
        ...     queue_share=0.0, queue_seconds=0.0, backend="gloo", date="", versions={},
        ... )
        >>> four = network.scaled(nodes=4, ranks_per_node=1)
        >>> four.world_size, round(four.groups("world").all_reduce.seconds(2**20), 3)
        (4, 0.033)
        >>> four.extrapolated
        'from 2 x 1 to 4 x 1 ranks'
    """

    world_size: int = Field(ge=1)
    hosts: int = Field(ge=1)
    ranks_per_host: int = Field(ge=1)
    networks: Mapping[GroupKind, Network]
    direct: Contention | None = None
    codecs: Mapping[str, CodecCost] = {}
    half_speed: HalfSpeed | None = None
    sharding_seconds: float = Field(ge=0, default=SHARDING)
    merging: float = Field(ge=0, default=0.0)
    backend: str
    date: str
    versions: Mapping[str, str]
    extrapolated: str = ""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if "world" not in self.networks:
            raise ValueError(f"networks must hold world, but holds {list(self.networks)}")
        if self.networks["world"].ranks != self.world_size:
            ranks = self.networks["world"].ranks
            raise ValueError(f"world_size is {self.world_size}, networks.world.ranks {ranks}")
        if not self.hosts <= self.world_size <= self.hosts * self.ranks_per_host:
            raise ValueError(
                f"{self.world_size} ranks are not on {self.hosts} hosts of at most "
                f"{self.ranks_per_host}"
            )
        return self

    def slowed(self, factors: Mapping[CollectiveName, tuple[float, float]]) -> NetworkProfile:
        """The same where the latency and the rest of each collective take so many times as long."""

        def slower(network: Network) -> Network:
            curves: dict[str, Curve] = {
                name: curve.slowed(*factors[name]) if name in factors else curve
                for name, curve in network.curves.items()
            }
            return network.model_copy(update=curves)

        networks = {kind: slower(network) for kind, network in self.networks.items()}
        return self.model_copy(update={"networks": networks})

    def contention(self, direct: bool) -> Contention:
        """Find what was measured of direct sends, else that of the backend's collectives."""
        return self.direct if direct and self.direct is not None else self

    def with_contention(self, direct: bool, values: Mapping[str, float]) -> NetworkProfile:
        """The same with other values in ``contention(direct)``."""
        if direct and self.direct is not None:
            return self.model_copy(update={"direct": self.direct.model_copy(update=values)})
        return self.model_copy(update=values)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ClusterError: the file cannot be read or is no YAML, or its values are wrong; names
                every problem.
        """
        try:
            document = parse_yaml(decoded(read_bytes(path, LONGEST)))
            if (kind := _other_kind(document)) is not None:
                raise ClusterError(f"{path} is {kind}; give a file of slipstream doctor network")
            return cls.model_validate_json(json.dumps(_without_ring(document), default=str))
        except OSError as error:
            problem = f"cannot be read: {error.strerror}; check the path"
        except (StrategyError, Unreadable) as error:
            problem = str(error)
        except ValidationError as error:
            problem = f"not a description of a cluster:{_problems(error)}"
        raise ClusterError(f"{path}: {problem}\nslipstream doctor network writes such a file")

    def save(self, path: str | Path) -> None:
        """Write it as YAML.

        Raises:
            ClusterError: the file cannot be written.
        """
        document = format_yaml(self.model_dump(mode="json", exclude_none=True))
        try:
            write_whole(path, document)
        except OSError as error:
            problem = f"{path}: cannot be written: {error.strerror}; choose another file"
            raise ClusterError(problem) from error

    def groups(self, kind: GroupKind) -> Network:
        """The groups of this kind; the world where they are the same ranks.

        Raises:
            ClusterError: they were not measured.
        """
        if {"intra": self.hosts, "inter": self.ranks_per_host}.get(kind) == 1:
            kind = "world"
        if kind not in self.networks:
            raise ClusterError(
                f"networks.{kind} was not measured, only {', '.join(self.networks)}; measure it "
                "where every host has the same number of ranks: slipstream doctor network"
            )
        return self.networks[kind]

    def scaled(self, nodes: int, ranks_per_node: int, rate: float | None = None) -> NetworkProfile:
        """The profile to expect for other hosts, ranks and links, by the laws of a ring.

        With p ranks the latency grows as ``p - 1``, the bytes of each rank as ``(p - 1) / p``. A
        ``rate`` (bits/s of each host's link, both ways) replaces the slope of exchanges that cross
        hosts: ``2 (p - 1) / p * 8 * FRAMES / rate`` for an all-reduce of the world,
        ``ranks_per_node`` times that for the groups that share the link; never faster than inside a
        host, where that was measured. A kind of groups that was not measured is derived from the
        world.

        Raises:
            ClusterError: nodes, ranks or rate are not above 0; one rank alone was measured, or
                hosts of different size.
        """
        self._check_scalable(nodes, ranks_per_node, rate)
        if (nodes, ranks_per_node, rate) == (self.hosts, self.ranks_per_host, None):
            return self
        notes = [f"from {self.hosts} x {self.ranks_per_host} to {nodes} x {ranks_per_node} ranks"]
        notes += [] if rate is None or nodes == 1 else [f"links of {rate / 1e9:g} Gbit/s"]
        if nodes > 1 and self.hosts == 1 and rate is None:
            notes.append("links between hosts taken to be as fast as inside the measured one")
        ranks_of: dict[GroupKind, int] = {"world": nodes * ranks_per_node}
        if nodes > 1 and ranks_per_node > 1:
            ranks_of |= {"intra": ranks_per_node, "inter": nodes}
        networks: dict[GroupKind, Network] = {}
        for kind, ranks in ranks_of.items():
            source = self._nearest("intra" if nodes == 1 else kind)
            if source.kind != kind:
                notes.append(f"{kind} derived from {source.kind}")
            sharing = ranks_per_node if kind == "inter" else 1
            measured_sharing = self.ranks_per_host if source.kind == "inter" else 1
            crosses = nodes > 1 and kind != "intra"
            per_byte = self._per_byte(ranks, rate / sharing) if rate and crosses else None
            networks[kind] = source.scaled(kind, ranks, sharing / measured_sharing, per_byte)
        before, after = self.networks["world"].all_reduce, networks["world"].all_reduce
        slower = after.seconds(after.points[-1][0]) / before.seconds(after.points[-1][0])
        shape = {"world_size": ranks_of["world"], "hosts": nodes, "ranks_per_host": ranks_per_node}
        note = "; ".join(filter(None, [self.extrapolated, *notes]))
        costs = {"networks": networks, "queue_seconds": self.queue_seconds * slower}
        if self.direct is not None:
            queue = {"queue_seconds": self.direct.queue_seconds * slower}
            costs["direct"] = self.direct.model_copy(update=queue)
        return self.model_copy(update={**shape, **costs, "extrapolated": note})

    def _check_scalable(self, nodes: int, ranks_per_node: int, rate: float | None) -> None:
        shape = {"nodes": nodes, "ranks per node": ranks_per_node, "rate": rate or 1}
        if wrong := [f"{name} is {value}" for name, value in shape.items() if value <= 0]:
            raise ClusterError(f"{', '.join(wrong)}: must be above 0")
        if self.world_size == 1:
            raise ClusterError("one rank alone says nothing about others: measure with 2 or more")
        if self.hosts * self.ranks_per_host != self.world_size:
            raise ClusterError(
                f"{self.world_size} ranks on {self.hosts} hosts: hosts of different size cannot be "
                "scaled; measure where every host has the same number of ranks"
            )

    def _nearest(self, kind: GroupKind) -> Network:
        """The groups of this kind; the world where they were not measured."""
        return self.networks.get(kind, self.networks["world"])

    def _per_byte(self, ranks: int, rate: float) -> float:
        """Seconds for a byte of an all-reduce at ``rate``, never fewer than inside a host."""
        seconds = 2 * _ring_share(ranks) * 8 * FRAMES / rate
        inside = self._nearest("intra")
        if inside.kind == "intra" or self.hosts == 1:
            host = inside.all_reduce.per_byte * _ring_share(ranks) / _ring_share(inside.ranks)
            return max(seconds, host)
        return seconds

    def check_world(self, world_size: int) -> None:
        """Check that this profile describes ``world_size`` ranks.

        Raises:
            ClusterError: it describes another number.
        """
        if world_size != self.world_size:
            raise ClusterError(
                f"the cluster file describes {self.world_size} ranks, the run has {world_size}: "
                f"measure again with {world_size} ranks (slipstream doctor network), or ask for an "
                "extrapolation by naming the nodes and the ranks of each"
            )

    @property
    def doubts(self) -> tuple[str, ...]:
        """A line for each curve whose fit is not trusted.

        Predictions between its measured sizes are still good; beyond them, for other links and for
        other numbers of ranks they are a guess.
        """
        return tuple(
            f"{network.kind} {name}: the fit is {curve.worst_error:.0%} off in {curve.worst_decade}"
            for network in self.networks.values()
            for name, curve in network.curves.items()
            if not curve.trusted
        )


def _ring_share(ranks: int) -> float:
    """The share of its bytes that each rank of a ring sends in one round."""
    return (ranks - 1) / ranks


def _other_kind(document: Any) -> str | None:
    """Another kind of file of slipstream that was given for a description of a cluster."""
    keys = document.keys() if isinstance(document, dict) else set()
    if "traceEvents" in keys:
        return "a trace"
    return "a strategy" if keys & Strategy.model_fields.keys() else None


def _without_ring(document: Any) -> Any:
    """Read files of an earlier version, which measured the curve of one transport more."""
    networks = document.get("networks") if isinstance(document, dict) else None
    for network in networks.values() if isinstance(networks, dict) else ():
        if isinstance(network, dict):
            network.pop("ring_all_reduce", None)
    return document


def _problems(error: ValidationError) -> str:
    """A line for each problem: its place, what is allowed, the value seen."""
    lines = ""
    for problem in error.errors(include_url=False):
        place = ".".join(map(str, problem["loc"])) or "(top level)"
        has_value = problem["type"] not in ("missing", "value_error")
        seen = f", not {shown(problem['input'])}" if has_value else ""
        lines += f"\n  {place}: {problem['msg']}{seen}"
    return lines
