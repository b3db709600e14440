"""Whether predictions know how sure they are, where ranks share cores and iterations are short.

    python -m benchmarks.shared_cores --json shared_cores.json

Six set-ups: small models whose iterations take some 30 to 150 ms, two or four ranks, all on these
cores, over loopback or an emulated link. In each of ROUNDS rounds the ranks measure the network,
record STEPS iterations of the default, and predict every exact strategy from that; then those of
STRATEGIES, the one that was predicted first and the one that is recommended take turns,
BLOCKS blocks of ITERATIONS iterations each, forth and back.

What was measured is kept apart from what is predicted: `--folder` keeps it, and predicts anew what
lies there.

*Seconds held*: the interval of 80 % holds the median over blocks. *Ratio held*: likewise of the
ratio, the median over blocks of a strategy's seconds over the default's in the same block.
*Slower*: the strategy that `plan -o` would write is slower than the default in this round, by the
whole 95 % interval of that median. The bar: of all intervals 75 to 90 % hold, and nothing is
slower.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers import BertConfig, BertForMaskedLM, ResNetConfig, ResNetForImageClassification

from benchmarks.iteration import Loss, accelerated, on_loopback, on_testbed
from benchmarks.record import finish
from benchmarks.turns import joined_ranks
from examples import models
from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import Cluster, connect, from_environ
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.transport_cost import curves_of
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import Prediction
from slipstream.strategy import Strategy
from slipstream.trace import chrome
from slipstream.transport.consistency import broadcast_from_first
from slipstream.tuner.significance import median_interval

ROUNDS, STEPS, SKIP = 4, 20, 3
BLOCKS, ITERATIONS, WARM_UP = 6, 7, 2
CALIBRATION = 4.0
"""Seconds."""
STRATEGIES: Mapping[str, Mapping[str, object]] = {
    "default": {},
    "by_bytes 1": {"split": {"kind": "by_bytes", "megabytes": 1}},
    "per_gradient": {"split": "per_gradient"},
    "single": {"split": "single"},
    "no overlap": {"overlap": False},
    "direct": {"transport": "direct"},
    "sharded": {"transport": "sharded"},
    "sharded, a third replicated": {"transport": {"kind": "sharded", "replicated": 1 / 3}},
}
BASELINE = "default"
MEASURED, TRACE, NETWORK = "measured.json", "trace.json", "network.yaml"
"""Of a set-up, and of each of its rounds."""

Make = Callable[[], tuple[nn.Module, Loss]]


@dataclass(frozen=True)
class SetUp:
    """A model on so many ranks; ``rate`` None: over loopback."""

    make: Make
    ranks: int = 2
    rate: str | None = None


@dataclass(frozen=True)
class Measured:
    """One strategy in one round; ``ratios`` are the 95 % interval of the ratio."""

    round: int
    strategy: Mapping[str, Any]
    seconds: float
    ratio: float
    ratios: tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One strategy in one round; ``ratios`` are the 95 % interval of the measured ratio."""

    setup: str
    round: int
    strategy: str
    predicted: float
    interval: tuple[float, float]
    measured: float
    predicted_ratio: float
    ratio_interval: tuple[float, float]
    measured_ratio: float
    ratios: tuple[float, float]
    first: bool
    recommended: bool

    @property
    def seconds_held(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.interval[0] <= self.measured <= self.interval[1]

    @property
    def ratio_held(self) -> bool:
        """Likewise of the ratio."""
        return self.ratio_interval[0] <= self.measured_ratio <= self.ratio_interval[1]

    @property
    def slower(self) -> bool:
        """Whether it is recommended, and slower beyond the noise."""
        return self.recommended and self.ratios[0] > 1


def images(model: nn.Module, batch: int) -> tuple[nn.Module, Loss]:
    """With random images of 32 pixels."""
    pixels, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    return model, lambda m: nn.functional.cross_entropy(m(pixel_values=pixels).logits, labels)


def words(model: nn.Module, vocabulary: int, batch: int) -> tuple[nn.Module, Loss]:
    """With random sequences of 64 words."""
    tokens = torch.randint(vocabulary, (batch, 64))
    return model, lambda m: m(input_ids=tokens, labels=tokens).loss


def resnet18() -> nn.Module:
    """11 M parameters at 10 labels."""
    widths = [64, 128, 256, 512]
    config = ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=widths, layer_type="basic")
    config.num_labels = 10
    return ResNetForImageClassification(config)


def small_bert() -> nn.Module:
    """1 M parameters: two layers of width 128."""
    config = BertConfig(
        vocab_size=4096,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
    )
    return BertForMaskedLM(config)


SET_UPS: Mapping[str, SetUp] = {
    "ResNet-18": SetUp(lambda: images(resnet18(), 2)),
    "small ResNet": SetUp(lambda: images(models.resnet_small(), 16)),
    "BERT": SetUp(lambda: words(models.bert("tiny"), 8192, 2)),
    "GPT-2": SetUp(lambda: words(models.gpt2("tiny", 2048), 2048, 1)),
    "small BERT, 4 ranks": SetUp(lambda: words(small_bert(), 4096, 4), ranks=4),
    "small ResNet, 1 Gbit/s": SetUp(lambda: images(models.resnet_small(), 32), rate="1gbit"),
}


@joined_ranks()
def train(name: str, rounds: int, folder: Path) -> None:
    """What each rank does: a file of what it measured into ``folder``."""
    torch.manual_seed(dist.get_rank())
    model, loss_of = SET_UPS[name].make()
    ranks = connect(from_environ(), torch.device("cpu"))
    block(model, loss_of, Strategy(), WARM_UP + ITERATIONS)
    found: list[Measured] = []
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    for number in track(range(rounds), name, console=console):
        found += one_round(model, loss_of, ranks, folder, number)
    if dist.get_rank() == 0:
        (folder / MEASURED).write_text(json.dumps([asdict(one) for one in found]))


def one_round(
    model: nn.Module, loss_of: Loss, ranks: Cluster, place: Path, number: int
) -> list[Measured]:
    """Record, predict, and measure what is predicted."""
    folder = place / str(number)
    network = calibrate(
        ranks,
        sizes=SIZES[::2],
        seconds=CALIBRATION,
        rounds=5,
        curves=curves_of(["flat", "direct", "sharded"]),
    )
    trace = {"steps": STEPS, "skip": SKIP, "folder": str(folder)}
    iterate, session = accelerated(model, loss_of, {"trace": trace})
    for _ in range(SKIP + STEPS):
        iterate()
    session.close()
    said: list[Strategy] | None = None
    if dist.get_rank() == 0:
        network.save(folder / NETWORK)
        first, best, _ = predictions_of(folder)
        fixed = [Strategy.load({"gradients": dict(one)}) for one in STRATEGIES.values()]
        said = [*dict.fromkeys([first.strategy, best.strategy, *fixed])]
    assert ranks.world is not None
    strategies = broadcast_from_first(said, ranks.world)
    assert strategies is not None
    seconds: dict[Strategy, list[float]] = {one: [] for one in strategies}
    for turn in range(BLOCKS):
        for strategy in strategies[::-1] if turn % 2 else strategies:
            seconds[strategy].append(block(model, loss_of, strategy, ITERATIONS))
    baseline = seconds[Strategy()]
    found = []
    for strategy, own in seconds.items():
        ratios = [mine / its for mine, its in zip(own, baseline, strict=True)]
        between = median_interval(ratios)
        assert between is not None, "six blocks tell an interval"
        document = strategy.document()
        found.append(Measured(number, document, median(own), median(ratios), between))
    return found


def predictions_of(folder: Path) -> tuple[Prediction, Prediction, Forecast]:
    """The first of the exact strategies by the trace and the network of a round, and the one that
    is recommended."""
    forecast = Forecast.of(chrome.read(folder / TRACE), NetworkProfile.load(folder / NETWORK))
    exact = forecast.exact()
    return exact[0], forecast.recommended(exact), forecast


def compared(name: str, place: Path) -> list[Row]:
    """Predict a set-up's rounds, and put what was measured beside it.

    Raises:
        SystemExit: what is recommended now was not measured.
    """
    names = {Strategy.load({"gradients": dict(s)}): name for name, s in STRATEGIES.items()}
    measured = [Measured(**one) for one in json.loads((place / MEASURED).read_text())]
    rows = []
    for number in sorted({one.round for one in measured}):
        own = {Strategy.load(dict(m.strategy)): m for m in measured if m.round == number}
        first, best, forecast = predictions_of(place / str(number))
        if best.strategy not in own:
            raise SystemExit(f"{place}: {label(best.strategy)} was not measured; measure again")
        for one in forecast.rank(own):
            strategy, found = one.strategy, own[one.strategy]
            row = Row(
                *(name, number, names.get(strategy, label(strategy)), one.seconds, one.interval),
                *(found.seconds, one.ratio, one.ratio_interval, found.ratio, found.ratios),
                *(strategy == first.strategy, strategy == best.strategy),
            )
            rows.append(row)
    return rows


def block(model: nn.Module, loss_of: Loss, strategy: Strategy, iterations: int) -> float:
    """Seconds of an iteration, the mean over ranks."""
    iterate, session = accelerated(model, loss_of, strategy.document())
    for _ in range(WARM_UP):
        iterate()
    start = perf_counter()
    for _ in range(iterations):
        iterate()
    spent = torch.tensor([(perf_counter() - start) / iterations], dtype=torch.float64)
    session.close()
    dist.all_reduce(spent)
    return float(spent) / dist.get_world_size()


def measure(setup: SetUp, argv: list[str]) -> None:
    """Start this module's ranks with ``argv``; a failure of theirs ends this process."""
    if setup.rate is None:
        code = on_loopback(argv, setup.ranks)
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        code = on_testbed(argv, setup.ranks, setup.rate)
    if code:
        sys.exit(code)


def verdict(rows: list[Row]) -> dict[str, Any]:
    """Count what the bar is about."""
    others = [row for row in rows if row.strategy != BASELINE]
    tried = [row for row in rows if row.recommended]
    return {
        "seconds_held": fmean(row.seconds_held for row in rows),
        "ratios_held": fmean(row.ratio_held for row in others),
        "recommendations": len(tried),
        "recommended_others": sum(row.strategy != BASELINE for row in tried),
        "slower": sum(row.slower for row in tried),
        "error": median(abs(row.predicted / row.measured - 1) for row in rows),
        "ratio_error": median(abs(r.predicted_ratio / r.measured_ratio - 1) for r in others),
    }


def main() -> None:
    """Measure every set-up, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--setups", nargs="+", choices=SET_UPS, default=[*SET_UPS])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", help="keep what is measured here; what lies there is used")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--rank-of", nargs=2, metavar=("SETUP", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        train(args.rank_of[0], args.rounds, Path(args.rank_of[1]))
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.setups:
            place = Path(args.folder or temporary, name.replace("/", " ")).resolve()
            place.mkdir(parents=True, exist_ok=True)
            if not (place / MEASURED).is_file():
                measure(SET_UPS[name], ["--rank-of", name, str(place), f"--rounds={args.rounds}"])
            rows += compared(name, place)
    found = {**verdict(rows), "rounds": args.rounds, "cores": len(os.sched_getaffinity(0))}
    finish(args.json, "shared_cores", {**found, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
