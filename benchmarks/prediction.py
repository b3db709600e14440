"""How well iterations are predicted: each strategy's own trace replayed, and from the baseline's.

    python -m benchmarks.prediction --json prediction.json

On every testbed (model x rate) one set of ranks measures the network, then trains under each
strategy in turn, a block of iterations each, recorded; and once more in the opposite order, so that
what drifts meanwhile is no strategy's. A block that does not count comes first, for a cold start
would be the baseline's. *Replay*: a strategy's iteration predicted from its own
trace; not that of ``sharded``, which does not tell forward from its wait for parameters. *What-if*:
predicted from the trace of the default alone, the strategy never having run.
Predictions are the mean of those from the two blocks; all are seconds for one batch of each rank,
a fourth of an update where four batches are accumulated. Errors are predicted / measured - 1,
measured being the median over iterations of the mean over ranks (each begins where its last one
ended, so means add up to the time of the block; the slowest rank's would count the jitter of its
start twice).

*Advice*: the first finding about the exchange that `advise` makes of the default's trace, under
`advised`; the default and it take turns once more, ADVICE_BLOCKS blocks each, and what the finding
promises stands beside what that brought.

Kendall's tau compares the order of the predictions with that of the measurements: over all pairs of
strategies that do not accumulate (these order themselves), and over those whose order the
measurement knows, i.e. where the 95 % intervals of the two medians do not overlap. Beside them
stands the tau of the first block's measurements with the second's: where strategies lie closer
together than two measurements of one, no prediction can do better than that.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist

from benchmarks.cases import make_model
from benchmarks.iteration import accelerated, on_testbed, quartiles
from benchmarks.record import finish
from benchmarks.turns import joined_ranks
from slipstream.advisor.advise import advise
from slipstream.advisor.findings import Finding
from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import connect, from_environ
from slipstream.planner.iteration.contention_fit import read_trace
from slipstream.planner.iteration.model import predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.traced import traced_strategy
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.label import label
from slipstream.strategy import HalfConfig, Int8Config, PowerSgdConfig, Strategy
from slipstream.trace import Trace, chrome
from slipstream.tuner.significance import median_interval
from slipstream.tuner.trials import iterations

MODELS = ("resnet50", "vgg16", "bert", "gpt2", "swin-t")
"""``gpt2`` and ``swin-t`` were never looked at while the predictions were made."""
RATES = ("1gbit", "300mbit")
STRATEGIES: dict[str, dict[str, object]] = {
    "default": {},
    "by_bytes 25/1/1": {"split": {"kind": "by_bytes", "megabytes": 25}},
    "by_percent 96.54/3.46": {"split": "by_percent"},
    "per_gradient": {"split": "per_gradient"},
    "single": {"split": "single"},
    "default, no overlap": {"overlap": False},
    "default, accumulate 2": {"accumulate": 2},
    "default, accumulate 4": {"accumulate": 4},
    "direct": {"transport": "direct"},
    "sharded": {"transport": "sharded"},
    "sharded, a third replicated": {"transport": {"kind": "sharded", "replicated": 1 / 3}},
    "half": {"codec": "half"},
    "int8": {"codec": "int8"},
    "powersgd": {"codec": {"kind": "powersgd", "start_step": 0}},
}
PRECISIONS: dict[str, dict[str, object]] = {"half weights": {"precision": "half_weights"}}
CODECS = (HalfConfig(), Int8Config(), PowerSgdConfig())
BASELINE, ADVISED = "default", "advised"
EXACT = ("gradients.split", "gradients.overlap", "gradients.transport")
"""Where advice keeps the mathematics."""
SKIP = 2
BLOCKS = 2
ADVICE_BLOCKS = 4
DONE = "done"


@dataclass(frozen=True)
class Row:
    """One strategy on one testbed; seconds for a batch."""

    model: str
    rate: str
    strategy: str
    measured: float
    low: float
    high: float
    replay: float | None  # None: sharded
    what_if: float | None  # None: the baseline itself

    @property
    def from_baseline(self) -> float:
        """What the baseline's trace says."""
        seconds = self.replay if self.what_if is None else self.what_if
        assert seconds is not None
        return seconds


@dataclass(frozen=True)
class Advice:
    """The first advice on one testbed: gains as parts of an iteration, those of pairs of blocks."""

    model: str
    rate: str
    strategy: str
    promised: float
    low: float
    measured: float
    high: float


@dataclass(frozen=True)
class Order:
    """Kendall's tau over all pairs, and over the ``num_told_apart`` whose order is known.

    ``tau_again`` is that of one block's measurements with the other's: what an order that is as
    good as measured once more would reach.
    """

    tau: float
    tau_told_apart: float
    num_told_apart: int
    tau_again: float


@joined_ranks()
def train(model_name: str, names: Sequence[str], steps: int, folder: Path) -> None:
    """What each rank does: a trace of every strategy, and the network, into ``folder``."""
    cluster = calibrate(
        connect(from_environ(), torch.device("cpu")),
        sizes=SIZES[::2],
        seconds=20.0,
        rounds=5,
        codecs=CODECS,
        half=True,
    )
    if dist.get_rank() == 0:
        cluster.save(folder / "cluster.yaml")
    again = (folder / DONE).is_file()  # the traces lie there: what they advise may be another
    said = [advised(folder, cluster) if again and dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said)
    if again and (said[0] is None or patched(said[0]) == measured_advice(folder)):
        return
    model, loss_of, _ = make_model(model_name)
    iterate, session = accelerated(model, loss_of, {"gradients": STRATEGIES[BASELINE]})
    for _ in range(SKIP + steps):
        iterate()
    session.close()

    def record(strategy: Mapping[str, object], path: Path) -> None:
        trace = {"steps": steps, "skip": SKIP, "folder": str(path.parent)}
        iterate, session = accelerated(model, loss_of, {**strategy, "trace": trace})
        for _ in range((SKIP + steps) * session.strategy.gradients.accumulate):
            iterate()
        session.close()

    if not again:
        for block, name in blocks(names):
            record(strategy_of(name), trace_of(folder, name, block))
        said = [advised(folder, cluster) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(said)
    if said[0] is not None:
        for block, name in blocks((BASELINE, ADVISED), ADVICE_BLOCKS):
            patch = said[0].patch["gradients"] if name == ADVISED else {}
            record({"gradients": patch}, trace_of(folder, f"advice, {name}", block))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / DONE).touch()


def patched(finding: Finding) -> str:
    """The exchange that a finding advises, in words."""
    return label(Strategy.load({"gradients": finding.patch["gradients"]}))


def measured_advice(folder: Path) -> str:
    """The advised exchange that was measured on a testbed, in words; empty: none was."""
    file = trace_of(folder, f"advice, {ADVISED}", 0)
    return label(traced_strategy(chrome.read(file))) if file.exists() else ""


def advised(folder: Path, cluster: NetworkProfile) -> Finding | None:
    """What the trace of the first block of the default says about the exchange, if anything."""
    findings = advise(chrome.read(trace_of(folder, BASELINE, 0)), cluster)
    exact = [f for f in findings if f.where in EXACT]
    return exact[0] if exact else None


def strategy_of(name: str) -> dict[str, object]:
    """The settings of a row."""
    return PRECISIONS.get(name) or {"gradients": STRATEGIES[name]}


def blocks(names: Sequence[str], count: int = BLOCKS) -> list[tuple[int, str]]:
    """Every strategy in every block, forth and back."""
    return [
        (block, name) for block in range(count) for name in (names[::-1] if block % 2 else names)
    ]


def trace_of(folder: Path, name: str, block: int) -> Path:
    """Where the trace of one block lies."""
    return folder / name / str(block) / "trace.json"


def compare(model: str, rate: str, names: Sequence[str], folder: Path) -> tuple[list[Row], Order]:
    """Predictions against measurements of one testbed."""
    cluster = NetworkProfile.load(folder / "cluster.yaml")
    traces = {
        name: [chrome.read(trace_of(folder, name, block)) for block in range(BLOCKS)]
        for name in names
    }
    rows, known = [], []
    for name, own in traces.items():
        measured = [value for trace in own for value in seconds(trace)]
        low, middle, high = quartiles(measured)
        replay = what_if = None
        if "sharded" not in name:
            replay = fmean(predicted(trace, trace, cluster) for trace in own)
        if name != BASELINE:
            pairs = zip(traces[BASELINE], own, strict=True)
            what_if = fmean(predicted(source, target, cluster) for source, target in pairs)
        rows.append(Row(model, rate, name, middle, low, high, replay, what_if))
        interval = median_interval(measured)
        assert interval is not None, "six iterations or more of both blocks tell an interval"
        known.append(interval)
    return rows, order(rows, known, traces.values())


def advice(model: str, rate: str, folder: Path) -> Advice:
    """What was promised on one testbed, and what it brought.

    Raises:
        SystemExit: what was measured there is not what is advised now.
    """
    cluster = NetworkProfile.load(folder / "cluster.yaml")
    finding = advised(folder, cluster)
    if finding is None:
        return Advice(model, rate, "nothing", 0.0, 0.0, 0.0, 0.0)
    said, measured = patched(finding), measured_advice(folder)
    if said != measured:
        raise SystemExit(f"{folder}: {said} is advised, {measured or 'nothing'} was measured")
    ours, theirs = (
        [seconds(chrome.read(trace_of(folder, f"advice, {name}", block)))
         for block in range(ADVICE_BLOCKS)]
        for name in (ADVISED, BASELINE)
    )  # fmt: skip
    pairs = zip(ours, theirs, strict=True)
    gains = [1 - median(mine) / median(its) for mine, its in pairs]
    now = seconds(chrome.read(trace_of(folder, BASELINE, 0)))
    return Advice(model, rate, said, finding.gain / median(now), *quartiles(gains))


def seconds(trace: Trace) -> list[float]:
    """Of each iteration, for a batch."""
    batches = trace.meta["strategy"]["gradients"].get("accumulate", 1)
    return [duration / batches for duration in iterations(trace)]


def predicted(source: Trace, target: Trace, cluster: NetworkProfile) -> float:
    """Seconds for a batch under the plan of ``target``, from the trace ``source``."""
    workload, fitted = read_trace(source, cluster)
    plan = CommPlan.of_trace(target, cluster.codecs)
    if plan.half != workload.half:  # a plan lists no bytes: those of the source are halved
        plan = CommPlan.of(traced_strategy(target), workload.gradients, cluster.codecs)
    return predict(workload, plan, fitted) / plan.accumulate


def order(
    rows: Sequence[Row], known: Sequence[tuple[float, float]], traces: Iterable[Sequence[Trace]]
) -> Order:
    """Kendall's tau of the predictions; ``known`` are the 95 % intervals of what was measured."""
    chosen = [i for i, r in enumerate(rows) if "accumulate" not in r.strategy]
    rows, known = [rows[i] for i in chosen], [known[i] for i in chosen]
    traces = [own for i, own in enumerate(traces) if i in chosen]
    every = agreements([r.measured for r in rows], [r.from_baseline for r in rows])
    told_apart = [
        agreement
        for agreement, (a, b) in zip(every, itertools.combinations(known, 2), strict=True)
        if a[1] < b[0] or b[1] < a[0]
    ]
    again = zip(*([median(seconds(block)) for block in own] for own in traces), strict=True)
    return Order(
        tau=fmean(every),
        tau_told_apart=fmean(told_apart) if told_apart else 1.0,
        num_told_apart=len(told_apart),
        tau_again=fmean(agreements(*again)),
    )


def agreements(ones: Sequence[float], others: Sequence[float]) -> list[int]:
    """Of every pair of places, 1 where both have it in the same order, else -1."""
    pairs = itertools.combinations(zip(ones, others, strict=True), 2)
    return [1 if (a - b) * (x - y) > 0 else -1 for (a, x), (b, y) in pairs]


def errors(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that matter, over all rows."""
    replay = [abs(r.replay / r.measured - 1) for r in rows if r.replay is not None]
    what_if = [abs(r.what_if / r.measured - 1) for r in rows if r.what_if is not None]
    return {
        "replay_median": median(replay),
        "replay_worst": max(replay),
        "what_if_median": median(what_if),
        "what_if_worst": max(what_if),
    }


def main() -> None:
    """Measure every testbed and compare, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument(
        "--strategies",
        nargs="*",
        choices=[*STRATEGIES, *PRECISIONS],
        default=[*STRATEGIES, *PRECISIONS],
        help=f"besides {BASELINE}; default: all",
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="recorded in each block")
    parser.add_argument("--folder", help="keep traces and clusters here; what lies there is used")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the networks again that --folder holds, and predict its traces by them",
    )
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--rank-of", nargs=2, metavar=("MODEL", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 3:
        parser.error(f"--steps {args.steps}: 3 or more tell an interval")
    names = list(dict.fromkeys([BASELINE, *args.strategies]))
    if args.rank_of:
        train(args.rank_of[0], names, args.steps, Path(args.rank_of[1]))
        return
    rows: list[Row] = []
    orders: dict[str, Order] = {}
    advices: list[Advice] = []
    with tempfile.TemporaryDirectory() as temporary:
        for rate, model in itertools.product(args.rates, args.models):
            folder = Path(args.folder or temporary, f"{model}-{rate}")
            if args.calibrate or not (folder / DONE).is_file():
                folder.mkdir(parents=True, exist_ok=True)
                words = ["--steps", str(args.steps), "--rank-of", model, str(folder.resolve())]
                words += ["--strategies", *names]
                if code := on_testbed(words, args.nodes, rate):
                    sys.exit(code)
            found, orders[f"{model}, {rate}"] = compare(model, rate, names, folder)
            rows += found
            advices.append(advice(model, rate, folder))
    entry = {
        "nodes": args.nodes,
        "steps": args.steps,
        "calibrated_again": args.calibrate,
        "errors": errors(rows),
        "orders": {testbed: asdict(found) for testbed, found in orders.items()},
        "advice": [asdict(one) for one in advices],
    }
    finish(args.json, "prediction", {**entry, "rows": [asdict(r) for r in rows]})


if __name__ == "__main__":
    main()
