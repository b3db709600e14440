"""A Swin of transformers on fused kernels: the same outputs and gradients, and restored again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import SwinConfig, SwinModel

from slipstream.errors import ModelError
from slipstream.fusion import fuse_swin

SIZES = {"square": (32, 32), "wide, padded": (40, 56), "tall, padded": (64, 36)}


def build(**settings: Any) -> SwinModel:
    torch.manual_seed(0)
    config = SwinConfig(
        image_size=32, patch_size=2, window_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4],
        drop_path_rate=0.0, **settings,
    )  # fmt: skip
    model = SwinModel(config)
    for name, parameter in model.named_parameters():
        if "bias_table" in name:
            nn.init.normal_(parameter)
    return model


def run(model: SwinModel, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(images, interpolate_pos_encoding=True).last_hidden_state
    output.square().sum().backward()
    return output.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_gradients_are_those_of_the_model(size: str) -> None:
    model = build().double()
    images = torch.randn(2, 3, *SIZES[size], dtype=torch.float64)
    output, gradients = run(model, images)
    fused = fuse_swin(model)
    assert fused.report_rows()[0].value == "4 layers"
    for _ in range(2):  # the second time with masks that are there
        same, others = run(model, images)
        torch.testing.assert_close(same, output, rtol=1e-10, atol=1e-10)
        assert others.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-9, atol=1e-9)


def test_close_leaves_the_model_as_it_was() -> None:
    model = build()
    before = [(sorted(vars(m)), type(m)) for m in model.modules()]
    names = [*model.state_dict()]
    fused = fuse_swin(model)
    assert [*model.state_dict()] == names
    fused.close()
    fused.close()
    assert [(sorted(vars(m)), type(m)) for m in model.modules()] == before


def test_attention_weights_come_from_the_model_s_own_attention() -> None:
    model = build(attn_implementation="eager").eval()
    fuse_swin(model)
    weights = model(torch.zeros(1, 3, 32, 32), output_attentions=True).attentions
    assert [tuple(w.shape) for w in weights] == [(16, 2, 16, 16), (4, 4, 16, 16)]


def test_dropout_is_drawn_in_training_alone() -> None:
    model = build(attention_probs_dropout_prob=0.5)
    fuse_swin(model)
    images = torch.randn(1, 3, 32, 32)
    assert not run(model, images)[0].equal(run(model, images)[0])
    model.eval()
    assert run(model, images)[0].equal(run(model, images)[0])


def test_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no layer of a Swin"):
        fuse_swin(nn.Linear(2, 2))
