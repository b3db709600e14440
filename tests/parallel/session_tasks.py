"""Models, batches and strategies for tests of parallel sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.parallel.models import CASES, LENGTH, WORDS, gpt2, images, resnet

STEPS = 5


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
    name: str,
    *,
    tensor: bool,
    schedule: str | None,
    ranks: int = 2,
    micro_batches: int = 2,
    cut: bool = True,
) -> dict[str, Any]:
    """The strategy's settings of ranks that share a model; ``cut`` False: it finds the cuts."""
    config = dict(TASKS[name].plan) if tensor else {}
    if schedule is not None:
        stages = 2 * ranks if schedule in ("interleaved_1f1b", "zero_bubble") else ranks
        paths = TASKS[name].blocks[-(stages - 1) :] if cut else None
        sizes = {"ranks": ranks, "micro_batches": micro_batches}
        config["pipeline"] = {"cut": paths, "schedule": schedule, **sizes}
    return config


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@dataclass(frozen=True)
class OneProcess:
    """How one process trains on the batches of all replicas: what every mesh must come to."""

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    losses: list[list[float]]
    """By step and replica."""
    norms: list[torch.Tensor]


def one_process(
    tasks: Mapping[str, Any], name: str, *, replicas: int, lr: float, parts: int = 1
) -> OneProcess:
    """Trained on the first rank, once for each case, and sent to the others."""
    plain: list[OneProcess | None] = [None]
    if dist.get_rank() == 0:
        plain = [_train_alone(tasks is TASKS, name, replicas, lr, parts)]
    dist.broadcast_object_list(plain)
    assert plain[0] is not None
    return plain[0]


@cache
def _train_alone(is_task: bool, name: str, replicas: int, lr: float, parts: int) -> OneProcess:
    torch.manual_seed(0)
    case: Any = TASKS[name] if is_task else CASES[name]
    model = case.build().double()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, norms = [], []
    for number in range(STEPS):
        losses.append([])
        for replica in range(replicas):
            batch = case.batch(replicas * number + replica)
            pieces = zip(*(t.chunk(parts) for t in batch), strict=True)
            each = [
                case.loss(model(piece[0]), piece[1]) if is_task else model(*piece)
                for piece in pieces
            ]
            loss = torch.stack(each).mean()
            (loss / replicas).backward()
            losses[-1].append(float(loss))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).detach())
        optimizer.step()
        optimizer.zero_grad()
    return OneProcess(before, dict(model.state_dict()), losses, norms)
