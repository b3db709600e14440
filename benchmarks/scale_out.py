"""Predictions of runs on hundreds to thousands of ranks, held to public measurements.

    python -m benchmarks.scale_out --json benchmarks/results/scale-out.json
    python -m benchmarks.scale_out --rows more.csv --slow-rows more_slow.csv

Four comparisons, each fitted on the smaller or faster runs and tried on the others:

- transformers under tensor, data and pipeline parallelism (``data/multi_node_iterations.csv``):
  five numbers of the machine, fitted on runs of up to 256 GPUs, predict those on 512;
- rare meetings over shaped TCP (``data/slow_tcp_steps.csv``): the part of the link that a ring
  reaches, and the time of a step alone, of each algorithm at 5 Gbit/s, predict 200 Mbit/s;
- a model of 175 billion parameters (``data/megascale_table_2.csv``): two numbers of each system,
  fitted on 256 and 512 GPUs, predict up to 12,288;
- seconds to simulate 12 strategies on 4,096 ranks.

``--rows`` and ``--slow-rows`` name files of the same columns. Their rows are only predicted, each
by the fit of the rows in ``data``; nothing is fitted on them.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
from scipy.optimize import least_squares

from benchmarks.record import finish
from benchmarks.result import Entry
from slipstream.gradients.layout import Gradient
from slipstream.planner.iteration.model import seconds_of
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.fit import Array
from slipstream.planner.network.profile import FRAMES, NetworkProfile
from slipstream.planner.scale_out.collectives import LinkSpeed, machines, network, ring_all_reduce
from slipstream.planner.scale_out.growth import Placement, techniques
from slipstream.planner.scale_out.shape import ScaleOutConfig
from slipstream.planner.scale_out.transformer import profile, workload
from slipstream.strategy import Strategy
from slipstream.testbed import parse_rate

DATA = Path(__file__).parent / "data"
FITTED_UP_TO = 256
"""GPUs of the runs that are fitted."""
VOCABULARY = 51_200
"""Of GPT-2, padded so that eight ranks can share it."""
NO_OVERLAP = Strategy.load({"gradients": {"split": "single", "overlap": False}})
"""The exchange of Megatron-LM: one, after backward."""

MACHINE = {
    "teraflops": (10.0, 312.0),
    "memory_gbytes": (100.0, 2039.0),
    "layer_ms": (0.01, 50.0),
    "inside_gbytes": (10.0, 300.0),
    "host_gbytes": (1.0, 200.0),
}
"""What is fitted of hosts with eight A100, from the least that is plausible to their data sheet."""
SYSTEM = {"teraflops": (10.0, 312.0), "update_ms": (0.1, 10_000.0)}
"""What is fitted of each system that trained 175 billion parameters."""
SHEET = {"memory_gbytes": 2039.0, "inside_gbytes": 300.0, "host_gbytes": 200.0}
"""The rest of its hosts, by their data sheet."""

STRATEGIES, RANKS = 12, 4096


@dataclass(frozen=True)
class Row:
    """A published run, and its prediction.

    Attributes:
        name: of the run.
        kind: ``fitted``, or ``predicted`` from the fit of the others.
        measured: seconds.
        predicted: likewise.
    """

    name: str
    kind: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative; above 0 where predicted too slow."""
        return self.predicted / self.measured - 1


# Transformers on hosts of eight A100.


def read(file: Path) -> list[dict[str, str]]:
    """Rows by column."""
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def iteration(row: Mapping[str, str], machine: Mapping[str, float]) -> float:
    """Predict a row of ``multi_node_iterations.csv``, in seconds."""
    number = {name: int(value) for name, value in row.items() if value.isdigit()}
    shape = ScaleOutConfig.model_validate(
        {
            "model": {
                "hidden": number["hidden size"],
                "layers": number["# layers"],
                "heads": number["attention heads"],
                "sequence": number["sequence length"],
                "vocabulary": VOCABULARY,
            },
            "batch": {"micro": number["micro batch"], "total": number["global batch"]},
            "machine": {"ranks_per_host": 8, **machine},
            "parallel": {
                "tensor": number["tensor parallelism"],
                "pipeline": number["pipeline parallelism"],
            },
        }
    )
    return _seconds(shape, number["# GPUs"])


def _seconds(shape: ScaleOutConfig, gpus: int) -> float:
    return seconds_of(NO_OVERLAP, workload(shape, gpus), profile(shape, gpus))


Published = Mapping[str, str]
Model = Callable[[Published, Mapping[str, float]], float]


def fit(
    rows: Sequence[Published],
    seconds: Sequence[float],
    model: Model,
    bounds: Mapping[str, tuple[float, float]],
) -> dict[str, float]:
    """Find the numbers of a machine with the least squared relative errors."""
    least, most = np.log(np.array(list(bounds.values()))).T

    def errors(numbers: Array) -> Array:
        machine = dict(zip(bounds, np.exp(numbers).tolist(), strict=True))
        return np.log([model(row, machine) for row in rows]) - np.log(seconds)

    found = least_squares(errors, (least + 2 * most) / 3, bounds=(least, most))
    return dict(zip(bounds, np.exp(found.x).tolist(), strict=True))


def transformers(more: Path | None) -> Entry:
    """Fit on up to 256 GPUs; predict these, those on more, and the rows of another file."""
    rows = read(DATA / "multi_node_iterations.csv")
    small = [row for row in rows if int(row["# GPUs"]) <= FITTED_UP_TO]
    large = [row for row in rows if int(row["# GPUs"]) > FITTED_UP_TO]
    machine = _machine(small)
    left_out = [
        iteration(row, _machine([*small[:i], *small[i + 1 :]])) / _measured(row) - 1
        for i, row in enumerate(small)
    ]
    found = [_row(row, "fitted", machine) for row in small]
    found += [_row(row, "predicted", machine) for row in large]
    further = [_row(row, "further", machine) for row in (read(more) if more else ())]
    at_512 = [row for row in found if row.kind == "predicted"]
    itself = _machine(large)
    return {
        "machine": machine,
        "rows": _worst_first([*found, *further]),
        "left_out_median": median(map(abs, left_out)),
        **_summary(at_512, "512"),
        "tau_512": tau(at_512),
        "tau_512_fitted_on_themselves": tau([_row(row, "", itself) for row in large]),
        "tau_all": tau(found),
        **(_summary(further, "further") | {"tau_further": tau(further)} if further else {}),
    }


def _machine(rows: Sequence[Published]) -> dict[str, float]:
    return fit(rows, [_measured(row) for row in rows], iteration, MACHINE)


def _measured(row: Published) -> float:
    return float(row["iteration time (ms)"]) / 1e3


def _row(row: Published, kind: str, machine: Mapping[str, float]) -> Row:
    sizes = (f"{row[f'{one} parallelism']}" for one in ("tensor", "data", "pipeline"))
    name = f"{row['Parameters (billion)']} billion, {row['# GPUs']} GPUs, {' x '.join(sizes)}"
    name = f"{name}, micro-batch {row['micro batch']}"
    return Row(name, kind, _measured(row), iteration(row, machine))


def tau(rows: Sequence[Row]) -> float:
    """Compute Kendall's tau of the order of the predictions and of the measurements.

    Example:
        >>> tau([Row("a", "", 1.0, 2.0), Row("b", "", 2.0, 3.0), Row("c", "", 3.0, 2.5)])
        0.3333333333333333
    """
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[:i]]
    signs = [
        np.sign(a.measured - b.measured) * np.sign(a.predicted - b.predicted) for a, b in pairs
    ]
    return float(fmean(signs)) if signs else 1.0


def _summary(rows: Sequence[Row], name: str) -> dict[str, float]:
    errors = [abs(row.error) for row in rows]
    return {f"median_{name}": median(errors), f"worst_{name}": max(errors)}


def _worst_first(rows: Sequence[Row]) -> list[dict[str, float | str]]:
    ordered = sorted(rows, key=lambda row: -abs(row.error))
    return [asdict(row) | {"error": row.error} for row in ordered]


# Rare meetings over shaped TCP.


def slow_steps(more: Path | None) -> Entry:
    """Fit each algorithm on its rows at 5 Gbit/s; predict all others."""
    rows = read(DATA / "slow_tcp_steps.csv")
    others = read(more) if more else []
    fitted: list[Published] = []
    by_algorithm = {}
    for algorithm in dict.fromkeys(row["algorithm"] for row in (*rows, *others)):
        fast = [row for row in rows if _is_fast(row, algorithm)]
        fast = fast or [row for row in others if _is_fast(row, algorithm)]
        if not fast:
            raise SystemExit(f"{more}: {algorithm}: no row of it at 5g, which its others need")
        fitted += fast
        by_algorithm[algorithm] = {
            "reached": median(_wire(row) / float(row["median_blocked_ms"]) for row in fast),
            "alone_ms": median(
                float(row["mean_step_ms"]) - float(row["median_blocked_ms"]) * _met(row)
                for row in fast
            ),
        }
    found = [
        _slow_row(row, "fitted" if row in fitted else kind, by_algorithm[row["algorithm"]])
        for kind, some in (("predicted", rows), ("further", others))
        for row in some
    ]
    answer: dict[str, object] = {"algorithms": by_algorithm, "rows": _worst_first(found)}
    for kind, name in (("predicted", "slow"), ("further", "further")):
        if some := [row for row in found if row.kind == kind]:
            answer |= _summary(some, name)
    return answer


def _is_fast(row: Published, algorithm: str) -> bool:
    return (row["algorithm"], row["link"]) == (algorithm, "5g")


def _steps(row: Published) -> int:
    return int(row["local_steps"])


def _met(row: Published) -> float:
    """Exchanges of a step, in the mean of the steps that were recorded: whole rounds have one."""
    return int(row["steps"]) // _steps(row) / int(row["steps"])


def _wire(row: Published) -> float:
    """Milliseconds of a ring that fills the link, frames counted."""
    rate = parse_rate(f"{row['link']}bit") / 8 / FRAMES
    return 1e3 * ring_all_reduce(
        4 * int(row["parameters"]), int(row["ranks"]), LinkSpeed(0.0, rate)
    )


def _slow_row(row: Published, kind: str, algorithm: Mapping[str, float]) -> Row:
    """Predict the mean step as the planner does: ``local``, or an exchange after backward."""
    rate = parse_rate(f"{row['link']}bit") / 8 / FRAMES * algorithm["reached"]
    ranks, steps = int(row["ranks"]), _steps(row)
    one = np.ones(ranks)
    alone = algorithm["alone_ms"] / 1e3 * one
    work = Workload(
        gradients=(Gradient("all", "", 4 * int(row["parameters"])),),
        data_wait=0 * one,
        forward=0 * one,
        backward=alone,
        ready=alone[:, None],
        optimizer=0 * one,
        other=0 * one,
        samples=one,
    )
    strategy = Strategy.load({"local": {"steps": steps}}) if steps > 1 else NO_OVERLAP
    in_the_long_run = seconds_of(strategy, work, _shaped(ranks, rate)) - alone[0]
    predicted = float(alone[0] + in_the_long_run * steps * _met(row))
    name = f"{row['algorithm']}, {steps} steps, {row['link']}bit, run {row['run']}"
    return Row(name, kind, float(row["mean_step_ms"]) / 1e3, predicted)


def _shaped(ranks: int, rate: float) -> NetworkProfile:
    """Machines of one rank on links of this rate, bytes/s."""
    return machines(
        {"world": network("world", ranks, LinkSpeed(0.0, rate), backend="gloo")}, ranks, 1
    )


# 175 billion parameters on up to 12,288 GPUs.


def megascale() -> Entry:
    """Fit each system on 256 and 512 GPUs; predict the others.

    The paper names no micro-batch and no recomputation: micro-batches of 1 without are assumed.
    """

    def model(row: Published, numbers: Mapping[str, float]) -> float:
        shape = ScaleOutConfig.model_validate(
            {
                "model": {
                    "hidden": 12288, "layers": 96, "heads": 128, "sequence": 2048,
                    "vocabulary": 64_000, "recompute": False,
                },
                "batch": {"micro": 1, "total": int(row["global batch"])},
                "machine": {"ranks_per_host": 8, **SHEET, **numbers},
                "parallel": {"tensor": 8, "pipeline": 8, "interleaved": 6},
            }
        )  # fmt: skip
        return _seconds(shape, int(row["GPUs"]))

    rows = read(DATA / "megascale_table_2.csv")
    found: list[Row] = []
    systems = {}
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        seconds = [float(row["iteration time (s)"]) for row in own]
        small = [row for row in own if int(row["GPUs"]) <= 2 * FITTED_UP_TO]
        systems[system] = fit(small, seconds[: len(small)], model, SYSTEM)
        for row, measured in zip(own, seconds, strict=True):
            kind = "fitted" if row in small else "predicted"
            name = f"{system}, {row['GPUs']} GPUs, batch {row['global batch']}"
            found.append(Row(name, kind, measured, model(row, systems[system])))
    predicted = [row for row in found if row.kind == "predicted"]
    return {"systems": systems, "rows": _worst_first(found), **_summary(predicted, "larger")}


# Seconds that it takes.


def simulated() -> Entry:
    """Simulate twelve strategies of a data-parallel transformer on 4,096 ranks."""
    shape = ScaleOutConfig.model_validate(
        {
            "model": {
                "hidden": 2048, "layers": 24, "heads": 16, "sequence": 2048, "vocabulary": 51_200,
            },
            "batch": {"micro": 4, "per_replica": 4},
            "machine": {
                "ranks_per_host": 8, "teraflops": 250.0, "memory_gbytes": 850.0,
                "inside_gbytes": 290.0, "host_gbytes": 12.5, "backend": "gloo",
            },
            "fabric": {"hosts_per_rack": 16, "oversubscription": 4.0, "jitter": 0.02},
        }
    )  # fmt: skip
    start = time.perf_counter()
    place = Placement(workload(shape, RANKS), profile(shape, RANKS))
    tried = list(_distinct(place))[:STRATEGIES]
    assert len(tried) == STRATEGIES
    seconds = [seconds_of(one, *place) for one in tried]
    took = time.perf_counter() - start
    return {"strategies": len(seconds), "ranks": RANKS, "seconds": took}


def _distinct(place: Placement) -> Iterator[Strategy]:
    found = techniques(Strategy.load("ddp"), place, lossy=True)
    yield from dict.fromkeys(one for variants in found.values() for one in variants)


def example() -> Entry:
    """Run the command of the page."""
    command = "slipstream plan --shape examples/scale_out/shape.yaml --ranks 64..4096 --allow-lossy"
    argv = [sys.executable, "-m", *command.split()]
    env, root = os.environ | {"COLUMNS": "80"}, DATA.parents[1]
    done = subprocess.run(argv, cwd=root, env=env, check=True, capture_output=True, text=True)
    return {"command": command, "said": done.stdout}


def main() -> int:
    """Compare, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, help="further rows, as multi_node_iterations.csv")
    parser.add_argument("--slow-rows", type=Path, help="further rows, as slow_tcp_steps.csv")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    entry = {
        "transformers": transformers(args.rows),
        "slow": slow_steps(args.slow_rows),
        "megascale": megascale(),
        "simulated": simulated(),
        "example": example(),
    }
    finish(args.json, "scale_out", entry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
