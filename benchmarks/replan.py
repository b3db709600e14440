"""Links that change while a model trains: does `transport: auto` search again when it should?

    python -m benchmarks.replan --json benchmarks/results/replan.json

On four emulated hosts, whose links are changed from outside, one training goes through all of it:

1. The cost: it takes turns with one that has the same exchange and does not watch its speed.
2. Noise: the rate of every link jitters, and now and then falls to a quarter for seconds.
3. The rate falls to a tenth, and comes back. Each time, when it has searched again, it takes turns
   with a training that begins on the links as they are now, and with one that keeps the exchange
   from before. Each search measures, so two may end with different choices: the times count.

And the detector alone sees hours of noise that is drawn, from several seeds.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.auto import DEFAULT, Training, named
from benchmarks.cases import KEEP_MEMORY, MODELS, Case, case_of, timed_iterations
from benchmarks.iteration import plain, quartiles, this_module
from benchmarks.record import arguments, finish
from benchmarks.turns import joined_ranks, seconds_of, take_turns
from slipstream.strategy import AutoConfig, Strategy
from slipstream.testbed import Testbed, parse_rate
from slipstream.testbed.network import shape
from slipstream.tuner.change import ChangeDetector
from slipstream.tuner.online_search import OnlineSearch
from slipstream.tuner.speed_watch import BLOCK

ORDERS, ORDER = "SLIPSTREAM_BENCHMARK_ORDERS", "order"
"""The variable that names a folder, and the file in it by which rank 0 orders another rate."""
MOST = 5000
"""Updates in which something must have happened."""
SWITCH = 0.5
"""Seconds between two jitters."""
HOUR, UPDATE, SEEDS, SEARCH = 3600.0, 0.5, 20, 60
"""Of the detector's hours: seconds, those of an update, draws of each kind, updates of a search."""


# The links.


class Links:
    """The links of a testbed, which rank 0 changes by writing a file.

    Args:
        bed: whose hosts send at another rate from then on.
        folder: of the file.
    """

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self._bed, self._file = bed, folder / ORDER
        self._rates = dict.fromkeys(bed.nodes, bed.rate)
        self._noise: random.Random | None = None
        self._next = 0.0

    def serve(self) -> None:
        """Carry out an order, or jitter."""
        if self._file.exists():
            rate, noise = self._file.read_text().split()
            self._rates = dict.fromkeys(self._bed.nodes, parse_rate(rate))
            self._noise = random.Random(0) if noise == "noisy" else None
            self._set(dict.fromkeys(self._bed.nodes, 1.0))
            self._file.unlink()
        if self._noise is not None and time.monotonic() > self._next:
            self._next = time.monotonic() + SWITCH
            chance = self._noise
            self._set(
                {
                    node: 0.25 if chance.random() < 0.03 else math.exp(-abs(chance.gauss(0, 0.3)))
                    for node in self._bed.nodes
                }
            )

    def _set(self, factors: Mapping[Any, float]) -> None:
        changed = []
        for node, factor in factors.items():
            line = shape(node.interface, round(self._rates[node] * factor))
            changed.append(
                self._bed.popen(node, ["tc", *line.replace(" add ", " change ").split()])
            )
        for process in changed:
            assert process.wait() == 0


def order(rate: str, noise: str = "quiet") -> None:
    """Have the links changed; every rank calls it."""
    if dist.get_rank() == 0:
        file = Path(os.environ[ORDERS]) / ORDER
        whole = file.with_suffix(".new")
        whole.write_text(f"{rate} {noise}")
        whole.rename(file)
        while file.exists():
            time.sleep(0.05)
    dist.barrier()


# A rank.


def search_of(training: Training) -> OnlineSearch:
    """The search of a session that has one."""
    search = training.session._loop.search
    assert search is not None
    return search


def train_until(training: Training, happened: Callable[[OnlineSearch], bool]) -> int:
    """Updates until something has happened, alike on all ranks.

    Raises:
        SystemExit: it has not.
    """
    search = search_of(training)
    for number in range(MOST):
        if happened(search):
            return number
        training.update()
    raise SystemExit(f"nothing has happened in {MOST} updates: {search.outcome}")


def is_settled(search: OnlineSearch) -> bool:
    """Whether its choice is made."""
    return search.settled


def has_begun(search: OnlineSearch) -> bool:
    """Whether it searches again."""
    return not search.settled


def knows_before(search: OnlineSearch) -> bool:
    """Whether a change can be told from what was before."""
    assert search.watch is not None
    return search.watch.detector.before is not None


def strategy_of(args: argparse.Namespace, *, replan: bool) -> Strategy:
    """The preset, whose search may begin `sharded` at any time."""
    auto = AutoConfig(updates=args.updates, replan="may_shard" if replan else False)
    return Strategy.load("exact").with_gradients(transport=auto)


def cost(args: argparse.Namespace, case: Case, watched: Training) -> list[float]:
    """Times as long as without a watch, by turns of several updates."""
    other = Training(case, strategy_of(args, replan=False))
    other.session.load_state_dict(watched.session.state_dict())
    assert search_of(other).choice == search_of(watched).choice

    def turn(training: Training) -> float:
        def updates() -> None:
            for _ in range(2 * BLOCK):
                training.update()

        return seconds_of(updates)

    train_until(other, lambda search: search.settled)
    seconds = take_turns([watched, other], turn, args.turns, warmup=1, title="cost")
    other.session.close()
    return [mine / its for mine, its in zip(seconds[watched], seconds[other], strict=True)]


def noise(args: argparse.Namespace, training: Training) -> dict[str, Any]:
    """Searches while the links jitter, and the times of updates."""
    order(args.rate, "noisy")
    before, seconds = len(search_of(training)._earlier), []
    for _ in range(args.noisy):
        seconds.append(seconds_of(training.update))
    order(args.rate)
    searches = len(search_of(training)._earlier) - before
    return {"searches": searches, "updates": args.noisy, "quartiles": quartiles(seconds)}


def changed(args: argparse.Namespace, case: Case, training: Training, rate: str) -> dict[str, Any]:
    """The links have another rate from now on: what happens, and the times that follow."""
    search = search_of(training)
    train_until(training, knows_before)
    before = search.choice
    order(rate)
    noticed = train_until(training, has_begun)
    why = search.outcome
    searched = train_until(training, is_settled)
    planned = Training(case, strategy_of(args, replan=False))
    train_until(planned, is_settled)
    kept = Training(case, DEFAULT.with_gradients(**before._asdict()))
    names = {"searched again": training, "planned so": planned, "as before": kept}
    variants = {name: one.update for name, one in names.items()}
    seconds, _ = timed_iterations(variants, args.rounds, warmup=1)
    row = {
        "rate": rate,
        "noticed": noticed,
        "searched": searched,
        "why": why,
        "choices": {
            "searched again": named(search.choice),
            "planned so": named(search_of(planned).choice),
            "as before": named(before),
        },
        "seconds": seconds,
    }
    planned.session.close()
    kept.session.close()
    return row


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the result."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    case = case_of(args, world)
    with joined_ranks():
        assert case.device is not None
        case.device.fit(plain(*case.make()), case.device.seconds)
        training = Training(case, strategy_of(args, replan=True))
        train_until(training, is_settled)
        ratios = cost(args, case, training)
        train_until(training, knows_before)
        jitter = noise(args, training)
        rows = [changed(args, case, training, rate) for rate in (args.slow, args.rate)]
        training.session.close()
    if rank == 0:
        entry = {
            "model": args.model,
            "nodes": args.nodes,
            "rate": args.rate,
            "slow": args.slow,
            "rounds": args.rounds,
            "cost": ratios,
            "noise": jitter,
            "rows": rows,
            "hours": hours(),
        }
        finish(args.json, "replan", entry)


# Hours of noise, drawn.


def heavy(chance: random.Random) -> float:
    """A factor: most near 1, some far above."""
    tail = chance.uniform(2, 20) if chance.random() < 0.05 else 1.0
    return math.exp(chance.gauss(0, 0.3)) * tail


def calm(chance: random.Random) -> float:
    """A factor near 1."""
    return math.exp(chance.gauss(0, 0.05))


def bursts(length: tuple[float, float], apart: float) -> Callable[[random.Random], Kind]:
    """Other traffic: at times, so many seconds long, updates take three times as long."""

    def of(chance: random.Random) -> Kind:
        ends, begins = 0.0, chance.expovariate(1 / apart)

        def factor(now: float) -> float:
            nonlocal ends, begins
            if now > ends and now > begins:
                ends = now + chance.uniform(*length)
                begins = ends + chance.expovariate(1 / apart)
            return calm(chance) * (3.0 if now < ends else 1.0)

        return factor

    return of


Kind = Callable[[float], float]
"""Times as long as an update takes where nothing else happens, at a time in seconds."""
KINDS: dict[str, tuple[float, Callable[[random.Random], Kind]]] = {
    "calm": (HOUR, lambda chance: lambda now: calm(chance)),
    "heavy tails": (HOUR, lambda chance: lambda now: heavy(chance)),
    "bursts of 5 to 25 s": (HOUR, bursts((5, 25), 60)),
    "bursts of 2 to 5 minutes": (HOUR, bursts((120, 300), 600)),
    "a drift to 1.3 times": (
        HOUR,
        lambda chance: lambda now: calm(chance) * (1 + 0.3 * now / HOUR),
    ),
    "a daily swing of 15 %, a day": (
        24 * HOUR,
        lambda chance: (
            lambda now: heavy(chance) * (1 + 0.15 * math.sin(2 * math.pi * now / (24 * HOUR)))
        ),
    ),
}
"""By name, how long it is watched, and a draw of it."""


def searches(
    seconds: Iterable[float], detector: ChangeDetector | None = None, pause: int = 0
) -> list[int]:
    """Updates after which a search begins; those of a search itself, ``pause`` at first, are not
    seen."""
    detector = detector or ChangeDetector()
    found: list[int] = []
    block: list[float] = []
    for number, update in enumerate(seconds, 1):
        if pause:
            pause -= 1
            continue
        block.append(update)
        if len(block) == BLOCK:
            if detector.see(block, block) is not None:
                found.append(number)
                pause = SEARCH
            block = []
    return found


def drawn(seconds: float, kind: Kind) -> Iterator[float]:
    """Seconds of updates, for so long in all."""
    now = 0.0
    while now < seconds:
        update = UPDATE * kind(now)
        now += update
        yield update


def hours() -> list[dict[str, Any]]:
    """Searches in each kind of noise; and how soon a rate of a tenth is seen in it."""
    return [dict(_hour(name, *KINDS[name])) for name in KINDS]


def _hour(
    name: str, seconds: float, kind: Callable[[random.Random], Kind]
) -> Iterator[tuple[str, Any]]:
    draws = (drawn(seconds, kind(random.Random(seed))) for seed in range(SEEDS))
    counts = [len(searches(draw, pause=SEARCH)) for draw in draws]
    yield from (("name", name), ("hours", seconds / HOUR), ("searches", counts))
    at, seen = 1000.0, []
    for seed in range(SEEDS):
        noise = kind(random.Random(seed))
        instants: list[float] = []

        def slower(now: float, noise: Kind = noise, instants: list[float] = instants) -> float:
            instants.append(now)
            return noise(now) * (10.0 if now > at else 1.0)

        found = searches(drawn(at + 2 * HOUR, slower), pause=SEARCH)
        seen.append([n - sum(now <= at for now in instants) for n in found if instants[n - 1] > at])
    yield "seen", [updates[0] if updates else None for updates in seen]


def main() -> int:
    """Start the ranks and change their links, or be a rank."""
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet-small")
    parser.add_argument("--slow", default="100mbit", help="the rate that comes in between")
    parser.add_argument("--compute-seconds", default="0.4", help="of an iteration, emulated")
    parser.add_argument("--updates", type=int, default=AutoConfig().updates, help="of a search")
    parser.add_argument("--turns", type=int, default=5, help="of several updates, for the cost")
    parser.add_argument("--noisy", type=int, default=400, help="updates on links that jitter")
    parser.add_argument("--rounds", type=int, default=20, help="of the three after each change")
    args = parser.parse_args()
    args.compute = "accelerator"
    if "RANK" in os.environ:
        measure(args)
        return 0
    with (
        tempfile.TemporaryDirectory() as folder,
        Testbed(nodes=args.nodes, rate=args.rate) as bed,
        ThreadPoolExecutor(1) as pool,
    ):
        ranks = pool.submit(bed.run, list(_ranks(bed)), {**KEEP_MEMORY, ORDERS: folder})
        links = Links(bed, Path(folder))
        while not ranks.done():
            links.serve()
            time.sleep(0.05)
        return ranks.result()


def _ranks(bed: Testbed) -> Iterator[Sequence[str]]:
    for node in bed.nodes:
        variables = {
            "RANK": node.index,
            "WORLD_SIZE": len(bed.nodes),
            "MASTER_ADDR": bed.nodes[0].address,
            "MASTER_PORT": 29500,
        }
        words = [f"{name}={value}" for name, value in variables.items()]
        yield ["env", *words, sys.executable, "-m", this_module(), *sys.argv[1:]]


if __name__ == "__main__":
    sys.exit(main())
