"""Draw the measured costs of a network: what they mean in sentences, then tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slipstream.analysis.compact_table import compact
from slipstream.planner.network.curve import WORST_ERROR, Curve
from slipstream.planner.network.profile import CollectiveName, Network, NetworkProfile

FEW = 9
"""Points of which all are shown; of more, every fourth. The file has them all."""

CODED = 8 * 2**20
"""Bytes of gradients in the table of codecs."""

DOUBTFUL = (
    f"warning: the fitted lines miss measured points by more than {WORST_ERROR:.0%}. Between the "
    "measured sizes predictions use the points; beyond them, on other links and for other numbers "
    "of ranks, they are doubtful. If something else ran meanwhile, measure again."
)

PLACES = {
    "world": "all ranks",
    "intra": "the ranks of each host",
    "inter": "across hosts, one rank of each",
}


def report(profile: NetworkProfile) -> Group:
    """Report measurements: a sentence for each network, warnings, and tables of 80 columns."""
    sentences = [_verdict(network) for network in profile.networks.values()]
    sentences.append(
        f"Beside an exchange computing takes {1 + profile.compute_slowdown:.2f} times as long, "
        f"beside computing the bytes of an exchange {1 + profile.exchange_slowdown:.2f} times and "
        f"its latency {1 + profile.latency_slowdown:.2f} times. A small exchange beside a large "
        f"one takes {profile.queue_share:.0%} of its time, {profile.queue_seconds:.3f} s at most."
    )
    if (direct := profile.direct) is not None:
        sentences.append(
            f"With transport direct: computing {1 + direct.compute_slowdown:.2f} times, the bytes "
            f"of an exchange {1 + direct.exchange_slowdown:.2f} times, its latency "
            f"{1 + direct.latency_slowdown:.2f} times."
        )
    if (speed := profile.half_speed) is not None:
        sentences.append(
            f"With 16-bit weights transformer layers compute {speed.dense:.2f} times as fast, "
            f"convolutions {speed.convolutional:.2f} times."
        )
    doubts = "".join(f"\n  {doubt}" for doubt in profile.doubts)
    warning = [Text(DOUBTFUL + doubts, style="yellow")] if doubts else []
    tables = [*map(_table, profile.networks.values())]
    tables += [_codecs_table(profile)] if profile.codecs else []
    return Group(*map(Text, sentences), *warning, *(Padding(t, (1, 0, 0, 0)) for t in tables))


def bus_bandwidth(name: CollectiveName, ranks: int, num_bytes: int, seconds: float) -> float:
    """Bits per second over the link of each rank, if the collective runs as a ring.

    Example:
        >>> bus_bandwidth("all_reduce", 4, 10**6, 0.012), bus_bandwidth("all_gather", 2, 10**6, 1)
        (1000000000.0, 4000000.0)
    """
    rounds = 2 if name.endswith("all_reduce") else 1
    return rounds * (ranks - 1) / ranks * num_bytes * 8 / seconds


def _codecs_table(profile: NetworkProfile) -> Table:
    headings = ("codec", "all-reduces save ms", "encode ms", "decode ms", "sent MB")
    table = compact("codecs: of 8 MB of gradients, on each rank", *headings, left=["codec"])
    curve = profile.groups("world").all_reduce
    for kind, cost in profile.codecs.items():
        encode, decode = (cost.startup + rate * CODED for rate in (cost.encode, cost.decode))
        saved = curve.seconds(CODED) - curve.seconds(max(CODED * cost.ratio, 1.0))
        times = (f"{1e3 * seconds:.1f}" for seconds in (saved, encode, decode))
        table.add_row(kind, *times, f"{CODED * cost.ratio / 2**20:.3f}")
    return table


def _table(network: Network) -> Table:
    sizes = " to ".join(_size(network.all_reduce.points[at][0]) for at in (0, -1))
    table = compact(
        f"{network.kind}: {network.ranks} ranks, {PLACES[network.kind]}, {sizes}",
        *("collective", "bytes", "ms", "Gbit/s", "bus Gbit/s", "fit error"),
        left=["collective"],
    )
    for name, curve in network.curves.items():
        for index, (num_bytes, seconds) in enumerate(_some(curve)):
            bus = bus_bandwidth(name, network.ranks, num_bytes, seconds)
            table.add_row(
                "" if index else name.replace("_", "-"),
                _size(num_bytes),
                f"{seconds * 1e3:,.3f}",
                f"{num_bytes * 8 / seconds / 1e9:.3f}",
                f"{bus / 1e9:.3f}",
                f"{curve.fitted(num_bytes) / seconds - 1:+.1%}",
            )
        table.add_section()
    return table


def _some(curve: Curve) -> Sequence[tuple[int, float]]:
    """All points if they are few, else every fourth, the last among them."""
    points = curve.points
    return points if len(points) <= FEW else points[(len(points) - 1) % 4 :: 4]


def _verdict(network: Network) -> str:
    """The speed of a rank's link, the size that reaches half of it, and the latency."""
    curve, ranks = network.all_reduce, network.ranks
    speeds = {m: bus_bandwidth("all_reduce", ranks, m, t) for m, t in curve.points}
    best = max(speeds.values())
    half = next(m for m, speed in speeds.items() if speed >= best / 2)
    return (
        f"{network.kind}: up to {best / 1e9:.3g} Gbit/s over each rank's link, half of that from "
        f"{_size(half)} on; the smallest all-reduce takes {curve.points[0][1] * 1e3:.3g} ms."
    )


def _size(num_bytes: int) -> str:
    """A size in units of 1024.

    Example:
        >>> _size(1536), _size(64 * 2**20), _size(12)
        ('1.5 KB', '64 MB', '12 B')
    """
    for unit, factor in {"MB": 2**20, "KB": 2**10}.items():
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"
