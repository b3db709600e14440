"""Half weights alone: bit for bit the loop written by hand, and what they leave as it was."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from slipstream.errors import UsageError
from slipstream.precision import autocast, half_weights
from slipstream.strategy import HalfType
from tests.harness.models import MODELS
from tests.harness.reference import OPTIMIZERS
from tests.harness.versions import needs_torch_2_12
from tests.precision.battery import TYPES, digest
from tests.precision.half_models import Net, batches, make, small, update

DTYPES = pytest.mark.parametrize("dtype", TYPES)


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


@DTYPES
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "foreach", "fused", "lamb"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_it_is_the_loop_by_hand_bit_for_bit(optimizer: str, dtype: HalfType, scale: float) -> None:
    """Accumulating two batches, with gradient clipping by torch's own function."""
    torch.manual_seed(0)
    net = Net()
    hand = ByHand(net, TYPES[dtype])
    theirs, own = make(optimizer, hand.masters), make(optimizer, net.parameters())
    half = half_weights(net, own, dtype)
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


@needs_torch_2_12
@DTYPES
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_and_comes_back(name: str, dtype: HalfType) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.build()
    optimizer = OPTIMIZERS["sgd"](model)
    before = [(p, p.dtype, p.requires_grad) for p in model.parameters()]
    buffers = [(b.dtype, b.shape) for b in model.buffers()]
    half = half_weights(model, optimizer, dtype)
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


def test_a_copy_of_the_model_is_plain_and_has_the_values_of_the_masters() -> None:
    net, optimizer, half = small()
    update(net, optimizer)
    twin = copy.deepcopy(net)
    kept = digest(net.state_dict())
    assert digest(twin.state_dict()) == kept
    update(net, optimizer)
    assert digest(twin.state_dict()) == kept
    half.close()
    assert {p.dtype for p in twin.parameters()} == {torch.float32}


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


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "clamped": lambda p: p.clamp_(-0.1, 0.1),
    "drawn anew": lambda p: nn.init.normal_(p),
    "an average": lambda p: p.lerp_(torch.zeros_like(p), 0.5),
    "one value": lambda p: p.view(-1)[0].fill_(3.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("then", ["saved", "stepped", "closed"])
def test_what_is_written_into_a_parameter_counts(write: str, then: str) -> None:
    """And values that it leaves keep all bits of their masters."""
    net, optimizer, half = small()
    update(net, optimizer)
    weight = net.first.weight
    before, master = torch.clone(weight).detach(), half.masters[weight].clone()  # the 16 bits
    with torch.no_grad():
        WRITES[write](weight)
    assert (before != weight).any()
    expected = torch.where(before == weight, master, weight.float())
    if then == "stepped":
        optimizer.step()  # without gradients
        assert torch.equal(half.masters[weight], expected)
    elif then == "closed":
        half.close()
    assert torch.equal(net.state_dict()["first.weight"], expected)
    assert torch.equal(weight, expected.to(weight.dtype))


def test_a_value_that_comes_back_has_its_master_again() -> None:
    """Averages in the place of parameters for an evaluation, and in a checkpoint of it."""
    net, optimizer, half = small()
    update(net, optimizer)
    kept, state = copy.deepcopy([*net.parameters()]), digest([*half.masters.values()])
    with torch.no_grad():
        torch._foreach_zero_([*net.parameters()])
    assert not any(value.any() for value in net.state_dict().values())
    with torch.no_grad():
        torch._foreach_copy_([*net.parameters()], kept)
    optimizer.step()
    assert digest([*half.masters.values()]) == state


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
    with pytest.raises(UsageError, match="use assign=False"):
        net.load_state_dict(net.state_dict(), assign=True)
    assert digest(net.state_dict()) == before


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


class RotaryEmbedding(nn.Module):
    """Makes them as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([0.3, 0.01]), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return (positions[:, None].float() * self.get_buffer("inv_freq").float()).cos().to(x.dtype)


def test_rotary_positions_keep_their_frequencies() -> None:
    class Turned(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x) * self[1](x, torch.arange(1000, 1000 + len(x)))

    model = Turned(nn.Linear(2, 2), RotaryEmbedding())
    x = torch.ones(8, 2)
    exact = model(x).detach()
    half = half_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [*half.floats] == ["1"]
    torch.testing.assert_close(model(x), exact, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("way", ["matrix_exp", "cayley", "householder"])
def test_a_layer_with_orthogonal_weights_stays_fp32(way: str) -> None:
    """Torch makes them by an exponential, NaN in 16 bits, or by what it has for fp32 alone."""
    turned = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map=way)
    model = nn.Sequential(nn.Linear(4, 8), turned, nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    half = half_weights(model, optimizer)
    assert [*half.floats] == ["1"]
    for _ in range(3):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = turned.weight.detach()
    torch.testing.assert_close(weight @ weight.T, torch.eye(8), atol=1e-5, rtol=1e-5)


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


def test_buffers_may_go_meanwhile() -> None:
    net = Net()
    for name in ("mask", "cache"):
        net.register_buffer(name, torch.ones(3))
        net.norm.register_buffer(name, torch.ones(3, dtype=torch.bfloat16))
    half = half_weights(net, torch.optim.SGD(net.parameters()))
    for module in (net, net.norm):
        module.mask = None
        del module.cache
    half.close()
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_a_model_that_is_dropped_is_freed() -> None:
    net, _, half = small()
    alive = weakref.ref(net)
    del net, half, _
    gc.collect()
    assert alive() is None


@dataclass(frozen=True)
class Hidden:
    states: Tensor
    number: int = 0


class OfDataclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden: Hidden) -> Hidden:
        return replace(hidden, states=self.layer(hidden.states))


@pytest.mark.parametrize("kind", ["autocast", "half_weights"])
def test_dataclasses_are_cast_as_they_come_and_go(kind: str) -> None:
    model = OfDataclasses()
    seen: list[Hidden] = []
    model.layer.register_forward_hook(lambda module, x, y: seen.append(Hidden(y)))
    if kind == "autocast":
        autocast(model)
    else:
        half_weights(model, torch.optim.SGD(model.parameters()))
    given = Hidden(torch.ones(2, 4), number=7)
    output = model(given)
    assert (output.states.dtype, output.number) == (torch.float32, 7)
    assert seen[0].states.dtype == torch.bfloat16
    assert given.states.dtype == torch.float32
