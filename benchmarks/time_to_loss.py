"""Time to a loss, predicted from a short calibration and measured, for twelve strategies.

    python -m benchmarks.time_to_loss --json results/time-to-loss.json

*Updates.* Updates to a loss do not depend on the network's rate. So each strategy trains once for
all rates, on four ranks of one host, from one start on the same batches; exact ones share the
baseline's run by definition. The calibration is the first part of these runs: `--calibration`
updates of the baseline, and as many batches of each other. The baseline's part is traced with norms
of gradients, for the gradient noise scale.

*Seconds.* At each rate all strategies take turns on emulated hosts, BATCHES batches a turn, whole
rounds of ``local``. The first CALIBRATED rounds are the calibration's; what counts as measured are
rounds after these. Beside them stands what `slipstream plan` would forecast from a trace of the
baseline and the measured network.

*Targets* are the losses of the baseline after 3 and 4 times the updates of the calibration. A loss
is reached where the mean over the updates from ``u / 1.15`` to ``1.15 u`` is there; its interval is
that at one standard error of this mean, of the noise that the baseline has not. Where it is not
reached in the run, the time is only known to be longer. Kendall's tau counts pairs of strategies on
one testbed that the measurement tells apart: their intervals do not overlap. Regret is the measured
time of the first choice over the least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import inf, isinf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import slipstream
from benchmarks.cases import share_cores
from benchmarks.iteration import on_loopback, on_testbed, quartiles
from benchmarks.record import finish
from benchmarks.time_to_loss_tasks import TASKS, Task
from benchmarks.turns import joined_ranks, seconds_of, take_turns
from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import connect, from_environ
from slipstream.errors import SlipstreamError
from slipstream.planner.forecast import Forecast
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.progress.calibration import (
    LossCalibration,
    LossRun,
    mathematics,
    noise_of_gradients,
)
from slipstream.planner.progress.curve import noise_of
from slipstream.planner.progress.time_to_loss import LossForecast, Timed, verdict
from slipstream.strategy import HalfConfig, Int4Config, Int8Config, PowerSgdConfig, Strategy
from slipstream.strategy.codec import OneBitConfig
from slipstream.trace import chrome

BASELINE = "default"
STRATEGIES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "direct": {"gradients": {"transport": "direct"}},
    "sharded": {"gradients": {"transport": "sharded"}},
    "bf16": {"gradients": {"codec": "half"}},
    "int8": {"gradients": {"codec": "int8"}},
    "onebit": {"gradients": {"codec": {"kind": "onebit", "start_step": 0}}},
    "powersgd": {"gradients": {"codec": {"kind": "powersgd", "start_step": 0}}},
    "accumulate 2": {"gradients": {"accumulate": 2}},
    "accumulate 4": {"gradients": {"accumulate": 4}},
    "local, 8 steps": {"local": {"steps": 8}},
    "local, 16 steps, int8": {"local": {"steps": 16, "codec": "int8"}},
    "local, 32 steps, int4": {"local": {"steps": 32, "codec": "int4"}},
}
CODECS = (
    HalfConfig(), Int8Config(), Int4Config(), OneBitConfig(start_step=0),
    PowerSgdConfig(start_step=0),
)  # fmt: skip
RATES = ("100mbit", "1gbit")
RANKS = 4
TIMES = (3, 4)
BATCHES = 32
CALIBRATED = 3
WIDE = 1.15
SEED = 5
"""Others were looked at while the predictions were made."""
TRACED = 20


@dataclass(frozen=True)
class Row:
    """One strategy on one testbed to one loss; seconds; infinite ones are None.

    Attributes:
        times: the updates of the calibration after which the baseline has the loss.
        updates, time: measured, with the bounds of what noise allows.
        reached: whether it was reached in the run.
        predicted_updates, predicted_time, ratio: with the bounds that hold 80 %.
        forecast: seconds to the loss with an update as `plan` forecasts it; None: not forecast.
        noise_scale: updates to the loss by the noise scale alone, likewise.
    """

    task: str
    rate: str
    times: int
    strategy: str
    updates: tuple[float, float, float]
    time: tuple[float, float, float]
    reached: bool
    predicted_updates: tuple[float, float, float]
    predicted_time: tuple[float, float, float]
    ratio: tuple[float, float, float]
    measured_ratio: float
    forecast: float | None
    noise_scale: tuple[float, float, float] | None


# Ranks.


@joined_ranks()
def train(name: str, updates: int, calibration: int, folder: Path) -> None:
    """Train one task under every strategy; rank 0 writes the losses by update."""
    task, rank = TASKS[name](), dist.get_rank()
    share_cores(rank, dist.get_world_size())
    found: dict[str, list[float]] = {}
    for strategy, settings in with_own_losses().items():
        trace: dict[str, Any] = {}
        if strategy == BASELINE:
            where = folder / f"{name}-noise"
            trace = {"steps": calibration, "skip": 0, "folder": str(where), "norms": True}
        found[strategy] = losses_of_run(task, {**settings, "trace": trace}, updates)
        if rank == 0:
            print(f"{name}, {strategy}: {fmean(found[strategy][-20:]):.4f}", file=sys.stderr)
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(found))


def losses_of_run(task: Task, settings: Mapping[str, Any], batches: int) -> list[float]:
    """Train on so many batches a rank; the mean loss over ranks of each update."""
    torch.manual_seed(SEED)
    model = task.model()
    optimizer = task.optimizer(model)
    losses = []
    with slipstream.accelerate(model, optimizer, None, dict(settings)) as session:
        accumulate = session.strategy.gradients.accumulate
        for number in range(batches // accumulate * accumulate):
            loss = task.loss(session.model, task.batch(SEED, number, session.rank))
            session.backward(loss)
            session.step()
            losses.append(loss.detach())
    means = torch.stack(losses)
    dist.all_reduce(means.div_(dist.get_world_size()))
    return [float(value) for value in means.view(-1, accumulate).mean(1)]


@joined_ranks()
def measure(name: str, rounds: int, folder: Path) -> None:
    """Take turns under all strategies on a testbed; rank 0 writes seconds an update, the network
    and a trace of the baseline."""
    task, rank, world = TASKS[name](), dist.get_rank(), dist.get_world_size()
    share_cores(rank, world)
    cluster = calibrate(
        connect(from_environ(), torch.device("cpu")),
        sizes=SIZES[::2],
        seconds=15.0,
        rounds=3,
        codecs=CODECS,
    )
    trace = {"trace": {"steps": TRACED, "folder": str(folder)}}
    losses_of_run(task, trace, TRACED + 3)
    batches = [task.batch(SEED, number, rank) for number in range(BATCHES)]
    with ExitStack() as stack:

        def opened(settings: Mapping[str, Any]) -> Callable[[], None]:
            torch.manual_seed(SEED)
            model = task.model()
            optimizer = task.optimizer(model)
            session = stack.enter_context(
                slipstream.accelerate(model, optimizer, None, dict(settings))
            )

            def turn() -> None:
                for batch in batches:
                    session.backward(task.loss(session.model, batch))
                    session.step()

            return turn

        variants = {strategy: opened(settings) for strategy, settings in STRATEGIES.items()}
        seconds = take_turns(
            [*variants], lambda one: seconds_of(variants[one]), rounds + CALIBRATED, 1, name
        )
    if rank == 0:
        cluster.save(folder / "cluster.yaml")
        each = {
            strategy: [value / BATCHES * accumulate_of(strategy) for value in found]
            for strategy, found in seconds.items()
        }
        (folder / "seconds.json").write_text(json.dumps(each))


def accumulate_of(strategy: str) -> int:
    """Batches of an update."""
    return Strategy.load(STRATEGIES[strategy]).gradients.accumulate


def with_own_losses() -> dict[str, dict[str, Any]]:
    """The first strategy of each kind of mathematics."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, settings in STRATEGIES.items():
        found.setdefault(mathematics(Strategy.load(settings)), (name, settings))
    return dict(found.values())


# Predictions against measurements.


def smoothed(losses: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Means from ``u / WIDE`` to ``WIDE * u``, by update; shorter than the losses."""
    total = np.concatenate([[0.0], np.cumsum(losses)])
    ends = [(int(u / WIDE) - 1, int(u * WIDE)) for u in range(2, int(len(losses) / WIDE) + 1)]
    return np.array([(total[stop] - total[start]) / (stop - start) for start, stop in ends])


def noise_between(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """Standard deviation of an update's loss around the baseline's on the same batches: what is
    common to both tells no strategies apart."""
    batches = len(baseline) // len(losses)
    common = np.asarray(baseline[: len(losses) * batches]).reshape(-1, batches).mean(1)
    return noise_of(np.asarray(losses) - common)


def reached(losses: Sequence[float], target: float, noise: float) -> tuple[float, float, float]:
    """Updates to a loss: at one standard error less, at it, and at one more; infinite: never."""
    means = smoothed(losses)
    updates = np.arange(2, len(means) + 2)
    errors = noise / np.sqrt(updates * (WIDE - 1 / WIDE))

    def first(values: Any) -> float:
        found = np.flatnonzero(values <= target)
        return float(updates[found[0]]) if len(found) else inf

    return first(means - errors), first(means), first(means + errors)


def compare(
    task: str, rate: str, calibration: int, times: Sequence[int], folder: Path
) -> tuple[list[Row], list[str]]:
    """All rows of one testbed, and what the calibration chose for each target."""
    losses = json.loads((folder / f"{task}.json").read_text())
    seconds = json.loads((folder / f"{task}-{rate}" / "seconds.json").read_text())
    noise = noise_of_gradients(chrome.read(folder / f"{task}-noise" / "trace.json"))
    forecasts = forecast_seconds(folder / f"{task}-{rate}")
    early = {name: found[:CALIBRATED] for name, found in seconds.items()}
    late = {name: found[CALIBRATED:] for name, found in seconds.items()}
    runs = [
        LossRun(
            strategy=Strategy.load(STRATEGIES[name]).document(),
            seconds=fmean(early[name]),
            error=error_of(early[name]),
            losses=found[: calibration // accumulate_of(name)],
        )
        for name, found in losses.items()
    ]
    of_ranks = {} if noise is None else {"noise": noise[0], "cosine": noise[1]}
    forecast = LossForecast(LossCalibration(runs=tuple(runs), **of_ranks))
    without = [run for run in runs if "accumulate" not in run.strategy.get("gradients", {})]
    by_noise = LossForecast(LossCalibration(runs=tuple(without), **of_ranks))
    shared = {mathematics(Strategy.load(STRATEGIES[name])): name for name in losses}
    strategies = {name: Strategy.load(settings) for name, settings in STRATEGIES.items()}
    timed = [
        Timed(strategies[name], fmean(early[name]), error_of(early[name])) for name in STRATEGIES
    ]
    rows, chosen = [], []
    for count in times:
        target = float(smoothed(losses[BASELINE])[count * calibration - 2])
        found = forecast.to_loss(target, timed)
        first = verdict(found)[0]
        chosen.append(next(name for name, one in strategies.items() if one == first))
        by_strategy = {one.strategy: one for one in found}
        scaled = {one.strategy: one for one in by_noise.to_loss(target, timed)}
        base = reached(losses[BASELINE], target, 0.0)[1] * quartiles(late[BASELINE])[1]
        for name, strategy in strategies.items():
            one = by_strategy[strategy]
            own = losses[shared[mathematics(strategy)]]
            updates = reached(own, target, noise_between(own, losses[BASELINE]))
            is_reached = not isinf(updates[1])
            if not is_reached:
                updates = (len(own) / WIDE, inf, inf)
            low, middle, high = quartiles(late[name])
            measured = (updates[0] * low, updates[1] * middle, updates[2] * high)
            given = forecasts.get(name)
            noise_scale = scaled[strategy].updates if "accumulate" in name else None
            rows.append(
                Row(
                    *(task, rate, count, name, finite(updates), finite(measured), is_reached),
                    *(finite(one.updates), finite(one.time), finite(one.ratio)),
                    measured[1] / base,
                    None if given is None else given * one.updates.middle,
                    None if noise_scale is None else finite(noise_scale),
                )
            )
    return rows, chosen


def finite(values: Sequence[float]) -> Any:
    """None in the place of what is infinite, which JSON does not know."""
    return tuple(None if isinf(value) else value for value in values)


def error_of(seconds: Sequence[float]) -> float:
    """Relative standard error of the mean of a few turns, never less than 3 %."""
    return max(stdev(seconds) / sqrt(len(seconds)) / fmean(seconds), 0.03)


def forecast_seconds(folder: Path) -> dict[str, float]:
    """Seconds of an update of each strategy, from a trace of the baseline and the network."""
    network = NetworkProfile.load(folder / "cluster.yaml")
    forecast = Forecast.of(chrome.read(folder / "trace.json"), network)
    found = {}
    for name, settings in STRATEGIES.items():
        try:
            found[name] = forecast.seconds(Strategy.load(settings))
        except SlipstreamError as error:
            print(f"{name}: not forecast: {error}", file=sys.stderr)
    return found


@dataclass(frozen=True)
class Figures:
    """What counts, over all rows.

    Attributes:
        tau: over pairs that are told apart, and their number.
        tau_forecast: the same where seconds are `plan`'s forecast.
        regret: of the predicted first, the worst of all testbeds and targets; None: it was not
            reached in its run.
        regret_of_choice: of what was recommended, the baseline where nothing is surely sooner.
        holds: part of the rows whose measured time lies in its interval.
        holds_ratio: the same of the time over the baseline's.
    """

    tau: float | None
    pairs: int
    tau_forecast: float | None
    regret: float | None
    regret_of_choice: float | None
    holds: float | None
    holds_ratio: float | None


def figures(rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, str]) -> Figures:
    """Compute the figures of all rows; None of what there is nothing to tell from.

    Args:
        rows: of all testbeds and targets.
        chosen: what was recommended, by `testbed`.
    """
    agree: list[int] = []
    agree_forecast: list[int] = []
    regrets, of_choice = [], []
    testbeds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        testbeds.setdefault(testbed(row), []).append(row)
    for place, own in testbeds.items():
        for a, b in itertools.combinations(own, 2):
            if (order := told_apart(a["time"], b["time"])) == 0:
                continue
            times = a["predicted_time"][1] or inf, b["predicted_time"][1] or inf
            agree.append(1 if (times[0] - times[1]) * order > 0 else -1)
            if a["forecast"] and b["forecast"]:
                agree_forecast.append(1 if (a["forecast"] - b["forecast"]) * order > 0 else -1)
        best = min(row["time"][1] or inf for row in own)
        first = min(own, key=lambda row: row["ratio"][1] or inf)
        taken = next(row for row in own if row["strategy"] == chosen[place])
        regrets.append((first["time"][1] or inf) / best - 1)
        of_choice.append((taken["time"][1] or inf) / best - 1)
    known = [row for row in rows if row["reached"]]
    holds = [_within(row["time"][1], row["predicted_time"]) for row in known]
    others = [row for row in known if row["strategy"] != BASELINE]
    ratios = [_within(row["measured_ratio"], row["ratio"]) for row in others]
    return Figures(
        tau=_mean(agree),
        pairs=len(agree),
        tau_forecast=_mean(agree_forecast),
        regret=None if isinf(max(regrets)) else max(regrets),
        regret_of_choice=None if isinf(max(of_choice)) else max(of_choice),
        holds=_mean(holds),
        holds_ratio=_mean(ratios),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def told_apart(one: Sequence[float | None], other: Sequence[float | None]) -> int:
    """1 where the first is longer beyond the noise, -1 where it is shorter, else 0.

    Example:
        >>> told_apart((1, 2, 3), (4, 5, None)), told_apart((1, 2, 3), (2, 3, 4))
        (-1, 0)
    """
    if (one[0] or 0) > (inf if other[2] is None else other[2]):
        return 1
    if (other[0] or 0) > (inf if one[2] is None else one[2]):
        return -1
    return 0


def testbed(row: Mapping[str, Any]) -> str:
    """Names a task, a rate and a target."""
    return f"{row['task']}, {row['rate']}, {row['times']}"


def _within(value: float, bounds: Sequence[float | None]) -> bool:
    low, _, high = bounds
    return (low or 0) <= value <= (inf if high is None else high)


def main() -> None:
    """Train, measure and compare, or be a rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--updates", type=int, default=1400, help="of the baseline's whole run")
    parser.add_argument("--calibration", type=int, default=220, help="updates that are calibration")
    parser.add_argument("--times", type=int, nargs="+", default=TIMES)
    parser.add_argument("--rounds", type=int, default=3, help="that count, at each rate")
    parser.add_argument("--folder", help="keep runs and times here; what lies there is used")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if max(args.times) * args.calibration * WIDE > args.updates:
        parser.error("--updates: too few to smooth the loss at the furthest of --times")
    if args.train:
        train(args.train[0], args.updates, args.calibration, Path(args.train[1]))
        return
    if args.measure:
        measure(args.measure[0], args.rounds, Path(args.measure[1]))
        return
    rows: list[Row] = []
    chosen: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        options = [f"--{name}={getattr(args, name)}" for name in ("updates", "calibration")]
        options += [f"--rounds={args.rounds}", "--times", *map(str, args.times)]
        for task in args.tasks:
            if not (folder / f"{task}.json").is_file():
                words = [*options, "--train", task, str(folder)]
                if code := on_loopback(words, RANKS):
                    sys.exit(code)
        for task, rate in itertools.product(args.tasks, args.rates):
            place = folder / f"{task}-{rate}"
            if not (place / "seconds.json").is_file():
                place.mkdir(exist_ok=True)
                if code := on_testbed([*options, "--measure", task, str(place)], RANKS, rate):
                    sys.exit(code)
            found, choices = compare(task, rate, args.calibration, args.times, folder)
            rows += found
            for times, name in zip(args.times, choices, strict=True):
                chosen[testbed({"task": task, "rate": rate, "times": times})] = name
    plain = [asdict(row) for row in rows]
    entry = {
        "ranks": RANKS,
        "updates": args.updates,
        "calibration": args.calibration,
        "rounds": args.rounds,
        "figures": asdict(figures(plain, chosen)),
        "chosen": chosen,
        "rows": plain,
    }
    finish(args.json, "time_to_loss", entry)


if __name__ == "__main__":
    main()
