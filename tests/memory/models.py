"""Small models of several families, with dropout on and made to be deterministic, by name.

case = MODELS["bert"]
loss = case.loss(case.build(), case.batch(step))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    """A model, its loss, its batches, and a pattern that names its blocks."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    blocks: str
    count: int

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Of the model, which returns it as transformers do, or is a plain one."""
        found = model(**batch)
        return found.loss if hasattr(found, "loss") else found


def words(step: int) -> dict[str, Tensor]:
    seed = torch.Generator().manual_seed(step)
    x = torch.randint(0, 40, (2, 8), generator=seed)
    return {"input_ids": x, "labels": x}


def masked_words(step: int) -> dict[str, Tensor]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return words(step) | {"attention_mask": mask}


def images(step: int) -> dict[str, Tensor]:
    seed = torch.Generator().manual_seed(step)
    x = torch.randn(2, 3, 32, 32, generator=seed)
    return {"pixel_values": x, "labels": torch.randint(0, 4, (2,), generator=seed)}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 40, "n_positions": 8, "n_embd": 16, "n_layer": 5, "n_head": 2}
    config = GPT2Config(bos_token_id=None, eos_token_id=None, use_cache=False, **sizes)
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(num_attention_heads=2, max_position_embeddings=8, **sizes))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    head: dict[str, Any] = {"num_labels": 4}
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[3, 3], **head)
    )


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    head: dict[str, Any] = {"num_labels": 4}
    return ResNetForImageClassification(ResNetConfig(**head))


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    head: dict[str, Any] = {"num_labels": 4}
    return SwinForImageClassification(
        SwinConfig(
            image_size=32,
            patch_size=2,
            embed_dim=8,
            depths=[2, 3],
            num_heads=[1, 2],
            window_size=4,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            drop_path_rate=0.2,
            **head,
        )
    )


class Block(nn.Module):
    """A residual block with batch normalisation, dropout and a buffer that its forward reads."""

    def __init__(self, width: int, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        self.norm = nn.BatchNorm1d(2 * width, momentum=momentum)
        self.drop = nn.Dropout(0.2)
        self.back = nn.Linear(2 * width, width)
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.norm(self.linear(x)).relu() * self.level.clone()
        self.level.mul_(0.9)
        if scale is not None:
            hidden = hidden * scale
        return x + self.drop(self.back(hidden))


class Blocks(nn.Module):
    """Blocks one after another; subclasses differ in their order, and in what is between them."""

    def __init__(self, blocks: int = 4, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(2 * width))
        self.head = nn.Linear(width, 4)

    def order(self) -> Iterable[nn.Module]:
        return self.blocks

    def between(self, number: int, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.order()):
            x = block(self.between(number, x), scale=self.scale)
        return F.cross_entropy(self.head(x), y)


class Collected(Blocks):
    """Uses what every block returns."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        states = [self.first(x)]
        for block in self.blocks:
            states.append(block(states[-1], scale=self.scale))
        return F.cross_entropy(self.head(torch.stack(states).sum(0)), y)


class Twice(Blocks):
    """Calls every block twice."""

    def order(self) -> Iterable[nn.Module]:
        return (*self.blocks, *self.blocks)


class Backwards(Blocks):
    """Calls the last block first."""

    def order(self) -> Iterable[nn.Module]:
        return reversed([*self.blocks])


class Attention(nn.Module):
    """Fused attention without dropout, and a dropout behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x)[None, None].chunk(3, -1)
        return x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v)[0, 0]))


class Attentive(nn.Module):
    """Blocks of fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 4)
        self.blocks = nn.Sequential(*(Attention(6) for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.first(x))), y)


def rows(step: int) -> dict[str, Tensor]:
    seed = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(8, 5, generator=seed),
        "y": torch.randint(0, 4, (8,), generator=seed),
    }


def forwards(module: nn.Module) -> list[int]:
    """A list that grows by one each time that ``module`` is called."""
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


MODELS = {
    "gpt2": Case(gpt2, words, "transformer.h.*", 5),
    "bert": Case(bert, masked_words, "bert.encoder.layer.*", 4),
    "resnet": Case(resnet, images, "resnet.encoder.stages.*.layers.*", 6),
    "swin": Case(swin, images, "swin.encoder.layers.*.blocks.*", 5),
    "chain": Case(Blocks, rows, "blocks.*", 4),
    "collected": Case(Collected, rows, "blocks.*", 4),
    "attentive": Case(Attentive, rows, "blocks.*", 4),
}

REAL = ("bert", "gpt2", "resnet", "swin")
"""Those of transformers."""


def built(name: str) -> nn.Module:
    """A model in training mode, the same each time."""
    torch.manual_seed(0)
    return MODELS[name].build().train()
