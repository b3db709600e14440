"""Models that can be split, with the plan that does it and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slipstream.parallel.tensor.plans import TensorPlan, known_plan
from slipstream.strategy.parallel import TensorParallelConfig

WORDS, LENGTH = 101, 9  # odd, so that shares of both differ by one


@dataclass(frozen=True)
class Case:
    """A model that returns its loss; plans by name."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, ...]]
    plans: dict[str, Callable[[nn.Module], TensorPlan]] = field(default_factory=dict)


def places(styles: dict[str, Any]) -> TensorPlan:
    """A plan, as it is written in a strategy."""
    plan = TensorParallelConfig(ranks=2, plan=styles).plan
    assert plan is not None
    return plan


def known(model: nn.Module) -> TensorPlan:
    return known_plan(model.inner.config)


def words(step: int) -> tuple[torch.Tensor, ...]:
    seed = torch.Generator().manual_seed(step)
    return (torch.randint(WORDS, (3, LENGTH), generator=seed),)


def images(step: int) -> tuple[torch.Tensor, ...]:
    seed = torch.Generator().manual_seed(step)
    x = torch.randn(4, 3, 16, 16, generator=seed, dtype=torch.float64)
    return x, torch.randint(5, (4,), generator=seed)


class Language(nn.Module):
    """A model of transformers that predicts words; the mean loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=words, labels=words).loss


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.pop("dropout", 0.0))
    config = GPT2Config(
        n_layer=options.pop("n_layer", 2),
        n_embd=16,
        n_head=4,
        vocab_size=WORDS,
        n_positions=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        **off,
        **options,
    )
    return Language(GPT2LMHeadModel(config))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        intermediate_size=32,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Language(BertForMaskedLM(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )
    return Language(LlamaForCausalLM(config))


class Vision(nn.Module):
    """A classifier of images; the mean loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = self.inner(images)
        return nn.functional.cross_entropy(getattr(out, "logits", out), labels)


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    head: dict[str, Any] = {"num_labels": 5}
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        layer_type="bottleneck",
        **head,
    )
    return Vision(ResNetForImageClassification(config))


def mobile() -> nn.Module:
    """Depthwise and grouped convolutions between columns and rows; group normalisation."""
    return Vision(
        nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.GroupNorm(4, 12),
            nn.ReLU(),
            nn.Conv2d(12, 12, 3, stride=2, padding="valid", groups=12),
            nn.BatchNorm2d(12),
            nn.Conv2d(12, 8, 1, groups=4),
            nn.Conv2d(8, 6, (1, 3), padding=(0, 1), dilation=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 14),
            nn.Tanh(),
            nn.Linear(14, 5),
        )
    )


def trunk() -> nn.Module:
    """Convolutions that are data-parallel, and a wide layer that is split."""
    return Vision(
        nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Conv2d(4, 4, 3)),
            nn.Flatten(),
            nn.Linear(16, 6),
            nn.ReLU(),
            nn.Linear(6, 8),
            nn.Tanh(),
            nn.Linear(8, 5),
        )
    )


class Attention(nn.Module):
    """The heads, apart from the layers around them."""

    def forward(self, *heads: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in heads)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class Tokens(nn.Module):
    """One block of attention over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.norm = nn.LayerNorm(16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.core, self.out = Attention(), nn.Linear(16, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(words))
        y = self.out(x + self.core(self.query(x), self.key(x), self.value(x)))
        return nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), words[:, 1:].flatten())


CASES: dict[str, Case] = {
    "trunk": Case(
        trunk,
        images,
        {
            "batch, then features": lambda m: places(
                {
                    "inner.0": {"kind": "sequence", "axis": 0, "enter": True},
                    "inner.1": {"kind": "switch", "axis": 0, "after": "features"},
                    "inner.2": "row",
                    "inner.4": "column",
                    "inner.5": {"kind": "switch", "axis": 0, "before": "part"},
                    "inner.6": {"kind": "sequence", "axis": 0, "leave": True},
                }
            ),
        },
    ),
    "tokens": Case(
        Tokens,
        words,
        {
            "sequence, but for heads": lambda m: places(
                {
                    "norm": {"kind": "sequence", "enter": True},
                    "[qkv]*": "sequence",
                    "core": {"kind": "switch", "before": "features", "after": "part"},
                    "out": {"kind": "sequence", "leave": True},
                }
            ),
        },
    ),
    "gpt2": Case(
        gpt2,
        words,
        {
            "known": known,
            "with vocabulary": lambda m: (
                *known(m),
                *places(
                    {
                        "*wte": "vocabulary",
                        "*lm_head": {"kind": "column", "gather": True},
                    }
                ),
            ),
            "with sequence": lambda m: known_plan(m.inner.config, sequence=True),
        },
    ),
    "bert": Case(bert, words, {"known": known}),
    "llama": Case(
        llama,
        words,
        {
            "known": known,
            "with head": lambda m: (
                *known(m),
                *places({"*lm_head": {"kind": "column", "gather": True}}),
            ),
        },
    ),
    "resnet": Case(
        resnet,
        images,
        {
            "bottlenecks": lambda m: places(
                {
                    "*.layer.1.convolution": "column",
                    "*.layer.1.normalization": "channels",
                    "*.layer.2.convolution": "row",
                }
            ),
            "classifier": lambda m: places({"*classifier.1": {"kind": "column", "gather": True}}),
        },
    ),
    "mobile": Case(
        mobile,
        images,
        {
            "channels": lambda m: places(
                {
                    "inner.0": "column",
                    "inner.[1345]": "channels",
                    "inner.6": "row",
                    "inner.9": "column",
                    "inner.11": "row",
                }
            ),
            "gathered": lambda m: places(
                {
                    "inner.0": {"kind": "column", "gather": True, "parts": 3},
                    "inner.11": {"kind": "column", "gather": True},
                }
            ),
        },
    ),
}
