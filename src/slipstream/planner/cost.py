"""What exchanges cost on a cluster, of measured or of another size, and the file that says so.

Never measures (``calibrate`` does) and never imports torch. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from slipstream.errors import ClusterError, StrategyError
from slipstream.planner.curve import Curve, Piece, Seconds, Value
from slipstream.strategy.yaml import format_yaml, parse_yaml

__all__ = ["CodecCost", "Collective", "Curve", "Kind", "Network", "NetworkProfile", "Piece"]

Kind = Literal["world", "intra", "inter"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]

FRAMES = 1514 / 1448
"""Bytes on an Ethernet link for a byte of TCP payload: headers in frames of 1514 bytes."""


class Network(Value):
    """Groups of one kind: each has ``ranks`` ranks, and all of them exchange at the same time.

    ``world``: the one group of all ranks. ``intra``: the ranks of each host. ``inter``: the ranks
    that are each the n-th of their host; these groups share the links of the hosts.
    """

    kind: Kind
    ranks: int = Field(ge=1)
    all_reduce: Curve
    reduce_scatter: Curve
    all_gather: Curve

    @property
    def curves(self) -> dict[Collective, Curve]:
        """The three by name."""
        return {
            "all_reduce": self.all_reduce,
            "reduce_scatter": self.reduce_scatter,
            "all_gather": self.all_gather,
        }

    def scaled(
        self, kind: Kind, ranks: int, sharing: float = 1.0, per_byte: float | None = None
    ) -> Network:
        """Groups of ``ranks``, ``sharing`` times as many to a link; see `NetworkProfile.scaled`.

        ``per_byte`` is what an all-reduce takes for each byte, if that is known better.
        """
        latency = (ranks - 1) / (self.ranks - 1)
        bandwidth = sharing * _share(ranks) / _share(self.ranks)
        if per_byte is not None:
            largest, longest = self.all_reduce.points[-1]
            bandwidth = per_byte / (self.all_reduce.per_byte or longest / largest)
        curves = {name: curve.scaled(latency, bandwidth) for name, curve in self.curves.items()}
        return Network(kind=kind, ranks=ranks, **curves)


class CodecCost(Value):
    """What it costs to make gradients smaller: measured on the thread that computes.

    ``ratio`` is what is left of the bytes; ``encode`` and ``decode`` are seconds for each byte of
    the gradients, ``startup`` seconds for each segment, once each way.
    """

    ratio: float = Field(gt=0)
    encode: Seconds = 0.0
    decode: Seconds = 0.0
    startup: Seconds = 0.0


class NetworkProfile(Value):
    """What exchanges cost on a cluster, and what they and computing cost each other.

    Computing takes ``1 + compute_slowdown`` times as long while an exchange runs. Beside computing
    the latency of an exchange is ``1 + latency_slowdown`` times as long (processes wait for a core
    at every hop), and what follows it ``1 + exchange_slowdown`` times. Beside an exchange whose
    bytes move the latency of another is at least ``queue_share`` of what that one takes, but not
    for more than ``queue_seconds`` (messages wait behind each other). With hosts of different size,
    ``ranks_per_host`` is the most that a host has. ``codecs`` holds what making gradients smaller
    costs a rank, by kind of codec. ``extrapolated`` says what was not
    measured.

    Example:
        >>> line = Curve.fit([(1024, 0.001), (2**20, 0.021)])
        >>> pair = Network(
        ...     kind="world", ranks=2, all_reduce=line, reduce_scatter=line, all_gather=line
        ... )
        >>> cluster = NetworkProfile(
        ...     world_size=2, hosts=2, ranks_per_host=1, networks={"world": pair},
        ...     compute_slowdown=0.2, exchange_slowdown=0.5, latency_slowdown=1.0,
        ...     queue_share=0.0, queue_seconds=0.0, backend="gloo", date="", versions={},
        ... )
        >>> four = cluster.scaled(nodes=4, ranks_per_node=1)
        >>> four.world_size, round(four.network("world").all_reduce.seconds(2**20), 3)
        (4, 0.033)
        >>> four.extrapolated
        'from 2 x 1 to 4 x 1 ranks'
    """

    world_size: int = Field(ge=1)
    hosts: int = Field(ge=1)
    ranks_per_host: int = Field(ge=1)
    networks: Mapping[Kind, Network]
    compute_slowdown: float = Field(ge=0)
    exchange_slowdown: float = Field(ge=0)
    latency_slowdown: float = Field(ge=0)
    queue_share: float = Field(ge=0, le=1)
    queue_seconds: float = Field(ge=0)
    codecs: Mapping[str, CodecCost] = {}
    backend: str
    date: str
    versions: Mapping[str, str]
    extrapolated: str = ""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
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

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ClusterError: no such file, no YAML, or not such a document: names every problem.
        """
        try:
            document = parse_yaml(Path(path).read_text(encoding="utf-8-sig"))
            return cls.model_validate_json(json.dumps(document, default=str))
        except OSError as error:
            said = f"cannot be read: {error.strerror}; check the path"
        except UnicodeDecodeError as error:
            said = f"not UTF-8 text: {error.reason}"
        except StrategyError as error:  # whatever does not parse
            said = str(error)
        except ValidationError as error:
            said = f"not a description of a cluster:{_problems(error)}"
        raise ClusterError(f"{path}: {said}\nSuch a file comes from: slipstream doctor network")

    def save(self, path: str | Path) -> None:
        """Write it as YAML.

        Raises:
            ClusterError: the file cannot be written.
        """
        try:
            Path(path).write_text(format_yaml(self.model_dump(mode="json")), encoding="utf-8")
        except OSError as error:
            raise ClusterError(
                f"{path}: cannot be written: {error.strerror}; choose another file"
            ) from error

    def network(self, kind: Kind) -> Network:
        """Groups of this kind; where they are those of the world, the world.

        Raises:
            ClusterError: they were not measured.
        """
        same = {"intra": self.hosts == 1, "inter": self.ranks_per_host == 1}.get(kind, False)
        if kind not in self.networks and not same:
            raise ClusterError(
                f"networks.{kind} was not measured; there is {', '.join(self.networks)}. Measure "
                "it where every host has the same number of ranks: slipstream doctor network"
            )
        return self.networks["world" if same else kind]

    def scaled(self, nodes: int, ranks_per_node: int, rate: float | None = None) -> NetworkProfile:
        """What is to be expected of other hosts, ranks and links, by the laws of a ring.

        Of p ranks the latency grows as ``p - 1``, the bytes of each rank as ``(p - 1) / p``. A
        ``rate`` (bits/s of each host's link, both ways) replaces the slope of what crosses hosts:
        ``2 (p - 1) / p * 8 * FRAMES / rate`` for an all-reduce of the world, ``ranks_per_node``
        times that for the groups that share the link; never faster than inside a host, where that
        was measured. A kind of groups that was not measured is derived from the world.

        Raises:
            ClusterError: no such number of nodes, ranks or bits; one rank alone was measured, or
                hosts of different size.
        """
        shape = {"nodes": nodes, "ranks per node": ranks_per_node, "rate": rate or 1}
        if wrong := [f"{name} is {value}" for name, value in shape.items() if value <= 0]:
            raise ClusterError(f"{', '.join(wrong)}: must be above 0")
        if self.world_size == 1:
            raise ClusterError("one rank alone says nothing of others: measure with 2 or more")
        if self.hosts * self.ranks_per_host != self.world_size:
            raise ClusterError(
                f"{self.world_size} ranks on {self.hosts} hosts: hosts of different size say "
                "nothing of others; measure where every host has the same number of ranks"
            )
        if (nodes, ranks_per_node, rate) == (self.hosts, self.ranks_per_host, None):
            return self
        said = [f"from {self.hosts} x {self.ranks_per_host} to {nodes} x {ranks_per_node} ranks"]
        said += [] if rate is None or nodes == 1 else [f"links of {rate / 1e9:g} Gbit/s"]
        if nodes > 1 and self.hosts == 1 and rate is None:
            said.append("links between hosts taken to be as fast as inside the measured one")
        ranks_of: dict[Kind, int] = {"world": nodes * ranks_per_node}
        if nodes > 1 and ranks_per_node > 1:
            ranks_of |= {"intra": ranks_per_node, "inter": nodes}
        networks: dict[Kind, Network] = {}
        for kind, ranks in ranks_of.items():
            source = self._nearest("intra" if nodes == 1 else kind)
            if source.kind != kind:
                said.append(f"{kind} derived from {source.kind}")
            sharing = ranks_per_node if kind == "inter" else 1
            shared = self.ranks_per_host if source.kind == "inter" else 1
            crosses = nodes > 1 and kind != "intra"
            per_byte = self._wire(ranks, rate / sharing) if rate and crosses else None
            networks[kind] = source.scaled(kind, ranks, sharing / shared, per_byte)
        before, after = self.networks["world"].all_reduce, networks["world"].all_reduce
        slower = after.seconds(after.points[-1][0]) / before.seconds(after.points[-1][0])
        return self.model_copy(
            update={
                "queue_seconds": self.queue_seconds * slower,
                "world_size": nodes * ranks_per_node,
                "hosts": nodes,
                "ranks_per_host": ranks_per_node,
                "networks": networks,
                "extrapolated": "; ".join([*filter(None, [self.extrapolated]), *said]),
            }
        )

    def _nearest(self, kind: Kind) -> Network:
        """The groups of this kind, or else the world."""
        return self.networks.get(kind, self.networks["world"])

    def _wire(self, ranks: int, rate: float) -> float:
        """Seconds for a byte of an all-reduce at ``rate``, or what the hosts manage."""
        seconds = 2 * _share(ranks) * 8 * FRAMES / rate
        inside = self._nearest("intra")
        if inside.kind == "intra" or self.hosts == 1:
            host = inside.all_reduce.per_byte * _share(ranks) / _share(inside.ranks)
            return max(seconds, host)
        return seconds

    def check_world(self, world_size: int) -> None:
        """Return if this describes a world of ``world_size`` ranks.

        Raises:
            ClusterError: it describes another.
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

        What is wanted of its sizes is as measured; beyond them, on other links and for other
        numbers of ranks it is a guess.
        """
        return tuple(
            f"{network.kind} {name}: the fit is {curve.worst_error:.0%} off in {curve.worst_decade}"
            for network in self.networks.values()
            for name, curve in network.curves.items()
            if not curve.trusted
        )


def _share(ranks: int) -> float:
    """Of its bytes, what each rank of a ring sends in one round."""
    return (ranks - 1) / ranks


def _problems(error: ValidationError) -> str:
    """A line for each problem: its place, what was seen, what is allowed."""
    lines = ""
    for problem in error.errors(include_url=False):
        place = ".".join(map(str, problem["loc"])) or "(top level)"
        seen = "" if problem["type"] in ("missing", "value_error") else _shown(problem["input"])
        lines += f"\n  {place}: {problem['msg']}{seen and f', not {seen}'}"
    return lines


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
