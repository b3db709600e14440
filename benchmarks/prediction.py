"""How well iterations are predicted: each strategy's own trace replayed, and from the baseline's.

    python benchmarks/prediction.py --json prediction.json

On every testbed (model x rate) one set of ranks measures the network, then trains under each
strategy in turn, a block of iterations each, recorded. *Replay*: a strategy's iteration predicted
from its own trace. *What-if*: predicted from the trace of the default alone, the strategy never
having run. Errors are predicted / measured - 1, measured being the median over iterations of the
mean over ranks (each begins where its last one ended, so means add up to the time of the block; the
slowest rank's would count the jitter of its start twice). Kendall's tau compares the order of the
predictions with that of the measurements.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from exchange import make_model, on_testbed
from iteration import accelerated, quartiles
from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.cluster.connect import connect, from_environ
from slipstream.planner.calibrate import SIZES, calibrate
from slipstream.planner.cost import Cluster
from slipstream.planner.exchange import Plan
from slipstream.planner.plan import prepare
from slipstream.planner.simulate import predict
from slipstream.trace import Trace, chrome
from slipstream.trace.timeline import timeline

MODELS = ("resnet50", "vgg16", "bert")
RATES = ("1gbit", "300mbit")
STRATEGIES: dict[str, dict[str, object]] = {
    "default": {},
    "by_bytes 25/1/1": {"split": {"kind": "by_bytes", "megabytes": 25}},
    "by_percent 96.54/3.46": {"split": "by_percent"},
    "per_gradient": {"split": "per_gradient"},
    "single": {"split": "single"},
    "default, no overlap": {"overlap": False},
}
BASELINE = "default"
SKIP = 2


@dataclass(frozen=True)
class Row:
    """One strategy on one testbed; seconds an iteration."""

    model: str
    rate: str
    strategy: str
    measured: float
    low: float
    high: float
    replay: float
    what_if: float | None  # None: the baseline itself


def train(model_name: str, steps: int, folder: Path) -> None:
    """What each rank does: a trace of every strategy, and the network, into ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = calibrate(
        connect(from_environ(), torch.device("cpu")), sizes=SIZES[::2], seconds=20.0, rounds=5
    )
    if dist.get_rank() == 0:
        cluster.save(folder / "cluster.yaml")
    model, loss_of, _ = make_model(model_name)
    for name, gradients in STRATEGIES.items():
        trace = {"steps": steps, "skip": SKIP, "folder": str(folder / name)}
        iterate, session = accelerated(model, loss_of, {"gradients": gradients, "trace": trace})
        for _ in range(SKIP + steps):
            iterate()
        session.close()
    dist.barrier()
    dist.destroy_process_group()


def compare(model: str, rate: str, folder: Path) -> tuple[list[Row], float]:
    """Predictions against measurements of one testbed, and Kendall's tau."""
    cluster = Cluster.load(folder / "cluster.yaml")
    traces = {name: chrome.read(folder / name / "trace.json") for name in STRATEGIES}
    rows = []
    for name, trace in traces.items():
        low, measured, high = quartiles(seconds(trace))
        replay = predicted(trace, trace, cluster)
        what_if = None if name == BASELINE else predicted(traces[BASELINE], trace, cluster)
        rows.append(Row(model, rate, name, measured, low, high, replay, what_if))
    orders = [(r.measured, r.replay if r.what_if is None else r.what_if) for r in rows]
    return rows, kendall(orders)


def seconds(trace: Trace) -> list[float]:
    """Of each iteration, the mean over ranks."""
    steps: dict[int, list[float]] = {}
    for one in timeline(trace.events):
        steps.setdefault(one.step, []).append(one.duration)
    return [fmean(durations) for durations in steps.values()]


def predicted(source: Trace, target: Trace, cluster: Cluster) -> float:
    """Seconds an iteration under the plan of ``target``, from the trace ``source``."""
    workload, fitted = prepare(source, cluster)
    return predict(workload, Plan.of_trace(target), fitted)


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Tau a: concordant minus discordant pairs, over all pairs."""
    signs = [
        1 if (a[0] - b[0]) * (a[1] - b[1]) > 0 else -1 for a, b in itertools.combinations(pairs, 2)
    ]
    return sum(signs) / len(signs)


def errors(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that matter, over all rows."""
    replay = [abs(r.replay / r.measured - 1) for r in rows]
    what_if = [abs(r.what_if / r.measured - 1) for r in rows if r.what_if is not None]
    return {
        "replay_median": median(replay),
        "replay_worst": max(replay),
        "what_if_median": median(what_if),
        "what_if_worst": max(what_if),
    }


def table(rows: Sequence[Row], taus: Mapping[str, float]) -> Table:
    """What a person reads."""
    found = errors(rows)
    drawn = Table(
        title="Predicted iterations",
        caption=f"Replay: median {found['replay_median']:.1%}, worst {found['replay_worst']:.1%}. "
        f"What-if: median {found['what_if_median']:.1%}, worst {found['what_if_worst']:.1%}.",
    )
    for heading in ("testbed", "strategy", "measured s", "quartiles", "replay", "what-if", "tau"):
        drawn.add_column(heading, justify="right" if heading[0] in "mrwq" else "left")
    for testbed, group in itertools.groupby(rows, key=lambda r: f"{r.model}, {r.rate}"):
        drawn.add_section()
        for r in group:
            baseline = r.strategy == BASELINE
            drawn.add_row(
                testbed if baseline else "",
                r.strategy,
                f"{r.measured:.3f}",
                f"{r.low:.3f}..{r.high:.3f}",
                f"{r.replay / r.measured - 1:+.1%}",
                "" if r.what_if is None else f"{r.what_if / r.measured - 1:+.1%}",
                f"{taus[testbed]:.2f}" if baseline else "",
            )
    return drawn


def main() -> None:
    """Measure every testbed and compare, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=7, help="recorded, of each strategy")
    parser.add_argument("--folder", help="keep traces and clusters here; what lies there is used")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--rank-of", nargs=2, metavar=("MODEL", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        train(args.rank_of[0], args.steps, Path(args.rank_of[1]))
        return
    rows: list[Row] = []
    taus: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for rate, model in itertools.product(args.rates, args.models):
            folder = Path(args.folder or temporary, f"{model}-{rate}")
            if not (folder / list(STRATEGIES)[-1] / "trace.json").is_file():
                folder.mkdir(parents=True, exist_ok=True)
                words = ["--steps", str(args.steps), "--rank-of", model, str(folder.resolve())]
                if code := on_testbed(words, args.nodes, rate):
                    sys.exit(code)
            found, taus[f"{model}, {rate}"] = compare(model, rate, folder)
            rows += found
    Console(width=120).print(table(rows, taus))
    if args.json:
        facts = {
            "benchmark": "prediction",
            "date": date.today().isoformat(),
            "nodes": args.nodes,
            "steps": args.steps,
            "errors": errors(rows),
            "taus": taus,
            "versions": {"torch": torch.__version__, "slipstream": slipstream.__version__},
            "command": " ".join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
        }
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(
            json.dumps({**facts, "rows": [asdict(r) for r in rows]}, indent=1) + os.linesep
        )


if __name__ == "__main__":
    main()
