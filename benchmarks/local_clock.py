"""Held-out loss over the clock on a slow network: what meeting rarely is for.

    python -m benchmarks.local_clock --rate 100mbit --json results/local-clock.json

A small language model trains for as long under DDP, under ``int8`` and under ``local: auto``, one
after the other, from the same seed, on emulated hosts that compute on their own cores. The clock
stops while the held-out loss is computed; all that ``auto`` measures first is in it. The learning
rate is constant after a short warm-up, so that a curve can be read at any time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

import slipstream
from benchmarks.baselines import wrapped_in_ddp
from benchmarks.cases import as_ranks
from benchmarks.local_tasks import TASKS
from benchmarks.record import arguments, finish
from benchmarks.turns import joined_ranks

WAYS: dict[str, Mapping[str, Any] | None] = {
    "DDP": None,
    "int8": {"gradients": {"codec": "int8"}},
    "local: auto": {"local": "auto"},
}
WARM_UP = 40
"""Updates until the learning rate is whole."""
FIRST = 8
"""Updates until the first look at the loss."""


def train(name: str, task_name: str, seconds: float, looks: int) -> dict[str, Any]:
    """Train in one way; times, updates and held-out losses at the looks."""
    task, rank = TASKS[task_name](), dist.get_rank()
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model, False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / WARM_UP, 1.0))
    strategy, session = WAYS[name], None
    outer: Callable[[], AbstractContextManager[Any]] = nullcontext
    if strategy is None:
        ddp = wrapped_in_ddp(model, None)
    else:
        session = slipstream.accelerate(model, optimizer, None, dict(strategy))
        outer = session.evaluating
    points: list[dict[str, float]] = []
    spent, update, next_look = 0.0, 0, FIRST
    while next_look:
        begun = time.perf_counter()
        while update < next_look:
            batch = task.batch(0, update, rank)
            if session is None:
                task.loss(ddp, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                session.backward(task.loss(model, batch))
                session.step()
            schedule.step()
            update += 1
        dist.barrier()
        spent += time.perf_counter() - begun
        model.eval()
        with outer(), torch.no_grad():
            loss = task.score(model) if rank == 0 else 0.0
        model.train()
        points.append({"seconds": spent, "updates": update, "loss": loss})
        more = max(round(update / spent * seconds / looks), 1)  # by the speed of rank 0's clock
        following = torch.tensor(update + more if spent < seconds else 0)
        dist.broadcast(following, 0)
        next_look = int(following)
    if session is not None:
        session.close()
    return {"name": name, "points": points}


@joined_ranks()
def race(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes."""
    runs = [train(name, args.task, args.seconds, args.looks) for name in WAYS]
    if dist.get_rank() == 0:
        at = min(run["points"][-1]["seconds"] for run in runs)
        settings = {"task": args.task, "nodes": args.nodes, "rate": args.rate, "seconds": at}
        rows = [{"name": run["name"], **_at(run["points"], at)} for run in runs]
        finish(args.json, "local_clock", {**settings, "rows": rows, "runs": runs})
        if args.json:
            picture(args, runs).savefig(Path(args.json).with_suffix(".png"))


def _at(points: list[dict[str, float]], seconds: float) -> dict[str, float]:
    """The last look that was not later."""
    return [point for point in points if point["seconds"] <= seconds][-1]


def picture(args: argparse.Namespace, runs: list[dict[str, Any]]) -> Figure:
    """Losses over seconds, a line a way to train."""
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for run in runs:
        values = [[point[key] for point in run["points"]] for key in ("seconds", "loss")]
        axes.plot(*values, label=run["name"], marker="o", markersize=3)
    title = f"{args.task} language model, {args.nodes} hosts at {args.rate}"
    axes.set(xlabel="seconds of training", ylabel="held-out loss", title=title)
    axes.legend(frameon=False)
    return figure


def main() -> int:
    """Start the ranks, or be one."""
    parser = arguments(__doc__, "100mbit")
    parser.add_argument("--task", choices=TASKS, default="causal")
    parser.add_argument("--seconds", type=float, default=180.0, help="of training, in each way")
    parser.add_argument("--looks", type=int, default=20, help="at the held-out loss, in that time")
    return as_ranks(race, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
