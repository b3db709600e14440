"""Compiled blocks: which, how many compilations, and when their gradients come."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

from slipstream.errors import ModelError, StrategyError, UsageError
from slipstream.fusion import ChannelsLast, compile_blocks
from slipstream.strategy import Strategy

pytestmark = pytest.mark.process  # a compiler


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.norm(self.down(self.up(x).relu()))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.layers = nn.ModuleList([*(Layer(6, 8) for _ in range(layers)), Layer(6, 5)])
        self.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _count_anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):  # no threads that stay
        yield


def batch() -> Tensor:
    """Of one shape and dtype in all tests, which so share what the compiler keeps on disk."""
    return torch.randn(7, 4, dtype=torch.float64)


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = model(x)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=x.dtype).view_as(out))
    return [out, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def test_blocks_of_a_kind_share_a_compilation() -> None:
    model, x = Model().double(), batch()
    plain = copy.deepcopy(model)
    compiled = compile_blocks(model)
    assert compiled.report_rows()[0].value == "5 blocks of 3 kinds"
    for now, then in zip(trained(model, x), trained(plain, x), strict=True):
        torch.testing.assert_close(now, then)
    assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"]
    assert list(model.state_dict()) == list(plain.state_dict())
    compiled.close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_gradients_come_block_by_block() -> None:
    """One graph for all gives them at the end; so would the exchange begin."""
    model, order = Model().double(), []
    compile_blocks(model)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    for index, layer in enumerate(model.layers):
        layer.register_full_backward_pre_hook(lambda *_, i=index: order.append(f"enters {i}"))
    model(batch()).sum().backward()
    blocks = [name.split(".")[1] if name.startswith("layers") else name for name in order]
    assert blocks.index("enters 2") > max(i for i, name in enumerate(blocks) if name == "3")
    assert [b for b in blocks if b in "0123"] == sorted([b for b in blocks if b in "0123"])[::-1]


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a transformer": (
        lambda: BertModel(BertConfig(num_hidden_layers=3, hidden_size=16, num_attention_heads=2)),
        3,
    ),
    "a ResNet": (lambda: ResNetModel(ResNetConfig(hidden_sizes=[8, 16], depths=[3, 2])), 5),
    "no repeated blocks": (lambda: Model(0), 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_which_blocks(name: str) -> None:
    build, least = MODELS[name]
    model = build()
    compile_blocks(model)
    replaced = [path for path, module in model.named_modules() if "forward" in vars(module)]
    assert len(replaced) >= least
    assert "" not in replaced, "the gradients of the whole model would come at the end"
    for path in replaced:
        assert not any(path.startswith(f"{other}.") for other in replaced)


def test_convolutions_are_told_of_channels_last() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())

    model = nn.Sequential(block(), block())
    compiled = compile_blocks(model)
    assert "with channels_last" in compiled.report_rows()[0].note
    changed = ChannelsLast(model, torch.optim.SGD(model.parameters()))
    assert "channels_last" not in compiled.report_rows()[0].note
    changed.close()
    compiled.close()


def test_hooks_that_come_later_are_called() -> None:
    model, x = Model(1).double(), batch()
    plain = copy.deepcopy(model)
    compile_blocks(model)
    for _ in range(2):
        for now, then in zip(trained(model, x), trained(plain, x), strict=True):
            torch.testing.assert_close(now, then)
        for each in (model, plain):
            each.layers[0].norm.register_forward_hook(lambda module, given, out: 2 * out)  # type: ignore[union-attr]


def test_nothing_to_compile() -> None:
    with pytest.raises(ModelError, match=r"compute\.compile: Linear has no block"):
        compile_blocks(nn.Linear(2, 2))


def test_chains_are_left_to_the_compiler() -> None:
    wish: dict[str, Any] = {"compute": {"compile": True, "fuse_bn_act": True}}
    with pytest.raises(StrategyError, match="compile and fuse_bn_act exclude each other"):
        Strategy.load(wish)


def test_blocks_with_other_hooks_share_no_compilation() -> None:
    torch.manual_seed(0)
    model = Model(2).double()
    model.layers[0].up.register_forward_hook(lambda module, args, out: 2 * out)
    plain, x = copy.deepcopy(model), batch()
    compiled = compile_blocks(model)
    torch.testing.assert_close(trained(model, x), trained(plain, x))
    compiled.close()


def test_second_derivatives_are_refused() -> None:
    model = Model(1).double()
    compiled = compile_blocks(model)
    x = batch().requires_grad_()
    with pytest.raises(UsageError, match=r"create_graph=True .*leave out compute.compile"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    compiled.close()


def test_transforms_run_the_blocks_as_they_are() -> None:
    model = Model(1).eval()
    plain, x = copy.deepcopy(model), torch.randn(5, 4)
    compiled = compile_blocks(model)
    _, pull = torch.func.vjp(model, x)
    _, plain_pull = torch.func.vjp(plain, x)
    torch.testing.assert_close(pull(torch.ones(5, 2)), plain_pull(torch.ones(5, 2)))
    compiled.close()
