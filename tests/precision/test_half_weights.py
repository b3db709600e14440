"""Half weights alone: bit for bit the loop written by hand, and what they leave as it was."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ModelError, StrategyError, UsageError
from slipstream.optim import Lamb
from slipstream.precision.half_weights import half_weights
from tests.harness.models import MODELS
from tests.harness.reference import OPTIMIZERS
from tests.precision.battery import TYPES, digest

DTYPES = pytest.mark.parametrize("dtype", TYPES)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))


class ByHand(nn.Module):
    """Net with every cast written out, on half copies of fp32 masters."""

    def __init__(self, net: Net, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.net = copy.deepcopy(net).to(dtype)
        self.net.norm.float()
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in net.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net.norm(self.net.first(x.to(self.dtype)).float()).to(self.dtype)
        return self.net.last(F.gelu(hidden)).float()

    @torch.no_grad()
    def gather(self, scale: float) -> None:
        """Half gradients are added to those of the masters, unscaled."""
        for master, p in zip(self.masters, self.net.parameters(), strict=True):
            assert p.grad is not None
            gradient = p.grad.float() / scale
            master.grad = gradient if master.grad is None else master.grad + gradient
            p.grad = None

    @torch.no_grad()
    def copy_back(self) -> None:
        for master, p in zip(self.masters, self.net.parameters(), strict=True):
            p.copy_(master)


def batches() -> list[tuple[Tensor, Tensor]]:
    seed = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, 5, generator=seed), torch.randn(6, 4, generator=seed)) for _ in range(8)
    ]


def make(optimizer: str, parameters: Any) -> torch.optim.Optimizer:
    if optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if optimizer == "lamb":
        return Lamb(parameters, lr=0.01)
    if optimizer == "fused":
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)
    return torch.optim.AdamW(parameters, lr=0.01, foreach=optimizer == "foreach")


@DTYPES
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "foreach", "fused", "lamb"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_it_is_the_loop_by_hand_bit_for_bit(optimizer: str, dtype: str, scale: float) -> None:
    """Accumulating two batches, with gradient clipping by torch's own function."""
    torch.manual_seed(0)
    net = Net()
    hand = ByHand(net, TYPES[dtype])
    theirs, own = make(optimizer, hand.masters), make(optimizer, net.parameters())
    half = half_weights(net, own, dtype)  # type: ignore[arg-type]
    for number, (x, y) in enumerate(batches()):
        (F.mse_loss(hand(x), y) * scale).backward()
        hand.gather(scale)
        (F.mse_loss(net(x), y) * scale).backward()
        if number % 2:
            for p in net.parameters():
                assert p.grad is not None
                p.grad /= scale
            norms = [
                torch.nn.utils.clip_grad_norm_(some, 0.5)
                for some in (hand.masters, net.parameters())
            ]
            assert norms[0] == norms[1]
            theirs.step()
            hand.copy_back()
            own.step()
            for each in (theirs, own):
                each.zero_grad()
    for master, p, q in zip(hand.masters, net.parameters(), hand.net.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(half.masters.get(p, p), master)
    half.close()
    assert all(map(torch.equal, net.parameters(), hand.masters))


@DTYPES
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_and_comes_back(name: str, dtype: str) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.build()
    optimizer = OPTIMIZERS["sgd"](model)
    before = [(p, p.dtype, p.requires_grad) for p in model.parameters()]
    buffers = [(b.dtype, b.shape) for b in model.buffers()]
    half = half_weights(model, optimizer, dtype)  # type: ignore[arg-type]
    assert half.num_half == sum(p.numel() for p in half.masters)
    assert half.master_bytes == 4 * half.num_half > 0
    for step in range(3):
        loss = model(*case.batch(0, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isfinite()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    half.close()
    half.close()
    after = [(p, p.dtype, p.requires_grad) for p in model.parameters()]
    assert all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(before, after, strict=True))
    assert [(b.dtype, b.shape) for b in model.buffers()] == buffers
    closed = {k: v.to(state[k].dtype) for k, v in model.state_dict().items()}
    narrow = {p.dtype for p in model.parameters()} & {torch.bfloat16}
    assert narrow or digest(closed) == digest(state)


def small(dtype: str = "bf16", **settings: Any) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return net, optimizer, half_weights(net, optimizer, dtype, **settings)  # type: ignore[arg-type]


def update(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(batches()[0][0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_copy_of_the_model_has_masters_of_its_own() -> None:
    net, optimizer, half = small()
    x = batches()[0][0]
    twin = copy.deepcopy(net)
    assert torch.equal(twin(x), net(x))
    update(net, optimizer)
    assert not torch.equal(twin(x), net(x))
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(x), net(x))
    half.close()
    assert twin.first.weight.dtype == torch.bfloat16


def test_small_updates_are_not_lost() -> None:
    """A thousandth of the spacing of bf16, a thousand times."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0**-18)
    half_weights(layer, optimizer)
    for _ in range(2**12):
        layer.weight.grad = torch.ones(1, 1)
        optimizer.step()
    assert layer.weight.item() == 1 - 2.0**-6


def test_a_part_of_the_model_saves_and_loads_masters_too() -> None:
    net, optimizer, half = small()
    update(net, optimizer)
    part = net.first.state_dict()
    assert torch.equal(part["weight"], half.masters[net.first.weight])
    new = {name: torch.randn_like(value) for name, value in part.items()}
    net.first.load_state_dict(new)
    assert torch.equal(half.masters[net.first.weight], new["weight"])
    assert torch.equal(net.first.weight, new["weight"].bfloat16())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    net, _, half = small()
    before = digest(net.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        net.first.load_state_dict(
            {"weight": torch.ones(2, 2), "bias": half.masters[net.first.bias]}
        )
    with pytest.raises(UsageError, match="leave assign at False"):
        net.load_state_dict(net.state_dict(), assign=True)
    assert digest(net.state_dict()) == before


def test_an_optimizers_state_is_loaded_in_full_width() -> None:
    net, optimizer, _ = small()
    update(net, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    update(net, optimizer)
    optimizer.load_state_dict(copy.deepcopy(kept))
    assert digest(optimizer.state_dict()) == digest(kept)
    assert net.first.weight.dtype == torch.bfloat16


def test_a_step_that_fails_leaves_the_model_as_it_is() -> None:
    net, optimizer, _ = small()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert net(batches()[0][0]).isfinite().all()
    assert net.first.weight.dtype == torch.bfloat16


def test_a_model_in_bf16_gets_masters_and_comes_back_in_bf16() -> None:
    net = Net().bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(batches()[0][0].bfloat16()).square().mean().backward()
    optimizer.step()
    half = half_weights(net, optimizer, "bf16", float_modules=["last"])
    assert net.first.weight.grad is not None
    assert net.first.weight.grad.dtype == torch.float32
    assert optimizer.state[net.first.weight]["exp_avg"].dtype == torch.float32
    assert net.last.weight.dtype == net.norm.weight.dtype == torch.float32
    optimizer.zero_grad()
    update(net, optimizer)
    half.close()
    for parameter in net.parameters():
        assert parameter.dtype == parameter.grad_dtype == torch.bfloat16
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16


def test_torchs_grad_scaler_serves_it() -> None:
    net, optimizer, half = small("fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = half.masters[net.first.weight].clone()
    for _ in range(30):
        scaler.scale(net(batches()[0][0]).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert 1 < scaler.get_scale() < 2.0**30  # it fell until nothing overflowed
    assert not torch.equal(half.masters[net.first.weight], before)


def test_modules_that_stay_fp32_are_cast_at_their_edges() -> None:
    net, _, half = small(float_modules=["la*"])
    assert [*half.floats] == ["norm", "last"]
    seen = {}
    for name, module in net.named_children():
        module.register_forward_hook(
            lambda m, x, y, name=name: seen.update({name: (x[0].dtype, m.weight.dtype, y.dtype)})
        )
    assert net(batches()[0][0]).dtype == torch.float32
    half_, full = torch.bfloat16, torch.float32
    assert seen == {
        "first": (half_, half_, half_),
        "norm": (full, full, half_),
        "last": (full, full, half_),
    }


def test_a_real_model_takes_words_and_returns_its_own_output() -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(intermediate_size=32, pad_token_id=None, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    half = half_weights(model, optimizer)
    words = torch.randint(50, (2, 6))
    mask = torch.ones(2, 6)
    output = model(input_ids=words, attention_mask=mask, labels=words, output_hidden_states=True)
    assert type(output).__name__ == "MaskedLMOutput"
    assert output.loss.dtype == output.logits.dtype == torch.float32
    assert {h.dtype for h in output.hidden_states} == {torch.float32}
    output.loss.backward()
    optimizer.step()
    assert all("LayerNorm" in path for path in half.floats)
    tied = model.cls.predictions.decoder.weight
    assert tied is model.bert.embeddings.word_embeddings.weight
    assert tied.dtype == torch.bfloat16


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a slip": (
        lambda: small(float_modules=["lasst"]),
        StrategyError,
        "'lasst' matches no module; did you mean 'last'?",
    ),
    "half of a tied parameter": (
        lambda: half_weights(
            (tied := MODELS["tied"].build()), OPTIMIZERS["sgd"](tied), float_modules=["decoder"]
        ),
        StrategyError,
        "decoder.weight is the same parameter as embedding.weight",
    ),
    "an optimizer with a closure": (
        lambda: half_weights((net := Net()), torch.optim.LBFGS(net.parameters())),
        ModelError,
        "LBFGS: it computes losses inside its step",
    ),
    "a closure": (
        lambda: small()[1].step(lambda: 0.0),
        UsageError,
        "compute loss and gradients before optimizer.step()",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_wrong_is_refused(name: str) -> None:
    act, kind, words = REFUSED[name]
    with pytest.raises(kind) as caught:
        act()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "name"), [(Tensor, "to"), (nn.Module, "register_state_dict_post_hook")]
)
def test_one_that_fails_half_way_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    calls, works = count(1), getattr(owner, name)

    def third_fails(self: Any, *args: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError
        return works(self, *args)

    net = Net()
    optimizer = make("sgd", net.parameters())
    F.mse_loss(net(torch.ones(2, 5)), torch.ones(2, 4)).backward()
    before = copy.deepcopy([(p.data, p.grad) for p in net.parameters()])
    monkeypatch.setattr(owner, name, third_fails)
    with pytest.raises(MemoryError):
        half_weights(net, optimizer)
    for (value, gradient), p in zip(before, net.parameters(), strict=True):
        assert p.dtype == p.grad_dtype == torch.float32
        assert torch.equal(p.data, value)
        assert p.grad is not None
        assert torch.equal(p.grad, gradient)
    for owned in (optimizer, *net.modules()):
        assert [n for n, kept in vars(owned).items() if n.endswith("_hooks") and kept] == []
