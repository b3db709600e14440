"""Real models of tiny sizes with dropout on, by name: what activations there are is up to them.

model = ARCHITECTURES["bert"].build()
loss = ARCHITECTURES["bert"].loss(model, batch_size)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
)

EAGER = {"attn_implementation": "eager"}


class Architecture(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    """Of so many samples; always the same."""
    blocks: int

    def loss(self, model: nn.Module, batch: int = 2, **more: Any) -> Tensor:
        return model(**self.inputs(batch), **more).loss


def _words(batch: int) -> Tensor:
    return torch.randint(50, (batch, 12), generator=torch.Generator().manual_seed(batch))


def _image(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    labels = torch.randint(3, (batch,), generator=generator)
    return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator), "labels": labels}


def _sentence(batch: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, 12, dtype=torch.int64)
    mask[0, 9:] = 0
    return {
        "input_ids": _words(batch),
        "attention_mask": mask,
        "labels": torch.arange(batch) % 3,
    }


def _bert() -> nn.Module:
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
        **EAGER,
    )
    config.problem_type = "single_label_classification"
    return BertForSequenceClassification(config)


def _gpt2() -> nn.Module:
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, **sizes, **EAGER))
    model.loss_type = "ForCausalLM"
    return model


def _resnet() -> nn.Module:
    config = ResNetConfig(
        embedding_size=8, depths=[3, 3], hidden_sizes=[16, 32], layer_type="bottleneck"
    )
    config.num_labels, config.problem_type = 3, "single_label_classification"
    return ResNetForImageClassification(config)


def _swin() -> nn.Module:
    config = SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        drop_path_rate=0.2,
        **EAGER,
    )
    config.num_labels, config.problem_type = 3, "single_label_classification"
    return SwinForImageClassification(config)


ARCHITECTURES = {
    "bert": Architecture(_bert, _sentence, 4),
    "gpt2": Architecture(_gpt2, lambda n: {"input_ids": _words(n), "labels": _words(n)}, 4),
    "resnet": Architecture(_resnet, _image, 6),
    "swin": Architecture(_swin, _image, 4),
}
