"""Autocast around a forward: what computes in which type, also when it is computed once more."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.errors import StrategyError
from slipstream.memory import recompute
from slipstream.precision import autocast
from slipstream.precision.op_casts import check_ops
from slipstream.strategy import EveryConfig, HalfType
from tests.precision.battery import TYPES

HALF, FULL = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self, seen: dict[str, list[torch.dtype]]) -> None:
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(4, 8), nn.Linear(8, 4), seen

    def note(self, name: str, x: Tensor) -> Tensor:
        self.seen.setdefault(name, []).append(x.dtype)
        return x

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.note("up", self.up(x))
        hidden = self.note("gelu", F.gelu(hidden))
        hidden = self.note("softmax", hidden.softmax(-1))
        return self.note("down", self.down(hidden))


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.seen: dict[str, list[torch.dtype]] = {}
        self.block, self.recompute = Block(self.seen), recompute

    def forward(self, x: Tensor, *, fail: bool = False) -> dict[str, Tensor]:
        run = self.block
        hidden = checkpoint(run, x, use_reentrant=False) if self.recompute else run(x)
        if fail:
            raise KeyboardInterrupt
        return {"hidden": hidden, "words": torch.ones(1, dtype=torch.int64)}


X = torch.ones(2, 4)
PLAIN = dict.fromkeys(("up", "gelu", "softmax", "down"), HALF)
CASTS: dict[str, tuple[dict[str, Any], dict[str, torch.dtype]]] = {
    "plain": ({}, {}),
    "float op": ({"float_ops": ["gelu"]}, {"gelu": FULL, "softmax": FULL}),
    "half op": ({"float_ops": ["gelu"], "half_ops": ["softmax"]}, {"gelu": FULL}),
    "linear in fp32": ({"float_ops": ["linear"]}, dict.fromkeys(PLAIN, FULL)),
    "float module": ({"float_modules": ["block.d*"]}, {"down": FULL}),
    "outer float module": ({"float_modules": ["b*"]}, dict.fromkeys(PLAIN, FULL)),
    "all": (
        {"half_ops": ["softmax"], "float_ops": ["tanh"], "float_modules": ["block.up"]},
        {"up": FULL, "gelu": FULL},
    ),
}


@pytest.mark.parametrize("recompute", [False, True], ids=["once", "recomputed"])
@pytest.mark.parametrize("name", CASTS)
def test_each_function_computes_in_its_type(name: str, recompute: bool) -> None:
    settings, changed = CASTS[name]
    net = Net(recompute)
    casts = autocast(net, "bf16", **settings)
    output = net(X)
    assert output["hidden"].dtype == FULL
    assert output["words"].dtype == torch.int64
    output["hidden"].sum().backward()
    assert {key: {*dtypes} for key, dtypes in net.seen.items()} == {
        key: {dtype} for key, dtype in (PLAIN | changed).items()
    }
    assert len(net.seen["softmax"]) == (2 if recompute else 1)
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {FULL}
    casts.close()
    casts.close()
    net.seen.clear()
    net(X)
    assert {dtype for dtypes in net.seen.values() for dtype in dtypes} == {FULL}
    assert all("forward" not in vars(module) for module in net.modules())


@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_torchs_autocast_bit_for_bit(dtype: HalfType) -> None:
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(3, 4)
    with torch.autocast("cpu", TYPES[dtype]):
        expected = net(x)["hidden"].float()
    casts = autocast(net, dtype)
    assert torch.equal(net(x)["hidden"], expected)
    casts.close()


def test_a_model_may_be_moved_afterwards() -> None:
    net = Net().to("meta")
    casts = autocast(net, half_ops=["softmax"], float_ops=["gelu"], float_modules=["block.down"])
    net.to_empty(device="cpu")
    assert net(X)["hidden"].dtype == FULL
    kinds = {"up": HALF, "gelu": FULL, "softmax": HALF, "down": FULL}
    assert net.seen == {name: [kind] for name, kind in kinds.items()}
    casts.close()


def test_a_forward_that_is_left_leaves_autocast() -> None:
    net = Net()
    casts = autocast(net, half_ops=["softmax"], float_modules=["block.up"])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            net(X, fail=True)
        assert not torch.is_autocast_enabled("cpu")
        assert X.softmax(0).dtype == FULL
    assert net(X)["hidden"].dtype == FULL
    assert net.seen["softmax"] == [HALF] * 3
    assert net.seen["up"] == [FULL] * 3
    casts.close()


def pickled(net: Net) -> Net:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    found: Net = torch.load(file, weights_only=False)
    return found


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_the_model_is_its_own_and_plain(copied: Callable[[Net], Net]) -> None:
    net = Net()
    before = inspect.signature(net.forward)
    casts = autocast(net)
    assert inspect.signature(net.forward) == before
    twin = copied(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(X)["hidden"].any()
    assert net(X)["hidden"].any()
    assert twin.block.seen["up"] == [torch.float32]
    casts.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [("gelux", "did you mean 'gelu'?"), ("add_", "without a trailing _"), ("F.gelu", "'F.gelu'")],
)
def test_names_of_no_function_are_refused(name: str, words: str) -> None:
    with pytest.raises(StrategyError) as caught:
        check_ops(["softmax", name])
    assert words in str(caught.value)


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"'block\.dwn' matches no module; did you mean"):
        autocast(Net(), float_modules=["block.dwn"])


@pytest.mark.parametrize("over", ["another", "a recomputation"])
def test_what_was_put_around_it_since_may_stay(over: str) -> None:
    """Closed in the order of opening, and in the end nothing is left."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    plain = layers(X)
    first = autocast(layers, float_ops=["gelu"])
    second = autocast(layers) if over == "another" else recompute(layers, EveryConfig())
    first.close()
    assert torch.equal(layers(X), plain) == (over == "a recomputation")
    second.close()
    left = [m for m in layers.modules() if "forward" in vars(m)]
    assert over != "another" or not left
    assert torch.equal(layers(X), plain)
    assert all("forward" not in vars(module) for module in layers.modules())
