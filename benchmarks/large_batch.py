"""Whether a batch 16 times as large learns as much from as many samples, and with which optimizer.

    python benchmarks/large_batch.py --json large_batch.json

Handwritten digits, a plain deep network, one process. A small batch with SGD and with Adam sets the
mark; a batch 16 times as large, hence a sixteenth of the updates, is given to the same two and to
Lars and Lamb. All have the same schedule (linear warm-up, cosine down to 0), the same number of
learning rates to choose from, each twice as large as the one before, and are chosen on the same
samples, which no reported accuracy is measured on. Other seeds are reported than were chosen by.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tables import save
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from slipstream.optim import Lamb, Lars

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import data

SMALL, LARGE = 32, 512
VALIDATION = 288
WARM_UP = 0.2
SEEDS_TO_CHOOSE, SEEDS_TO_REPORT = (100, 101, 102), (0, 1, 2)
FINE = 0.01
"""How far below the mark still counts as reaching it: about one standard error of 359 samples."""

Make = Callable[[Iterable[tuple[str, nn.Parameter]], float], torch.optim.Optimizer]
Samples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Contender:
    """An optimizer at a batch size; ``middle`` is the middle of its grid of learning rates."""

    name: str
    batch: int
    make: Make
    middle: float


@dataclass(frozen=True)
class Row:
    """What a contender reached: accuracies on the held-out samples, one a seed."""

    name: str
    batch: int
    updates: int
    rates: list[float]
    chosen: float
    at_the_edge: bool
    by_rate: list[float]
    held_out: list[float]
    loss: list[float]


def sgd(parameters: Iterable[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def adam(parameters: Iterable[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr)


def lars(parameters: Iterable[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    return Lars(parameters, lr, momentum=0.9, trust_coefficient=0.001)


def lamb(parameters: Iterable[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    return Lamb(parameters, lr, weight_decay=0.0)


CONTENDERS = (
    Contender("SGD", SMALL, sgd, 0.05),
    Contender("Adam", SMALL, adam, 1e-3),
    Contender("SGD", LARGE, sgd, 0.05 * LARGE / SMALL),
    Contender("Adam", LARGE, adam, 1e-3 * (LARGE / SMALL) ** 0.5),
    Contender("Lars", LARGE, lars, 16.0),
    Contender("Lamb", LARGE, lamb, 0.02),
)


def split() -> tuple[Samples, Samples, Samples]:
    """Digits of 8 x 8 pixels to train on, to choose learning rates by, and held out."""
    train, held_out = data.digits(8)
    whole, test = train.tensors, held_out.tensors
    images, labels = (whole[0][:, 0].flatten(1), whole[1])
    return (
        (images[VALIDATION:], labels[VALIDATION:]),
        (images[:VALIDATION], labels[:VALIDATION]),
        (test[0][:, 0].flatten(1), test[1]),
    )


def network(depth: int, width: int) -> nn.Module:
    """A perceptron of ``depth`` layers without normalisation, as torch initialises it."""
    layers: list[nn.Module] = []
    size = 64
    for _ in range(depth - 1):
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, 10))


def batches(samples: Samples, size: int, updates: int, seed: int) -> Iterator[Samples]:
    """Batches over epochs that are shuffled anew and follow one another without a gap."""
    random = torch.Generator().manual_seed(seed)
    images, labels = samples
    epochs = (torch.randperm(len(images), generator=random) for _ in count())
    waiting = next(epochs)
    for _ in range(updates):
        while len(waiting) < size:
            waiting = torch.cat([waiting, next(epochs)])
        chosen, waiting = waiting[:size], waiting[size:]
        yield images[chosen], labels[chosen]


def trained(
    contender: Contender, lr: float, seed: int, samples: Samples, updates: int, build: Build
) -> nn.Module:
    """A network after all updates."""
    torch.manual_seed(seed)
    model = build()
    optimizer = contender.make(model.named_parameters(), lr)
    warm_up = max(int(WARM_UP * updates), 1)
    schedule = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, start_factor=1 / (warm_up + 1), total_iters=warm_up),
            CosineAnnealingLR(optimizer, T_max=updates - warm_up),
        ],
        milestones=[warm_up],
    )
    for images, labels in batches(samples, contender.batch, updates, seed):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
    return model


Build = Callable[[], nn.Module]


@torch.no_grad()
def judged(model: nn.Module, samples: Samples) -> tuple[float, float]:
    """Accuracy and loss; those of a network that has blown up are 0 and infinite."""
    images, labels = samples
    logits = model(images)
    if not logits.isfinite().all():
        return 0.0, float("inf")
    right = (logits.argmax(dim=1) == labels).float().mean()
    return right.item(), functional.cross_entropy(logits, labels).item()


def contest(contenders: Sequence[Contender], epochs: int, rates: int, build: Build) -> list[Row]:
    """Every contender at its best learning rate."""
    train, validation, held_out = split()
    rows = []
    for contender in track(contenders, "large batches", console=Console(stderr=True)):
        updates = epochs * len(train[0]) // contender.batch
        run = partial(trained, contender, samples=train, updates=updates, build=build)
        grid = [contender.middle * 2.0 ** (i - rates // 2) for i in range(rates)]
        scores = [
            mean(judged(run(lr, seed), validation)[0] for seed in SEEDS_TO_CHOOSE) for lr in grid
        ]
        best = scores.index(max(scores))
        found = [judged(run(grid[best], seed), held_out) for seed in SEEDS_TO_REPORT]
        rows.append(
            Row(
                contender.name, contender.batch, updates, grid, grid[best],
                best in (0, rates - 1), scores, [a for a, _ in found], [loss for _, loss in found],
            )
        )  # fmt: skip
    return rows


def table(rows: Sequence[Row]) -> Table:
    """What a person reads."""
    mark = max(mean(r.held_out) for r in rows if r.batch == SMALL)
    drawn = Table(title=f"The same samples in batches of {SMALL} and {LARGE}", title_justify="left")
    drawn.add_column("optimizer")
    for heading in ("batch", "updates", "lr", "held out", "lowest..highest", "below the mark"):
        drawn.add_column(heading, justify="right")
    for r in rows:
        below = mark - mean(r.held_out)
        edge = " (edge)" if r.at_the_edge else ""
        drawn.add_row(
            r.name, str(r.batch), str(r.updates), f"{r.chosen:g}{edge}",
            f"{mean(r.held_out):.1%}", f"{min(r.held_out):.1%}..{max(r.held_out):.1%}",
            f"{100 * below:.1f} points", style="bold" if below <= FINE else None,
        )  # fmt: skip
    return drawn


def main() -> None:
    """Tune, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--depth", type=int, default=8, help="layers of the network")
    parser.add_argument("--width", type=int, default=128, help="units of a layer")
    parser.add_argument("--rates", type=int, default=9, help="learning rates each may try")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    build = partial(network, args.depth, args.width)
    rows = contest(CONTENDERS, args.epochs, args.rates, build)
    Console(width=110).print(table(rows))
    if args.json:
        facts = {"epochs": args.epochs, "depth": args.depth, "width": args.width}
        save(args.json, "large_batch", {**facts, "rows": [asdict(r) for r in rows]})


if __name__ == "__main__":
    main()
