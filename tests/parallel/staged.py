"""Models to cut into stages, each with its batches, its loss and its cuts by number of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SAMPLES = 8


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any], Any]]
    loss: Callable[[Any, Any], Tensor]
    cuts: dict[int, list[str]]
    batch_statistics: bool = False
    """Whether the loss of a sample depends on the others of its micro-batch."""


def seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def gpt2() -> nn.Module:
    """Four blocks, tied embeddings, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 101, "n_positions": 32}
    config = GPT2Config(bos_token_id=None, eos_token_id=None, **sizes, **off)
    return GPT2LMHeadModel(config).double()


def words(step: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    ids = torch.randint(101, (SAMPLES, 11), generator=seeded(step))
    return (), {"input_ids": ids[:, :-1]}, ids[:, 1:]


def next_word(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short = nn.Conv2d(width, out, 1, stride, bias=False) if width != out else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.short is None else self.short(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Eight residual blocks with batch norm; as in torchvision, one activation serves twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1))
        self.layer2 = nn.Sequential(Block(4, 6, 2), Block(6, 6, 1))
        self.layer3 = nn.Sequential(Block(6, 8, 2), Block(8, 8, 1))
        self.layer4 = nn.Sequential(Block(8, 8, 1), Block(8, 8, 1))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.relu(x.mean((2, 3))))


def resnet() -> nn.Module:
    return ResNet().double()


def images(step: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    x = torch.randn(SAMPLES, 3, 8, 8, generator=seeded(step), dtype=torch.float64)
    return (x,), {}, torch.randint(10, (SAMPLES,), generator=seeded(step))


class Positions(nn.Module):
    """A parameter of the model itself, a layer used twice, a frozen one, and stateless ones."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(5, 6))
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.words = nn.Embedding(11, 6)
        self.act = nn.Tanh()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.twice = nn.Linear(6, 6)
        self.middle = nn.Flatten(1)
        self.body = nn.Linear(30, 30)
        self.again = self.twice
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids) + self.position
        x = self.twice(self.act(self.frozen(x)))
        x = self.act(self.body(self.middle(x))).view(-1, 5, 6)
        x = self.again(x * mask.unsqueeze(-1)) * self.scale
        return self.head(x).mean(1)


def positions() -> nn.Module:
    return Positions().double()


def masked_words(step: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    ids = torch.randint(11, (SAMPLES, 5), generator=seeded(step))
    return (ids,), {"mask": (ids > 2).double()}, ids[:, 0]


class Recomputed(nn.Module):
    """Every block is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(101, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.0)) for _ in range(4)
        )
        self.head = nn.Linear(6, 101)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def recomputed() -> nn.Module:
    return Recomputed().double()


def every_word(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


CASES = {
    "gpt2": Case(
        gpt2,
        words,
        next_word,
        {
            2: ["transformer.h.2"],
            4: ["transformer.h.1", "transformer.h.2", "transformer.h.3"],
        },
    ),
    "recomputed": Case(recomputed, words, every_word, {2: ["blocks.2"]}),
    "resnet": Case(
        resnet,
        images,
        F.cross_entropy,
        {
            2: ["layer3"],
            4: ["layer2", "layer3", "layer4"],
            8: ["layer1.1", "layer2", "layer2.1", "layer3", "layer3.1", "layer4", "fc"],
        },
        batch_statistics=True,
    ),
    "positions": Case(
        positions,
        masked_words,
        F.cross_entropy,
        {2: ["middle"], 4: ["twice", "middle", "again"]},
    ),
}


def make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same weights every time."""
    torch.manual_seed(0)
    model = case.build()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
