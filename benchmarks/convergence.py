"""What codecs do to the result of a training: accuracy and loss against dense gradients.

    python -m benchmarks.convergence --task digits --json results/convergence-digits.json
    python -m benchmarks.convergence --task text --ranks 2 --json results/convergence-text.json

Every codec trains the same model from the same seeds on all ranks, at its default settings (for
signs and PowerSGD these are 1000 dense steps first; other rows start earlier, those ``from step 0``
with the settings whose speed exchange.py measures), with the optimizer
and the schedule of dense training; DGC, which takes over momentum, is compared with dense SGD, the
others on text with dense AdamW. What counts is the mean over seeds on data that was held out:
accuracy within 0.5 points, or a loss within 2 %, of dense.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM

import slipstream
from benchmarks.cases import as_ranks
from benchmarks.record import finish
from benchmarks.turns import joined_ranks
from examples import data

CODECS: dict[str, object] = {
    "dense": None,
    "bf16": {"kind": "half"},
    "fp16": {"kind": "half", "dtype": "fp16"},
    "int8": {"kind": "int8"},
    "int8, stochastic": {"kind": "int8", "rounding": "stochastic"},
    "onebit": {"kind": "onebit"},
    "onebit, from step 100": {"kind": "onebit", "start_step": 100},
    "onebit, from step 0": {"kind": "onebit", "start_step": 0},
    "powersgd": {"kind": "powersgd"},
    "powersgd, from step 100": {"kind": "powersgd", "start_step": 100},
    "powersgd, from step 0": {"kind": "powersgd", "start_step": 0},
    "dense, SGD": None,
    "dgc": {"kind": "dgc"},
    "dgc, from step 0": {"kind": "dgc", "warmup_steps": 0},
}
BASELINE = {name: "dense, SGD" if name.startswith("dgc") else "dense" for name in CODECS}
WIDTH, LENGTH, VOCABULARY = 128, 64, 2048


@dataclass(frozen=True)
class Task:
    """A model, its batches by step and rank, and what is measured on held-out data."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    score: Callable[[nn.Module], float]
    optimizer: Callable[[nn.Module, bool], torch.optim.Optimizer]


@dataclass(frozen=True)
class Run:
    """One training: score on held-out data, losses on the way (mean of the ranks), seconds."""

    name: str
    seed: int
    score: float
    losses: list[float]
    seconds: float
    megabytes: float
    skipped: int


def digits_task(batch: int = 16) -> Task:
    """Handwritten digits: a small convolutional network; the score is the accuracy."""
    train, held_out = data.digits(8)
    pixels, targets = held_out[:]

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def sample(seed: int, step: int, rank: int) -> Any:
        random = torch.Generator().manual_seed((seed * 10**6 + step) * 64 + rank)
        chosen = torch.randint(len(train), (batch,), generator=random)
        rows = [train[int(i)] for i in chosen]
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])

    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        return functional.cross_entropy(model(rows[0]), rows[1])

    def accuracy(model: nn.Module) -> float:
        return float((model(pixels).argmax(1) == targets).float().mean())

    def sgd(model: nn.Module, _: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    return Task(build, sample, loss, accuracy, sgd)


def text_task(batch: int = 4) -> Task:
    """Masked words of Python's standard library: a small BERT; the score is the loss."""
    tokens = data.stdlib_tokens(VOCABULARY)
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held_out, train = rows[order[:512]], rows[order[512:]]
    masked = data.mask_words(held_out, VOCABULARY, torch.Generator().manual_seed(1))

    def build() -> nn.Module:
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=4 * WIDTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=None,
        )
        return BertForMaskedLM(config)

    def sample(seed: int, step: int, rank: int) -> Any:
        random = torch.Generator().manual_seed((seed * 10**6 + step) * 64 + rank)
        chosen = torch.randint(len(train), (batch,), generator=random)
        return data.mask_words(train[chosen], VOCABULARY, random)

    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=rows[0], labels=rows[1]).loss
        return found

    def held_out_loss(model: nn.Module) -> float:
        return float(loss(model, masked))

    def optimizer(model: nn.Module, sgd: bool) -> torch.optim.Optimizer:
        if sgd:
            return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Task(build, sample, loss, held_out_loss, optimizer)


TASKS = {"digits": digits_task, "text": text_task}


def train(
    task: Task, name: str, seed: int, steps: int, strategy: Mapping[str, Any], *, sgd: bool = False
) -> Run:
    """One training on all ranks, with SGD also where the task has another optimizer."""
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model, sgd)
    warmup = steps // 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(s / warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * min(s / steps, 1.0))),
    )
    losses: list[float] = []
    start, window = time.perf_counter(), []
    with slipstream.accelerate(model, optimizer, None, strategy) as session:
        for step in range(steps):
            model.train()
            loss = task.loss(model, task.batch(seed, step, rank))
            session.backward(loss)
            if session.step():  # else the schedule would run ahead of the updates
                schedule.step()
            window.append(float(loss.detach()))
            if len(window) == max(steps // 50, 1):
                mean = torch.tensor(fmean(window))
                if not alone:
                    dist.all_reduce(mean.div_(dist.get_world_size()))
                losses.append(float(mean))
                window = []
        megabytes = sum(segment.wire_bytes for segment in session.segments) / 2**20
    model.eval()
    with torch.no_grad():
        score = task.score(model)
    seconds = time.perf_counter() - start
    return Run(name, seed, score, losses, seconds, megabytes, session.skipped)


@joined_ranks()
def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes."""
    task, runs = TASKS[args.task](), []
    names = args.codecs or list(CODECS)
    plans = [(name, seed) for seed in range(args.seeds) for name in names]
    if args.task == "digits":  # trains with SGD anyway
        plans = [(name, seed) for name, seed in plans if name != "dense, SGD"]
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    for name, seed in track(plans, args.task, console=console):
        strategy = {"gradients": {"codec": CODECS[name]}}
        sgd = "dense, SGD" in (name, BASELINE[name])
        runs.append(train(task, name, seed, args.steps, strategy, sgd=sgd))
    if dist.get_rank() == 0:
        write(args, runs)


def write(args: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Table, JSON, picture."""
    baselines = dict.fromkeys(CODECS, "dense") if args.task == "digits" else BASELINE
    rows = [row for name in CODECS if (row := summary(args.task, name, baselines[name], runs))]
    entry = {"task": args.task, "steps": args.steps, "ranks": dist.get_world_size()}
    entry["seeds"] = args.seeds
    found = {**entry, "rows": rows, "runs": [asdict(r) for r in runs]}
    finish(args.json, "convergence", found)
    if args.json:
        picture(args.task, list(CODECS), runs).savefig(Path(args.json).with_suffix(".png"))


def summary(task: str, name: str, baseline: str, runs: Sequence[Run]) -> dict[str, Any] | None:
    """A codec (or what else runs differ in) over all seeds, and against its baseline."""
    own = [r for r in runs if r.name == name]
    dense = [r.score for r in runs if r.name == baseline]
    if not own or not dense:
        return None
    scores, reference = [r.score for r in own], fmean(dense)
    gap = fmean(scores) - reference if task == "digits" else fmean(scores) / reference - 1
    return {
        "codec": name,
        "score": fmean(scores),
        "deviation": stdev(scores) if len(scores) > 1 else 0.0,
        "gap": gap,
        "within": gap >= -0.005 if task == "digits" else gap <= 0.02,
        "megabytes": own[0].megabytes,
        "seconds": fmean(r.seconds for r in own),
        "skipped": fmean(r.skipped for r in own),
    }


def picture(task: str, names: Sequence[str], runs: Sequence[Run]) -> Figure:
    """Losses on the way, a line a name: the mean over seeds."""
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name in names:
        own = [r.losses for r in runs if r.name == name]
        if own:
            means = [fmean(values) for values in zip(*own, strict=True)]
            width = 2.5 if name.startswith(("dense", "fp32")) else 1.2
            axes.plot(range(1, len(means) + 1), means, label=name, linewidth=width)
    axes.set(xlabel="fiftieths of the training", ylabel="training loss", title=task, yscale="log")
    axes.legend(frameon=False)
    return figure


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--codecs", nargs="*", choices=list(CODECS), help="default: all")
    parser.add_argument("--json", help="also write the figures to this file, and a picture beside")
    args = parser.parse_args()
    return as_ranks(measure, args, ranks=args.ranks, keep_memory=False)


if __name__ == "__main__":
    sys.exit(main())
