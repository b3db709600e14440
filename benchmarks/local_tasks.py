"""The small trainings of local.py: models, batches and what is held out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.convergence import Task, digits_task, text_task
from examples import data


def small_gpt2(vocabulary: int, length: int, width: int, *, tied: bool = True) -> nn.Module:
    """Two layers, without dropout; ``tied``: words are read by the weights that embed them."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def causal_task(batch: int = 4) -> Task:
    """The next word of Python's standard library: a small GPT-2; the score is the loss."""
    vocabulary, length, width = 2048, 64, 128
    tokens = data.stdlib_tokens(vocabulary)
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held_out, train = rows[order[:256]], rows[order[256:]]

    def build() -> nn.Module:
        return small_gpt2(vocabulary, length, width)

    def sample(seed: int, step: int, rank: int) -> Any:
        random = torch.Generator().manual_seed((seed * 10**6 + step) * 64 + rank)
        return train[torch.randint(len(train), (batch,), generator=random)]

    def loss(model: nn.Module, words: Any) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=words, labels=words).loss
        return found

    def held_out_loss(model: nn.Module) -> float:
        return float(loss(model, held_out))

    def optimizer(model: nn.Module, _: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Task(build, sample, loss, held_out_loss, optimizer)


class Residual(nn.Module):
    """Two convolutions with batch norm, and what they are added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.body(x))


def resnet_task(batch: int = 16) -> Task:
    """Handwritten digits: a small ResNet with batch norm; the score is the loss, with smoothed
    labels, whose least value is far from 0."""
    digits = digits_task(batch)
    pixels, targets = data.digits(8)[1][:]

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            Residual(32), nn.MaxPool2d(2), Residual(32),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        return functional.cross_entropy(model(rows[0]), rows[1], label_smoothing=0.1)

    def held_out_loss(model: nn.Module) -> float:
        return float(loss(model, (pixels, targets)))

    return Task(build, digits.batch, loss, held_out_loss, digits.optimizer)


TASKS: dict[str, Callable[[], Task]] = {
    "causal": causal_task,
    "masked": text_task,
    "digits": digits_task,
    "resnet": resnet_task,
}
