"""A small model on batches of different sizes, and the training of one process on those of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

FEATURES = 3
Rows = list[tuple[torch.Tensor, torch.Tensor]]


def batches(rank: int, length: int) -> Rows:
    """Batches of different sizes, other ones on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(1 + index % 3, FEATURES, generator=generator, dtype=torch.float64),
            torch.randn(1 + index % 3, 1, generator=generator, dtype=torch.float64),
        )
        for index in range(length)
    ]


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(FEATURES, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)]
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def values_of(model: torch.nn.Module) -> list[float]:
    return [float(v) for p in model.parameters() for v in p.detach().flatten()]


class RowStream(IterableDataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def reference(lengths: tuple[int, ...], accumulate: int, num_epochs: int) -> list[float]:
    """One process: an update sees the mean over all batches of all ranks in its window."""
    model, optimizer, scheduler = model_and_optimizer()
    by_rank = [batches(rank, length) for rank, length in enumerate(lengths)]
    steps = [
        [rows[step] for rows in by_rank if step < len(rows)] for step in range(max(lengths))
    ] * num_epochs
    for first in range(0, len(steps) - len(steps) % accumulate, accumulate):
        window = [batch for step in steps[first : first + accumulate] for batch in step]
        torch.stack([loss_of(model, batch) for batch in window]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return values_of(model)
