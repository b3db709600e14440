"""Times that slipstream promises for its own tools; exits with 1 where one of them is exceeded.

    python -m benchmarks.times --json times.json

Three operations, the limit of each in seconds: simulate an iteration on 4,096 ranks (10), find the
optimal split of 2,000 gradients (1), read a trace of 100,000 events (5). Every operation runs
``--rounds`` times after one run that does not count; the median must stay below the limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.iteration import quartiles
from benchmarks.record import finish
from benchmarks.turns import seconds_of, take_turns
from slipstream.gradients.layout import Gradient
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.curve import Curve
from slipstream.planner.network.profile import GroupKind, Network, NetworkProfile
from slipstream.planner.search.split import optimal_cuts
from slipstream.trace import Trace, chrome

RANKS, RANKS_PER_HOST = 4096, 8
GRADIENTS = 161  # of a ResNet-50
SPLIT_GRADIENTS = 2000
EVENTS = 100_000
LIMITS = {
    f"simulate an iteration on {RANKS:,} ranks": 10.0,
    f"split {SPLIT_GRADIENTS:,} gradients": 1.0,
    f"read {EVENTS:,} trace events": 5.0,
}


@dataclass(frozen=True)
class Row:
    """One operation, in seconds."""

    name: str
    limit: float
    low: float
    median: float
    high: float

    @property
    def within(self) -> bool:
        """Whether the promise holds."""
        return self.median < self.limit


def network(hosts: int) -> NetworkProfile:
    """Hosts of eight ranks: rings with 1 Gbit/s between hosts and 10 times that inside."""
    ranks: dict[GroupKind, int] = {
        "world": hosts * RANKS_PER_HOST,
        "intra": RANKS_PER_HOST,
        "inter": hosts,
    }
    networks: dict[GroupKind, Network] = {}
    for kind, count in ranks.items():
        per_byte = (count - 1) / count * (8e-10 if kind == "intra" else 8e-9)
        whole, half = (
            Curve.fit((2**k, rounds * (count * 1e-5 + per_byte * 2**k)) for k in range(10, 27))
            for rounds in (2, 1)
        )
        networks[kind] = Network(
            kind=kind,
            ranks=count,
            all_reduce=whole,
            direct_all_reduce=whole,
            reduce_scatter=half,
            all_gather=half,
        )
    return NetworkProfile(
        world_size=ranks["world"], hosts=hosts, ranks_per_host=RANKS_PER_HOST, networks=networks,
        compute_slowdown=0.2, exchange_slowdown=0.5, latency_slowdown=1.0, queue_share=0.5,
        queue_seconds=0.1, backend="gloo", date="", versions={},
    )  # fmt: skip


def workload(ranks: int) -> Workload:
    """Uneven in all respects: ranks, ready times, and sizes from bytes to megabytes."""
    random = np.random.default_rng(0)
    backward = random.uniform(0.3, 0.9, ranks)
    shares = np.cumsum(random.random((ranks, GRADIENTS)), axis=1)
    sizes = (10 ** random.uniform(2, 7, GRADIENTS)).astype(int).tolist()
    return Workload(
        gradients=tuple(Gradient(f"{i}.weight", f"{i}", size) for i, size in enumerate(sizes)),
        data_wait=random.uniform(0.0, 0.05, ranks),
        forward=random.uniform(0.1, 0.4, ranks),
        backward=backward,
        ready=backward[:, None] * shares / shares[:, -1:],
        optimizer=random.uniform(0.01, 0.05, ranks),
        other=random.uniform(0.0, 0.02, ranks),
        samples=np.full(ranks, 8.0),
    )


def simulation() -> Callable[[], object]:
    """An iteration of eleven segments through the hierarchical transport, and its trace."""
    plan = CommPlan((*range(16, GRADIENTS, 16), GRADIENTS), transport="hierarchical")
    work, large = workload(RANKS), network(RANKS // RANKS_PER_HOST)
    return lambda: simulate(work, plan, large)


def split() -> Callable[[], object]:
    """Ready times that ascend, and a curve as it is measured."""
    random = np.random.default_rng(0)
    ready = np.cumsum(random.random(SPLIT_GRADIENTS)) / SPLIT_GRADIENTS
    sizes = (10 ** random.uniform(2, 7, SPLIT_GRADIENTS)).astype(int)
    seconds_of = network(8).groups("world").all_reduce.seconds_of
    return lambda: optimal_cuts(ready, sizes, seconds_of)


def reading(folder: Path) -> Callable[[], object]:
    """A file of simulated iterations on 64 ranks."""
    plan, small = CommPlan((*range(16, GRADIENTS, 16), GRADIENTS)), network(8)
    trace = simulate(workload(64), plan, small, steps=EVENTS // (64 * 16) + 1)
    assert len(trace.events) >= EVENTS, f"only {len(trace.events)} events"
    path = folder / "trace.json"
    chrome.write(Trace(trace.events[:EVENTS], trace.meta), path)
    return lambda: chrome.read(path)


def measure(name: str, limit: float, operation: Callable[[], object], rounds: int) -> Row:
    """Quartiles of the seconds that an operation takes."""
    seconds = take_turns([name], lambda _: seconds_of(operation), rounds, 1, name)[name]
    return Row(name, limit, *quartiles(seconds))


def main() -> None:
    """Measure all operations; exit with 1 if one takes longer than promised."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="at least 2")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        operations = (simulation(), split(), reading(Path(folder)))
        rows = [
            measure(name, limit, operation, args.rounds)
            for (name, limit), operation in zip(LIMITS.items(), operations, strict=True)
        ]
    found = [asdict(row) | {"within": row.within} for row in rows]
    finish(args.json, "times", {"rounds": args.rounds, "rows": found})
    for row in rows:
        if not row.within:
            print(
                f"FAILED: {row.name} took {row.median:.3f} s (median of {args.rounds}), "
                f"the limit is {row.limit:g} s",
                file=sys.stderr,
            )
    raise SystemExit(not all(row.within for row in rows))


if __name__ == "__main__":
    main()
