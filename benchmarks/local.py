"""Meeting rarely: what it does to a training, and how fast it makes one on a slow network.

    python -m benchmarks.local loss --task causal --json results/local-causal.json
    python -m benchmarks.local speed --rate 100mbit --json results/local-100mbit.json

``loss`` trains a model from the same seeds in every way, on as many tokens: data parallelism, the
outer optimizer on top of it alone (since an outer step by itself can help), torch's post-local SGD,
and ``local`` with several numbers of steps, codecs and fragments. What counts is the loss on data
that was held out, of the parameters that evaluate best.

``speed`` runs them on emulated hosts beside an accelerator (accelerator.py). A turn is a whole
round of updates, after one that is not timed, as an exchange reaches into the updates behind it;
what is still on its way at the end of a turn arrives before the next variant begins. Bytes are
those that the network interfaces have counted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import slipstream
from benchmarks.baselines import wrapped_in_ddp
from benchmarks.cases import MODELS, as_ranks
from benchmarks.convergence import Task
from benchmarks.iteration import on_loopback
from benchmarks.local_settings import TORCHFT, settings_of
from benchmarks.local_speed import speed
from benchmarks.local_tasks import TASKS
from benchmarks.record import arguments, finish
from benchmarks.torchft_diloco import DiLoCo
from benchmarks.turns import joined_ranks
from slipstream.strategy import LocalConfig
from slipstream.testbed import Distance

WARM_UP = 1 / 8
"""Of the updates; the same for all that meet rarely."""
STEPS = (8, 16, 32, 64, 128)
LOCAL = (
    *(f"{steps} steps" for steps in STEPS),
    *(f"{steps} steps, {codec}" for steps in STEPS for codec in ("int8", "int4")),
    "16 steps, onebit",
    "16 steps, topk, momentum 0.0",
    "16 steps, 4 fragments, int4",
    *(f"16 steps, 4 fragments, delay {delay}, int4" for delay in (1, 2, 4)),
    "8 steps, 4 fragments, delay 1, int4",
    "8 steps, 4 fragments, delay 2, int4",
    "16 steps, 4 fragments, delay 4, mix 0.5, int4",
    "16 steps, inner_state averaged",
    "16 steps, lr 1.0, momentum 0.0",
)
"""Names of settings; `settings_of` reads any others, too."""
OTHERS = (
    *("data parallel", "data parallel and outer steps", "torch, post-local SGD, 16 steps"),
    *TORCHFT,
)
POINTS = 8
"""On a curve of losses."""


@dataclass(frozen=True)
class Run:
    """One training: scores on held-out data on the way, and seconds of the training."""

    name: str
    seed: int
    scores: list[float]
    seconds: float


class Training:
    """One way to train; ``step`` trains on one batch, ``evaluating`` has the best parameters."""

    def __init__(self, task: Task, name: str, steps: int) -> None:
        self.task, self.model = task, task.model()
        self.optimizer = task.optimizer(self.model, False)
        self.warm_up = round(steps * WARM_UP)
        self._session: Any = None
        self._outer: torch.optim.Optimizer | None = None
        self._averaged: Any = None
        self._torchft: DiLoCo | None = None
        self._torchft_delay = TORCHFT.get(name)
        if name not in OTHERS:
            local = {"warm_up": self.warm_up, **settings_of(name)}
            self._session = slipstream.accelerate(
                self.model, self.optimizer, None, {"local": local}
            )
        elif name == OTHERS[2] or name in TORCHFT:
            self._ddp = wrapped_in_ddp(self.model, None)
            self._averaged = self.optimizer
            if name == OTHERS[2]:
                averager = PeriodicModelAverager(period=16, warmup_steps=self.warm_up)
                self._averaged = PostLocalSGDOptimizer(self.optimizer, averager)
        else:
            self._session = slipstream.accelerate(self.model, self.optimizer)
        if name == OTHERS[1]:
            self._start = [p.detach().clone() for p in self.model.parameters()]
            outer = LocalConfig()
            self._outer = torch.optim.SGD(
                self._start, outer.lr, momentum=outer.momentum, nesterov=True
            )
        self._updates = 0

    def step(self, batch: Any) -> None:
        self.model.train()
        self._updates += 1
        if self._averaged is not None:
            local = self._updates > self.warm_up
            with self._ddp.no_sync() if local else nullcontext():
                self.task.loss(self._ddp, batch).backward()
            self._averaged.step()
            self._averaged.zero_grad()
            if self._torchft_delay is not None and self._updates == self.warm_up:
                self._torchft = DiLoCo(self.model, self.optimizer, 16, self._torchft_delay)
            return
        self._session.backward(self.task.loss(self.model, batch))
        self._session.step()
        if self._outer is not None and self._updates % 16 == 0:
            with torch.no_grad():
                parameters: list[torch.Tensor] = [*self.model.parameters()]
                for outer, p in zip(self._start, parameters, strict=True):
                    outer.grad = outer - p
                self._outer.step()
                torch._foreach_copy_(parameters, self._start)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with nullcontext() if self._session is None else self._session.evaluating():
            yield

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._torchft is not None:
            self._torchft.close()


def train(task: Task, name: str, seed: int, steps: int) -> Run:
    """One training on all ranks."""
    rank = dist.get_rank()
    torch.manual_seed(seed)
    training = Training(task, name, steps)
    warmup = steps // 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        training.optimizer,
        lambda s: min(s / warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * min(s / steps, 1.0))),
    )
    scores: list[float] = []
    seconds = 0.0
    for step in range(steps):
        begun = time.perf_counter()
        training.step(task.batch(seed, step, rank))
        schedule.step()
        seconds += time.perf_counter() - begun
        if (step + 1) % (steps // POINTS) == 0:
            training.model.eval()
            with training.evaluating(), torch.no_grad():
                score = torch.tensor(task.score(training.model)) if rank == 0 else torch.zeros(())
            dist.broadcast(score, 0)
            scores.append(float(score))
    training.close()
    return Run(name, seed, scores, seconds)


@joined_ranks()
def losses(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes."""
    task, runs = TASKS[args.task](), []
    names = args.variants or [*OTHERS, *LOCAL]
    plans = [(name, seed) for seed in range(args.seeds) for name in names]
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    for name, seed in track(plans, args.task, console=console):
        runs.append(train(task, name, seed, args.steps))
        console.print(f"{name}, seed {seed}: {runs[-1].scores[-1]:.4f}")
    if dist.get_rank() == 0:
        dense = fmean(run.scores[-1] for run in runs if run.name == names[0])
        rows = []
        for name in names:
            ends = [run.scores[-1] for run in runs if run.name == name]
            gap = fmean(ends) - dense if args.task == "digits" else fmean(ends) / dense - 1
            spread = stdev(ends) if len(ends) > 1 else 0.0
            rows.append({"name": name, "score": fmean(ends), "deviation": spread, "gap": gap})
        settings = {"task": args.task, "steps": args.steps, "ranks": dist.get_world_size()}
        entry = {"kind": "loss", **settings, "seeds": args.seeds, "rows": rows}
        finish(args.json, "local", {**entry, "runs": [asdict(run) for run in runs]})
        if args.json:
            curves(args, names, runs).savefig(Path(args.json).with_suffix(".png"))


def curves(args: argparse.Namespace, names: Sequence[str], runs: Sequence[Run]) -> Figure:
    """Held-out scores on the way, a line a name: means over seeds."""
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(names):
        own = [run.scores for run in runs if run.name == name]
        means = [fmean(values) for values in zip(*own, strict=True)]
        at = [args.steps // POINTS * (number + 1) for number in range(len(means))]
        style = ("-", "--", ":", "-.")[number // 10 % 4]  # colours repeat after ten
        width = 2.5 if name in OTHERS else 1.0
        axes.plot(at, means, label=name, linewidth=width, linestyle=style)
    what = "accuracy" if args.task == "digits" else "loss"
    axes.set(xlabel="updates", ylabel=f"held-out {what}", title=args.task)
    axes.legend(frameon=False, fontsize=7)
    return figure


def main() -> int:
    """Start the ranks, or be one."""
    parser = arguments(__doc__, "100mbit")
    parser.add_argument("part", choices=("loss", "speed"))
    parser.add_argument("--task", choices=TASKS, default="causal")
    parser.add_argument(
        "--variants",
        nargs="*",
        metavar="NAME",
        help="of losses the first is the measure; of speed all but these are left out",
    )
    parser.add_argument("--steps", type=int, default=1600, help="updates of a training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--round-trip-ms", type=float, default=0.0)
    parser.add_argument("--loss-percent", type=float, default=0.0)
    parser.add_argument("--keep-window", action="store_true", help="hosts set for long lines")
    parser.add_argument("--model", choices=MODELS, default="bert")
    parser.add_argument("--compute", choices=("cpu", "accelerator"), default="accelerator")
    parser.add_argument("--compute-seconds", type=float, default=0.15, help="of an update")
    parser.add_argument("--ddp", nargs="*", type=float, default=[4, 25], help="MB of buckets")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.part == "speed":
        distance = Distance(args.round_trip_ms / 1e3, args.loss_percent / 100, args.keep_window)
        return as_ranks(speed, args, distance)
    if "RANK" in os.environ:
        losses(args)
        return 0
    return on_loopback(sys.argv[1:], args.nodes)


if __name__ == "__main__":
    sys.exit(main())
