"""Models, batches and strategies for tests of parallel sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from tests.parallel.models import CASES, LENGTH, WORDS, gpt2, images, resnet

STEPS = 20


TENSOR = {"parallel": {"tensor": {"ranks": 2}}}


def strategy(name: str, plan: str, **gradients: Any) -> dict[str, Any]:
    """The strategy that splits a model's layers over two ranks."""
    model = CASES[name].build()
    places = [place.document() for place in CASES[name].plans[plan](model)]
    tensor = {"ranks": 2, "plan": places}
    return {"parallel": {"tensor": tensor}, "gradients": gradients}


@dataclass(frozen=True)
class Task:
    """A model without its loss, which a pipeline computes itself, and how it is shared."""

    build: Callable[[], torch.nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    blocks: tuple[str, ...]
    plan: dict[str, Any]


class Logits(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).logits


def next_word(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def words(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (4, LENGTH), generator=seed)
    return ids, ids


TASKS = {
    "gpt2": Task(
        lambda: Logits(gpt2(n_layer=4).inner),
        next_word,
        words,
        tuple(f"inner.transformer.h.{number}" for number in range(4)),
        {"tensor": {"ranks": 2}},
    ),
    "resnet": Task(
        lambda: Logits(resnet().inner),
        F.cross_entropy,
        images,
        (
            "inner.resnet.encoder.stages.0",
            "inner.resnet.encoder.stages.1",
            "inner.resnet.encoder.stages.1.layers.1",
            "inner.resnet.pooler",
        ),
        {
            "tensor": {
                "ranks": 2,
                "plan": {
                    "*.layer.1.convolution": "column",
                    "*.layer.1.normalization": "channels",
                    "*.layer.2.convolution": "row",
                },
            }
        },
    ),
}


def parallel_config(
    name: str, *, tensor: bool, schedule: str | None, ranks: int = 2, micro_batches: int = 2
) -> dict[str, Any]:
    """The strategy's settings of ranks that share a model."""
    config = dict(TASKS[name].plan) if tensor else {}
    if schedule is not None:
        stages = 2 * ranks if schedule in ("interleaved_1f1b", "zero_bubble") else ranks
        cut = TASKS[name].blocks[-(stages - 1) :]
        sizes = {"ranks": ranks, "micro_batches": micro_batches}
        config["pipeline"] = {"cut": cut, "schedule": schedule, **sizes}
    return config


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)
