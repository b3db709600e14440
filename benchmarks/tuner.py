"""How good the tuner's choice is against the best of an exhaustive grid, on the same ranks.

    python -m benchmarks.tuner --json tuner.json

The models and batches of the examples train on an emulated cluster. First the tuner works as
``slipstream tune`` does, with the same limits, but for its trials not being processes of their own.
Then every strategy of the grid is measured, in two blocks of iterations in opposite orders. At last
the tuner's choice and the grid's best train in alternation, a block each: the ratio is that of
their medians in pairs. The grid is every kind of fixed split, each with and without overlap; with
``--allow-lossy`` every codec instead, at work from the first update on, in the default split and in
one segment. Larger batches and 16-bit weights, which the tuner would also try, are left out there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from benchmarks.iteration import Loss, accelerated, on_testbed, quartiles
from benchmarks.record import arguments, finish
from benchmarks.turns import joined_ranks
from examples import data, models
from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import connect, from_environ
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.traced import gradients_of
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.candidates import LAYERS, MEGABYTES
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import Prediction
from slipstream.strategy import (
    ByBytesConfig,
    DgcConfig,
    HalfConfig,
    Int8Config,
    OneBitConfig,
    PlainCodecConfig,
    PowerSgdConfig,
    SingleConfig,
    Strategy,
    at_once,
)
from slipstream.trace import Trace, chrome
from slipstream.tuner.exact_search import UPDATES
from slipstream.tuner.trial_log import Tuned
from slipstream.tuner.trials import Measurement, iterations
from slipstream.tuner.tune import Tuner
from slipstream.tuner.turns import SETTLING

EXAMPLES = ("images", "masked_lm", "causal_lm")
SKIP = 2
CODECS: tuple[PlainCodecConfig, ...] = (
    HalfConfig(),
    Int8Config(),
    OneBitConfig(),
    DgcConfig(),
    PowerSgdConfig(),
)


@dataclass(frozen=True)
class Row:
    """One example: what the tuner chose and what it took, against the best of the grid."""

    example: str
    chosen: str
    verdict: str
    tried: int
    runs: int
    grid: int
    best: str
    best_seconds: float
    default_seconds: float
    ratio: float
    low: float
    high: float


def make_example(name: str) -> tuple[nn.Module, Loss]:
    """The model of an example as it is by default, and its loss on this rank's first batch."""
    torch.manual_seed(0)
    first = dist.get_rank()
    if name == "images":
        train, _ = data.digits(32)
        pixels, targets = train[first * 32 : (first + 1) * 32]
        loss = nn.functional.cross_entropy
        return models.resnet_small(), lambda m: loss(m(pixel_values=pixels).logits, targets)
    words = data.stdlib_tokens(8192)[first * 8 * 64 : (first + 1) * 8 * 64].view(8, 64)
    if name == "masked_lm":
        inputs, labels = data.mask_words(words, 8192, torch.Generator().manual_seed(first))
        return models.bert("tiny", 8192), lambda m: m(input_ids=inputs, labels=labels).loss
    return models.gpt2("tiny", 8192), lambda m: m(input_ids=words, labels=words).loss


def grid(gradients: Sequence[Gradient]) -> list[Strategy]:
    """The default, then every kind of fixed split, with and without overlap, no two alike."""
    splits: list[dict[str, object]] = [{"kind": "by_bytes"}]
    splits += [{"kind": "by_bytes", "megabytes": m} for m in MEGABYTES]
    splits += [
        {"kind": "by_bytes", "megabytes": m, "first_megabytes": None, "last_megabytes": None}
        for m in MEGABYTES
    ]
    splits += [{"kind": "by_layers", "layers": n} for n in LAYERS]
    splits += [{"kind": k} for k in ("by_percent", "per_layer", "per_gradient", "single")]
    found: dict[tuple[tuple[int, ...], bool], Strategy] = {}
    for split, overlap in itertools.product(splits, (True, False)):
        strategy = Strategy.load({"gradients": {"split": split, "overlap": overlap}})
        cuts = tuple(s.stop for s in plan_segments(gradients, strategy.gradients.split))
        found.setdefault((cuts, overlap), strategy)
    return list(found.values())


def lossy_grid(sgd: bool) -> list[Strategy]:
    """The default, then every codec that the optimizer allows."""
    kinds = [codec.kind for codec in CODECS if sgd or codec.kind != "dgc"]
    return [
        Strategy().with_gradients(codec=codec, split=split)
        for codec in (None, *kinds)
        for split in (ByBytesConfig(), SingleConfig())
    ]


def is_codec_alone(strategy: Strategy) -> bool:
    """Whether it keeps the batch and the weights."""
    return strategy.gradients.accumulate == 1 and strategy.precision is None


class Ranks:
    """Ranks that train under whatever strategy rank 0 tells them."""

    def __init__(self, example: str, steps: int, folder: Path) -> None:
        self._model, self._loss_of = make_example(example)
        self._steps, self._folder, self._blocks = steps, folder, itertools.count()

    def follow(self) -> None:
        """On all ranks but 0: train until there is no strategy any more."""
        while (document := self._agreed(None)) is not None:
            self._train(document)

    def dismiss(self) -> None:
        """On rank 0: the others are free."""
        self._agreed(None)

    def measure(self, strategy: Strategy, limit: float = 0.0) -> Measurement:
        """On rank 0: a block of iterations of all ranks."""
        start = time.monotonic()
        trace = chrome.read(self._train(self._agreed(strategy.document())))
        seconds = iterations(trace)
        low, _, high = quantiles(seconds, n=4, method="inclusive")
        return Measurement(median(seconds), (high - low) / 2, time.monotonic() - start, trace)

    def _agreed(self, document: dict[str, object] | None) -> dict[str, object] | None:
        box = [document]
        dist.broadcast_object_list(box)
        return box[0]

    def _train(self, document: dict[str, object] | None) -> Path:
        assert document is not None
        working = Strategy.load(document)
        codec = at_once(working.gradients.codec)  # as in the trials of `slipstream tune`
        document = working.with_gradients(codec=codec).document()
        folder = self._folder / str(next(self._blocks))
        trace = {"steps": self._steps, "skip": SKIP, "folder": str(folder)}
        iterate, session = accelerated(self._model, self._loss_of, {**document, "trace": trace})
        kinds = {working.gradients.split.kind, working.gradients.transport.kind}
        search = UPDATES + SETTLING if kinds & {"optimal", "auto"} else 0
        for _ in range(search + SKIP + self._steps):
            iterate()
        session.close()
        return folder / "trace.json"


@joined_ranks()
def train(example: str, steps: int, pairs: int, exact_only: bool, folder: Path) -> None:
    """What each rank does; rank 0 writes the row."""
    here = connect(from_environ(), torch.device("cpu"))
    codecs = () if exact_only else CODECS
    cluster = calibrate(here, sizes=SIZES[::2], seconds=20.0, rounds=5, codecs=codecs)
    ranks = Ranks(example, steps, folder / example)
    if dist.get_rank():
        ranks.follow()
    else:
        found = judge(example, ranks, cluster, pairs, exact_only)
        (folder / f"{example}.json").write_text(json.dumps(asdict(found)))
        ranks.dismiss()


def judge(example: str, ranks: Ranks, cluster: NetworkProfile, pairs: int, exact_only: bool) -> Row:
    """Tune, measure the grid, compare."""
    strategies: list[Strategy] = []

    def predict(trace: Trace, base: Strategy) -> list[Prediction]:
        forecast = Forecast.of(trace, cluster, base)
        return [p for p in forecast.lossy() if p.strategy == base or is_codec_alone(p.strategy)]

    baseline = ranks.measure(Strategy()).trace
    sgd = Forecast.of(baseline, cluster).workload.sgd
    strategies[:] = grid(gradients_of(baseline)) if exact_only else lossy_grid(sgd)
    lossy = None if exact_only else predict
    tuned = Tuner(run=ranks.measure, base=Strategy(), budget=3600.0, predict=lossy).tune()
    say(f"{example}: {tuned.verdict}")
    seconds: dict[str, list[float]] = {label(strategy): [] for strategy in strategies}
    for strategy in (*strategies, *reversed(strategies)):
        seconds[label(strategy)] += iterations(ranks.measure(strategy).trace)
    best = min(strategies, key=lambda strategy: median(seconds[label(strategy)]))
    ratios = list(in_pairs(ranks.measure, tuned.strategy, best, pairs))
    low, middle, high = quartiles(ratios)
    return Row(
        example=example,
        chosen=label(tuned.strategy),
        verdict=tuned.verdict,
        tried=tried(tuned),
        runs=sum(trial.status == "measured" for trial in tuned.trials),
        grid=len(strategies),
        best=label(best),
        best_seconds=median(seconds[label(best)]),
        default_seconds=median(seconds[label(strategies[0])]),
        ratio=middle,
        low=low,
        high=high,
    )


def tried(tuned: Tuned) -> int:
    """Strategies that the tuner measured, the baseline among them."""
    return len({str(trial.strategy) for trial in tuned.trials if trial.status == "measured"})


def in_pairs(
    measure: Callable[[Strategy], Measurement], ours: Strategy, theirs: Strategy, pairs: int
) -> Iterator[float]:
    """Our time over theirs, in blocks by turns, each first in every other pair."""
    for pair in range(pairs):
        order = (ours, theirs) if pair % 2 else (theirs, ours)
        first, second = (measure(strategy).seconds for strategy in order)
        yield first / second if pair % 2 else second / first


def say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False)


def main() -> None:
    """Start the ranks of every example, or be one."""
    parser = arguments(__doc__)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=EXAMPLES)
    parser.add_argument("--steps", type=int, default=10, help="recorded in each block")
    parser.add_argument("--pairs", type=int, default=9, help="of the last comparison")
    parser.add_argument("--allow-lossy", action="store_true", help="codecs instead of splits")
    parser.add_argument("--rank-of", nargs=2, metavar=("EXAMPLE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        example, folder = args.rank_of
        train(example, args.steps, args.pairs, not args.allow_lossy, Path(folder))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for example in args.examples:
            numbers = ["--steps", str(args.steps), "--pairs", str(args.pairs)]
            numbers += ["--allow-lossy"] if args.allow_lossy else []
            if code := on_testbed([*numbers, "--rank-of", example, folder], args.nodes, args.rate):
                sys.exit(code)
            rows.append(Row(**json.loads(Path(folder, f"{example}.json").read_text())))
    entry = {
        "nodes": args.nodes,
        "rate": args.rate,
        "steps": args.steps,
        "pairs": args.pairs,
        "lossy": args.allow_lossy,
    }
    finish(args.json, "tuner", {**entry, "rows": [asdict(r) for r in rows]})


if __name__ == "__main__":
    main()
