"""Half weights alone: bit for bit the loop written by hand, and what they leave as it was."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ModelError, StrategyError, UsageError
from slipstream.optim import Lamb
from slipstream.precision import autocast, half_weights
from slipstream.strategy import HalfType
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


def small(dtype: HalfType = "bf16", **settings: Any) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return net, optimizer, half_weights(net, optimizer, dtype, **settings)


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
    before, master = weight.detach().clone(), half.masters[weight].clone()
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


# One optimizer.


def halves() -> tuple[nn.Sequential, torch.optim.SGD, torch.optim.SGD]:
    """Half weights with an optimizer of the body, and another one of the head."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    body, head = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    half_weights(model, body)
    return model, body, head


def test_a_parameter_may_join_the_optimizer_later() -> None:
    model, body, _ = halves()
    before = digest(model[2].state_dict())
    for joined in (False, True):
        model(torch.ones(2, 4)).sum().backward()
        body.step()
        assert (digest(model[2].state_dict()) != before) == joined
        body.zero_grad()
        if not joined:
            body.add_param_group({"params": model[2].parameters()})


class Ahead(torch.optim.Optimizer):
    """Two steps of another optimizer in one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        self.inner.step()


def test_a_parameter_that_the_optimizer_does_not_hold_is_the_users() -> None:
    """A teacher inside of the model that follows by ``data``."""
    model, body, _ = halves()
    model[2].weight.data.fill_(2.0)
    model(torch.ones(2, 4)).sum().backward()
    body.step()
    assert (model[2].weight == 2).all()
    assert (model.state_dict()["2.weight"] == 2).all()


def test_an_optimizer_may_step_by_another() -> None:
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    half_weights(net, outer := Ahead(inner))
    before = net.first.bias.detach().float().clone()
    net(batches()[0][0]).sum().backward()
    outer.step()
    assert not torch.equal(net.first.bias, before)
    with pytest.raises(
        UsageError, match=r"SGD.step\(\) on first.weight, first.bias, last.weight: only"
    ):
        inner.step()


def test_an_optimizer_of_another_model_steps_as_it_likes() -> None:
    net, _, half = small()
    other = Net()
    for model in (other, net):
        before = model.last.weight.detach().clone()
        update(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert not torch.equal(model.last.weight, before)
        half.close()  # then the first one is free as well


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
        "decoder.weight is tied to embedding.weight",
    ),
    "an optimizer with a closure": (
        lambda: half_weights((net := Net()), torch.optim.LBFGS(net.parameters())),
        ModelError,
        "LBFGS: it computes losses inside its step",
    ),
    "an optimizer of another model": (
        lambda: half_weights(Net(), torch.optim.SGD(Net().parameters())),
        ModelError,
        "SGD, which holds no parameter of the model",
    ),
    "half weights twice": (
        lambda: half_weights(*small()[:2]),
        ModelError,
        "already has half weights (first.weight is torch.bfloat16 with fp32 gradients)",
    ),
    "another optimizer": (
        lambda: halves()[2].step(),
        UsageError,
        "SGD.step() on 2.weight, 2.bias: only the SGD passed to half_weights steps",
    ),
    "a model in double precision": (
        lambda: half_weights((net := Net().double()), torch.optim.SGD(net.parameters())),
        ModelError,
        "(first.weight is torch.float64, first.bias is torch.float64, last.weight is torch.float64",
    ),
    "a model that stays fp32": (
        lambda: small(float_modules=["*"]),
        ModelError,
        "(there is none); call model.float() first, or name fewer float_modules",
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


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own
def test_a_step_may_be_compiled() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        half_weights(net, optimizer)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(2):
            net(batches()[0][0]).square().mean().backward()
            step()
        results.append(net.state_dict())
    plain, found = results
    assert all(torch.equal(value, plain[name]) for name, value in found.items())


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
