"""The two small trainings of time_to_loss.py: a causal LM and a ResNet with batch norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.local_tasks import Residual, small_gpt2
from examples import data

VOCABULARY, LENGTH, WIDTH = 1024, 32, 64
NOISE = 1.0
"""Of pixels whose own deviation is 1: no image comes twice, so the loss falls slowly."""


@dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        model: makes a model.
        batch: of a seed, a number of the batch and a rank.
        loss: of a model on a batch.
        optimizer: of a model.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


def _random(seed: int, number: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 10**6 + number) * 64 + rank)


def causal(batch: int = 4) -> Task:
    """The next word of Python's standard library: a GPT-2 of two layers, with AdamW."""
    tokens = data.stdlib_tokens(VOCABULARY)
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def build() -> nn.Module:
        return small_gpt2(VOCABULARY, LENGTH, WIDTH, tied=False)

    def sample(seed: int, number: int, rank: int) -> Any:
        chosen = torch.randint(len(rows), (batch,), generator=_random(seed, number, rank))
        return rows[chosen]

    def loss(model: nn.Module, words: Any) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=words, labels=words).loss
        return found

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=2e-3)

    return Task(build, sample, loss, adamw)


def resnet(batch: int = 16) -> Task:
    """Handwritten digits behind noise: a small ResNet with batch norm, with momentum."""
    train, _ = data.digits(8)
    pixels, targets = train[:]

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(2), Residual(64), Residual(64),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    def sample(seed: int, number: int, rank: int) -> Any:
        random = _random(seed, number, rank)
        chosen = torch.randint(len(pixels), (batch,), generator=random)
        clean = pixels[chosen, :1]
        noisy = clean + NOISE * torch.randn(clean.shape, generator=random)
        return noisy.expand(-1, 3, -1, -1), targets[chosen]

    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        return functional.cross_entropy(model(rows[0]), rows[1])

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    return Task(build, sample, loss, sgd)


TASKS: dict[str, Callable[[], Task]] = {"causal": cache(causal), "resnet": cache(resnet)}
