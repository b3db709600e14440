"""What users do beside a fused Swin: as without it, or refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import SwinModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.swin.modeling_swin import eager_attention_forward

import slipstream
from slipstream.errors import ModelError
from slipstream.fusion import fuse_swin
from slipstream.memory import recompute
from slipstream.strategy.memory import EveryConfig
from tests.fusion.test_swin import build

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def trained(model: SwinModel) -> list[Tensor]:
    model.zero_grad()
    output = model(X.to(model.dtype)).last_hidden_state
    output.square().mean().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def block(model: SwinModel) -> Any:
    """One of shifted windows."""
    return model.encoder.layers[0].blocks[1]


def gradient_penalty(model: SwinModel) -> list[Tensor]:
    images = X.double().requires_grad_()
    loss = model(images).last_hidden_state.square().mean()
    (gradient,) = torch.autograd.grad(loss, images, create_graph=True)
    model.zero_grad()
    gradient.square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradient_by_torch_func(model: SwinModel) -> list[Tensor]:
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return functional_call(model, values, X.double()).last_hidden_state.square().mean()  # type: ignore[no-any-return]

    return [*torch.func.grad(loss)(values).values(), *trained(model)]


def evaluated_first(model: SwinModel) -> list[Tensor]:
    with torch.inference_mode():
        model(X.double())
    return trained(model)


def checkpointed(model: SwinModel) -> list[Tensor]:
    model.train().gradient_checkpointing_enable()
    return trained(model)


def shift_changed(model: SwinModel) -> list[Tensor]:
    before = trained(model)
    block(model).shift_size = 1
    return before + trained(model)


def own_mask(model: SwinModel) -> list[Tensor]:
    block(model).get_attn_mask = lambda *_, **__: None
    return trained(model)


def own_attention(model: SwinModel) -> list[Tensor]:
    def doubled(module: Any, query: Tensor, *rest: Any, **options: Any) -> Any:
        return eager_attention_forward(module, query * 2, *rest, **options)

    ALL_ATTENTION_FUNCTIONS.register("doubled", doubled)
    model.config._attn_implementation = "doubled"
    return trained(model)


def layer_replaced(model: SwinModel) -> list[Tensor]:
    attention = block(model).attention
    attention.q_proj = nn.Sequential(attention.q_proj, nn.Tanh())
    return trained(model)


def hooks_added(model: SwinModel) -> list[Tensor]:
    seen: list[Tensor] = []
    block(model).attention.register_forward_hook(lambda m, i, o: (2 * o[0], *o[1:]))
    block(model).register_forward_pre_hook(lambda m, i: (1.5 * i[0], *i[1:]))
    block(model).layernorm_before.register_full_backward_hook(lambda m, i, o: seen.append(i[0]))
    return trained(model) + seen


def frozen(model: SwinModel) -> list[Tensor]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    return trained(model)


def copied(model: SwinModel) -> list[Tensor]:
    results = []
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1.1)
        results += trained(twin)
    return results + trained(model)


HABITS = (
    gradient_penalty,
    gradient_by_torch_func,
    evaluated_first,
    checkpointed,
    shift_changed,
    own_mask,
    own_attention,
    layer_replaced,
    hooks_added,
    frozen,
    copied,
)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_results_are_those_of_the_model(habit: Callable[[SwinModel], list[Tensor]]) -> None:
    model = build().double()
    expected = habit(model)
    model = build().double()
    fused = fuse_swin(model)
    for ours, theirs in zip(habit(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
    fused.close()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("around_backward", [False, True])
def test_under_autocast_it_is_as_near_as_the_model(
    half: torch.dtype, around_backward: bool
) -> None:
    def run(model: SwinModel, *, cast: bool) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", half, enabled=cast):
            loss = model(X).last_hidden_state.float().square().mean()
            if around_backward:
                loss.backward()
        if not around_backward:
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    exact, plain = run(build(), cast=False), run(build(), cast=True)
    model = build()
    fuse_swin(model)
    assert error(run(model, cast=True), exact) < 1.5 * error(plain, exact)


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    apart = [(a - b).square().sum() for a, b in zip(found, exact, strict=True)]
    return float(torch.stack(apart).sum().sqrt())


@pytest.mark.parametrize("kind", ["autocast", "half_weights"])
def test_in_a_session_with_precision(kind: str) -> None:
    losses = []
    for fuse in (False, True):
        model = build()
        if fuse:
            fuse_swin(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        strategy: Any = {"precision": {"kind": kind, "dtype": "bf16"}}
        with slipstream.accelerate(model, optimizer, None, strategy) as session:
            for _ in range(3):
                loss = session.model(X).last_hidden_state.square().mean()
                session.backward(loss)
                session.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_a_forward_that_is_replaced_already_is_refused() -> None:
    model = build()
    recomputed = recompute(model, EveryConfig(every=1))
    with pytest.raises(ModelError, match=r"SwinLayer is replaced already.*before accelerate\(\)"):
        fuse_swin(model)
    recomputed.close()
    fused = fuse_swin(model)
    with pytest.raises(ModelError, match="call fuse_swin once"):
        fuse_swin(model)
    fused.close()
    fuse_swin(model).close()
