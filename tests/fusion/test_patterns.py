"""Chains of operations as one: what is found, what must not be, and that results stay."""

from __future__ import annotations

import copy
import operator
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertModel,
    MobileNetV2Config,
    MobileNetV2Model,
    ResNetConfig,
    ResNetModel,
    SwinConfig,
    SwinModel,
)

from slipstream.errors import UsageError
from slipstream.fusion import fuse_patterns
from slipstream.memory.forward_override import ForwardOverride

pytestmark = pytest.mark.usefixtures("without_compilation")

NORM, SUM, BOTH = "batch norm + activation", "add + activation", "batch norm + add + activation"
DEPTHWISE = "relu + depthwise convolution"
Step = Callable[["Unit", Tensor], Tensor]


class Unit(nn.Module):
    """Layers that the forwards below put together."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.conv, self.other = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.depthwise = nn.Conv2d(4, 8, 3, padding=1, groups=4)
        self.bn, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)
        self.plain = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
        self.relu, self.in_place = nn.ReLU(), nn.ReLU(inplace=True)
        self.gelu = nn.GELU(approximate="tanh")
        self.whole = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU6())

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def resnet(m: Unit, x: Tensor) -> Tensor:
    y = m.bn2(m.other(m.in_place(m.bn(m.conv(x)))))
    y += x
    return m.in_place(y)  # type: ignore[no-any-return]


def added_to_the_residual(m: Unit, x: Tensor) -> Tensor:
    y = m.conv(x)
    y += m.bn(m.other(x))
    return F.relu(y)


def after_the_residual(m: Unit, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    return torch.sigmoid(torch.add(y, m.bn2(m.other(x))))


def methods(m: Unit, x: Tensor) -> Tensor:
    return m.conv(x).add(x).tanh() + m.plain(m.other(x)).sigmoid()  # type: ignore[no-any-return]


def others(m: Unit, x: Tensor) -> Tensor:
    y = F.gelu(m.bn(m.conv(x))) + m.gelu(x + m.other(x))
    return F.silu(operator.add(y, x)) + F.hardswish(m.plain(x)) + F.relu6(m.bn2(x))  # type: ignore[no-any-return]


def inner_block(m: Unit, x: Tensor) -> Tensor:
    return m.whole(x)  # type: ignore[no-any-return]


def twice(m: Unit, x: Tensor) -> Tensor:
    return m.relu(m.bn(m.relu(m.bn(m.conv(x)))))  # type: ignore[no-any-return]


def xception(m: Unit, x: Tensor) -> Tensor:
    return m.depthwise(m.relu(x)).sum(1, keepdim=True) + m.conv(x)  # type: ignore[no-any-return]


def depthwise_after_norm(m: Unit, x: Tensor) -> Tensor:
    return m.depthwise(m.relu(m.bn(x)))  # type: ignore[no-any-return]


def broadcast_sum(m: Unit, x: Tensor) -> Tensor:
    return torch.relu(m.conv(x) + m.other(x).mean((2, 3), keepdim=True))


def change_between(m: Unit, x: Tensor) -> Tensor:
    y, z = m.bn(x), m.conv(x)
    z.mul_(2)
    return torch.relu(y + z)


FOUND: dict[Step, dict[str, int]] = {
    resnet: {NORM: 1, BOTH: 1},
    added_to_the_residual: {BOTH: 1},
    after_the_residual: {BOTH: 1},
    methods: {SUM: 1, NORM: 1},
    others: {NORM: 3, SUM: 1},  # the other sum is of results of functions
    inner_block: {NORM: 1},
    twice: {NORM: 2},
    xception: {DEPTHWISE: 1},
    depthwise_after_norm: {NORM: 1},
    broadcast_sum: {SUM: 1},
    change_between: {BOTH: 1},
}


def used_again(m: Unit, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    return m.relu(y) + y  # type: ignore[no-any-return]


def sum_used_again(m: Unit, x: Tensor) -> Tensor:
    y = m.conv(x) + x
    return m.relu(y) * y  # type: ignore[no-any-return]


def scaled_sum(m: Unit, x: Tensor) -> Tensor:
    return torch.relu(torch.add(m.conv(x), x, alpha=2))


def sum_with_a_number(m: Unit, x: Tensor) -> Tensor:
    return torch.relu(x + 1)


def relu_of_the_input_in_place(m: Unit, x: Tensor) -> Tensor:
    """As in Xception of older model collections: the skip connection sees relu(x)."""
    y = x * 1
    return m.depthwise(m.in_place(y)).sum(1, keepdim=True) + m.conv(y)  # type: ignore[no-any-return]


def sum_into_an_alias(m: Unit, x: Tensor) -> Tensor:
    y = x * 1
    z = y.view_as(y)
    z += m.conv(x)
    return torch.relu(z) + y


def whole_convolution(m: Unit, x: Tensor) -> Tensor:
    return m.conv(m.relu(x))  # type: ignore[no-any-return]


LEFT_ALONE: dict[Step, dict[str, int]] = {
    used_again: {},
    sum_used_again: {},
    scaled_sum: {},
    sum_with_a_number: {},
    relu_of_the_input_in_place: {},
    sum_into_an_alias: {},
    whole_convolution: {},
}
ALL = {**FOUND, **LEFT_ALONE}
all_steps = pytest.mark.parametrize("step", ALL, ids=lambda step: step.__name__)


def found_in(fused: Any) -> dict[str, int]:
    value = fused.report_rows()[0].value
    if value == "none found":
        return {}
    return {name: int(n) for n, _, name in (part.partition(" ") for part in value.split(", "))}


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradients and buffers after two passes."""
    for _ in range(2):
        model.zero_grad()
        given = x.clone().requires_grad_()
        out = model(given)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=x.dtype).view_as(out))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [out, given.grad, *gradients, *model.buffers()]  # type: ignore[list-item]


@all_steps
def test_found_and_equal(step: Step) -> None:
    x, unit = torch.randn(3, 4, 5, 7, dtype=torch.float64), Unit(step).double()
    plain, names = copy.deepcopy(unit), list(unit.state_dict())
    fused = fuse_patterns(unit)
    found = Counter(found_in(fused))
    if step is not inner_block:
        found -= Counter({NORM: 1})  # that of ``whole``, which is a block of its own
    assert found == ALL[step]
    with torch.no_grad():
        torch.testing.assert_close(unit.eval()(x), plain.eval()(x), rtol=1e-9, atol=1e-9)
    for now, then in zip(trained(unit.train(), x), trained(plain.train(), x), strict=True):
        assert type(now) is Tensor
        torch.testing.assert_close(now, then, rtol=1e-9, atol=1e-9)
    assert list(unit.state_dict()) == names
    fused.close()
    assert not any("forward" in vars(module) for module in unit.modules())


def test_only_what_was_asked_for() -> None:
    assert found_in(fuse_patterns(Unit(resnet), ["add_act"])) == {SUM: 1}
    assert found_in(fuse_patterns(Unit(xception), ["add_act"])) == {}
    with pytest.raises(UsageError, match=r"bn_relu.*allowed: some of add_act, bn_act"):
        fuse_patterns(Unit(resnet), ["bn_relu"])  # type: ignore[list-item]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match=r"compiler no-such-compiler.*apt-get install g\+\+"):
            fuse_patterns(Unit(resnet))
    fuse_patterns(Unit(resnet), ["relu_depthwise"])


@pytest.mark.parametrize("watched", ["in_place", "bn"])
def test_layers_that_hooks_watch_stay(watched: str) -> None:
    unit, seen = Unit(resnet), []
    unit.get_submodule(watched).register_forward_hook(lambda *given: seen.append(given))
    left = {"in_place": {NORM: 1}, "bn": {NORM: 1, BOTH: 1}}
    assert found_in(fuse_patterns(unit)) == left[watched]
    unit(torch.randn(2, 4, 5, 5))
    assert len(seen) == 2 if watched == "in_place" else 1


def test_hooks_of_a_batch_norm_still_fire() -> None:
    """Those that are there later, such as a transport's that waits for its parameters."""
    unit, seen = Unit(resnet), []
    fuse_patterns(unit)
    unit.bn.register_forward_pre_hook(lambda *given: seen.append(given))
    unit(torch.randn(2, 4, 5, 5))
    assert len(seen) == 1


def test_another_activation_later_is_computed() -> None:
    unit, x = Unit(resnet), torch.randn(2, 4, 5, 5)
    fuse_patterns(unit)
    unit.in_place = nn.Tanh()  # type: ignore[assignment]
    assert unit(x).min() < 0, "relu would give none below 0"


def test_copies_are_plain() -> None:
    unit, x = Unit(resnet), torch.randn(2, 4, 5, 5)
    fuse_patterns(unit)
    for copied in (copy.deepcopy(unit), pickle.loads(pickle.dumps(unit))):
        forwards = [vars(module).get("forward") for module in copied.modules()]
        assert not any(isinstance(forward, ForwardOverride) for forward in forwards)
        torch.testing.assert_close(copied(x), unit(x))


def test_one_value_a_channel_is_refused_as_by_torch() -> None:
    unit = Unit(lambda m, x: m.relu(m.bn(x)))
    fuse_patterns(unit)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        unit(torch.randn(1, 4, 1, 1))


@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 3, 5, 5)])
def test_wrong_shapes_are_refused_as_by_torch(shape: tuple[int, ...]) -> None:
    unit = Unit(lambda m, x: m.relu(m.bn(x)))
    fuse_patterns(unit)
    with pytest.raises((ValueError, RuntimeError), match=r"expected 4D input|running_mean should"):
        unit(torch.randn(shape))


class Undecided(nn.Module):
    """Cannot be recorded, and has layers that chains consist of."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.relu = nn.BatchNorm1d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(x)) if x.sum() > 0 else x  # type: ignore[no-any-return]


def test_the_report_names_what_was_not_looked_into() -> None:
    found, skipped = fuse_patterns(nn.Sequential(Undecided(), Undecided())).report_rows()
    assert (found.value, skipped.value) == ("none found", "1")
    assert "Undecided: torch.fx: symbolically traced variables" in skipped.note


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_under_autocast(order: Any) -> None:
    unit, x = Unit(resnet).to(memory_format=order), torch.randn(4, 4, 9, 9)
    plain, x = copy.deepcopy(unit), x.to(memory_format=order)
    fuse_patterns(unit)
    with torch.autocast("cpu", torch.bfloat16):
        now, then = trained(unit, x), trained(plain, x)
    # The gradient of a bias before a batch norm is 0, rounding alone: the largest of all measures.
    size = max(float(other.detach().float().abs().max()) for other in then)
    for one, other in zip(now, then, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * size)


RESNET = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[3, 4, 6, 3])
SWIN = SwinConfig(
    image_size=64, patch_size=4, window_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4]
)
BERT = BertConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=32)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int], float]] = {
    "ResNet-50": (lambda: ResNetModel(RESNET), {NORM: 33, BOTH: 16}, 1.0),
    "MobileNet-V2": (lambda: MobileNetV2Model(MobileNetV2Config(image_size=64)), {NORM: 35}, 0.75),
    "Swin": (lambda: SwinModel(SWIN), {}, 1.0),
    "BERT": (lambda: BertModel(BERT), {}, 1.0),
}
"""What is found in each, and at most so many of the bytes that torch keeps remain."""


@pytest.mark.parametrize("name", MODELS)
def test_real_models(name: str) -> None:
    """Chains found, nodes of the graph before and after, bytes kept for backward."""
    build, expected, share = MODELS[name]
    model = build()
    tokens = torch.randint(99, (2, 8)) if name == "BERT" else torch.randn(2, 3, 64, 64)
    nodes, kept = cost(model, tokens)
    fused = fuse_patterns(model)
    assert found_in(fused) == expected
    fewer_nodes, kept_now = cost(model, tokens)
    assert fewer_nodes == nodes - sum(expected.values()) - expected.get(BOTH, 0)
    assert kept_now <= share * kept


def cost(model: nn.Module, given: Tensor) -> tuple[int, int]:
    """The nodes of the graph of a forward, and the bytes that they keep beside parameters."""
    kept: dict[int, int] = {}
    parameters = {p.data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = model(given).last_hidden_state
    seen, ahead = set(), [out.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
    return len(seen), sum(kept.values())
