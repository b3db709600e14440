"""Whether a batch 16 times as large learns as much from as many samples, and with which optimizer.

    python -m benchmarks.large_batch --json benchmarks/results/large-batch.json

Two small networks, as torch initialises them, one process. A small batch with SGD and with
Adam sets the mark; a batch 16 times as large, hence a sixteenth of the updates, is given to the
same two, to Lars (against SGD) and to Lamb (against Adam). All have the same schedule (linear
warm-up, cosine down to 0) and choose from as many learning rates, each twice the one before, by
samples and seeds on which nothing is reported. A mark counts as reached from 0.5 points below.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from benchmarks.record import finish
from examples import data
from slipstream.optim import Lamb, Lars

TIMES = 16
WARM_UP = 0.2
RATES = 7
FINE = 0.005
SEEDS_TO_CHOOSE, SEEDS_TO_REPORT = (100, 101, 102), (0, 1, 2)
POINTS = 20
VOCABULARY, CONTEXT = 512, 8

Samples = tuple[Tensor, Tensor]
Parameters = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Task:
    """A network, its samples (to train on, to choose rates by, held out) and its small batch.

    ``rates``: the middle of the grid of each optimizer, the same at both batches.
    """

    build: Callable[[], nn.Module]
    samples: Callable[[], tuple[Samples, Samples, Samples]]
    epochs: int
    batch: int
    rates: Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """What an optimizer reached at a batch: held-out accuracies, a seed each, also on the way."""

    task: str
    optimizer: str
    batch: int
    updates: int
    rates: list[float]
    validation: list[float]
    chosen: float
    at_the_edge: bool
    accuracies: list[float]
    on_the_way: list[list[float]]


def digits() -> tuple[Samples, Samples, Samples]:
    """Handwritten digits of 8 x 8 pixels, 64 numbers each: 1150, 288 and 359."""
    parts = [part.tensors for part in data.digits(8)]
    (images, labels), held_out = [(pixels[:, 0].flatten(1), labels) for pixels, labels in parts]
    return (images[288:], labels[288:]), (images[:288], labels[:288]), held_out


def words() -> tuple[Samples, Samples, Samples]:
    """Eight words of Python's standard library, and the next: 50,000, 3,000 and 5,000."""
    rows = data.stdlib_tokens(VOCABULARY).unfold(0, CONTEXT + 1, CONTEXT + 1)
    rows = rows[rows[:, -1] != data.RARE]
    shuffled = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    held_out, validation, train = shuffled[:58_000].split([5_000, 3_000, 50_000])
    return _next(train), _next(validation), _next(held_out)


def _next(rows: Tensor) -> Samples:
    return rows[:, :-1], rows[:, -1]


def perceptron(depth: int = 8, width: int = 128) -> nn.Module:
    """Deep, and without normalisation."""
    sizes = [64] + [width] * (depth - 1)
    hidden = [layer for pair in pairwise(sizes) for layer in dense(*pair)]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def language_model(embedding: int = 32, width: int = 256) -> nn.Module:
    """Embeddings side by side, two hidden layers, a vocabulary.

    Reference: Bengio et al., A Neural Probabilistic Language Model (2003)
    """
    return nn.Sequential(
        nn.Embedding(VOCABULARY, embedding), nn.Flatten(), *dense(CONTEXT * embedding, width),
        *dense(width, width), nn.Linear(width, VOCABULARY),
    )  # fmt: skip


def dense(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.ReLU()]


TASKS = {
    "digits": Task(perceptron, digits, epochs=40, batch=16, rates={
        "SGD": 0.05, "Lars": 16.0, "Adam": 0.008, "Lamb": 0.03,
    }),
    "next word": Task(language_model, words, epochs=1, batch=32, rates={
        "SGD": 0.2, "Lars": 16.0, "Adam": 0.008, "Lamb": 0.03,
    }),
}  # fmt: skip
CONTENDERS = [
    ("SGD", 1),
    ("SGD", TIMES),
    ("Lars", TIMES),
    ("Adam", 1),
    ("Adam", TIMES),
    ("Lamb", TIMES),
]
MARKS = {"SGD": "SGD", "Lars": "SGD", "Adam": "Adam", "Lamb": "Adam"}
"""Whose small batch an optimizer is measured by."""


def optimizer_of(name: str, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
    match name:
        case "SGD":
            return torch.optim.SGD(parameters, lr, momentum=0.9)
        case "Adam":
            return torch.optim.Adam(parameters, lr)
        case "Lars":  # no normalisation shields the biases from rates above 1
            return Lars(parameters, lr, adapt_vectors=True)
        case _:
            return Lamb(parameters, lr, weight_decay=0.0)


def batches(samples: Samples, size: int, updates: int, seed: int) -> Iterator[Samples]:
    """Batches over epochs that are shuffled anew and follow one another without a gap."""
    random = torch.Generator().manual_seed(seed)
    inputs, labels = samples
    epochs = (torch.randperm(len(inputs), generator=random) for _ in count())
    waiting = next(epochs)
    for _ in range(updates):
        while len(waiting) < size:
            waiting = torch.cat([waiting, next(epochs)])
        chosen, waiting = waiting[:size], waiting[size:]
        yield inputs[chosen], labels[chosen]


def trained(
    task: Task, name: str, batch: int, train: Samples, judge: Samples, lr: float, seed: int,
    points: int = 1,
) -> list[float]:  # fmt: skip
    """Accuracies at ``points`` moments of a training, the last at its end."""
    torch.manual_seed(seed)
    model, updates = task.build(), updates_of(task, batch, train)
    optimizer = optimizer_of(name, model.named_parameters(), lr)
    warm_up = int(WARM_UP * updates)
    rising = LinearLR(optimizer, start_factor=1 / (warm_up + 1), total_iters=warm_up)
    falling = CosineAnnealingLR(optimizer, T_max=updates - warm_up)
    schedule = SequentialLR(optimizer, [rising, falling], milestones=[warm_up])
    moments = {updates * (point + 1) // points for point in range(points)}
    found = []
    for update, (inputs, labels) in enumerate(batches(train, batch, updates, seed), start=1):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
        if update in moments:
            found.append(accuracy(model, judge))
    return found


def updates_of(task: Task, batch: int, train: Samples) -> int:
    return task.epochs * len(train[0]) // batch


@torch.no_grad()
def accuracy(model: nn.Module, samples: Samples) -> float:
    """That of a network that has blown up is 0."""
    logits = model(samples[0])
    right = (logits.argmax(dim=1) == samples[1]).float().mean()
    return float(right) if logits.isfinite().all() else 0.0


def contest(task_name: str, name: str, times: int) -> Row:
    """One optimizer at one batch: its learning rate chosen, then reported with other seeds."""
    torch.set_num_threads(1)
    task = TASKS[task_name]
    batch = times * task.batch
    train, validation, held_out = task.samples()
    run = partial(trained, task, name, batch, train)
    rates = [task.rates[name] * 2.0 ** (i - RATES // 2) for i in range(RATES)]
    scores = [fmean(run(validation, lr, seed)[-1] for seed in SEEDS_TO_CHOOSE) for lr in rates]
    best = scores.index(max(scores))
    ways = [run(held_out, rates[best], seed, points=POINTS) for seed in SEEDS_TO_REPORT]
    return Row(
        task_name, name, batch, updates_of(task, batch, train), rates, scores, rates[best],
        best in (0, RATES - 1), [way[-1] for way in ways], ways,
    )  # fmt: skip


def gap(row: Row, rows: Sequence[Row]) -> float:
    """The mean accuracy above that of the small batch."""
    [mark] = [
        r for r in rows
        if (r.task, r.optimizer, r.batch) == (row.task, MARKS[row.optimizer], TASKS[row.task].batch)
    ]  # fmt: skip
    return fmean(row.accuracies) - fmean(mark.accuracies)


def picture(rows: Sequence[Row]) -> Figure:
    """Held-out accuracy on the way, a panel a task: the mean over seeds, and their range."""
    names = list(dict.fromkeys(r.task for r in rows))
    figure = Figure(figsize=(6 * len(names), 4.5), dpi=110, layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        epochs = [TASKS[name].epochs * (i + 1) / POINTS for i in range(POINTS)]
        for r in (r for r in rows if r.task == name):
            seeds = list(zip(*r.on_the_way, strict=True))
            style = ":" if r.batch == TASKS[name].batch else "-"
            label, color = f"{r.optimizer}, batch {r.batch}", f"C{list(MARKS).index(r.optimizer)}"
            axes.plot(epochs, [fmean(s) for s in seeds], style, color=color, label=label)
            axes.fill_between(
                epochs, [min(s) for s in seeds], [max(s) for s in seeds], color=color, alpha=0.12
            )
        axes.set(xlabel="epochs", ylabel="held-out accuracy", title=name)
        axes.legend(frameon=False)
    return figure


def main() -> None:
    """Tune, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--json", help="also write the figures to this file, and a picture beside")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(contest, t, *c) for t in args.tasks for c in CONTENDERS]
        console = Console(stderr=True)
        rows = [w.result() for w in track(waiting, "large batches", console=console)]
    found = [{**asdict(r), "gap": gap(r, rows)} for r in rows]
    epochs = {name: TASKS[name].epochs for name in args.tasks}
    finish(args.json, "large_batch", {"epochs": epochs, "rows": found})
    if args.json:
        picture(rows).savefig(Path(args.json).with_suffix(".png"))


if __name__ == "__main__":
    main()
