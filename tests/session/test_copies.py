"""What copies of a model are while its session is open: plain, independent, with full precision."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import slipstream
from tests.harness.ranks import Ranks
from tests.test_plain_copy import WAYS, Copied, hooks_of

HALF = {"precision": {"kind": "half_weights", "dtype": "bf16"}}
STRATEGIES: dict[str, Any] = {
    "half weights": HALF,
    "autocast": {"precision": {"kind": "autocast", "float_ops": ["linear"]}},
    "recompute": {"memory": {"recompute": {"every": 2}}},
    "recompute under autocast": {
        "precision": {"kind": "autocast"},
        "memory": {"recompute": {"budget": 0.7}},
    },
    "offload": {"memory": {"offload": {"to": "disk", "min_bytes": 1}}},
    "chains": {"compute": {"fuse_bn_act": True}},
    "channels last": {"compute": {"channels_last": True}},
    "trace": {"trace": {"steps": 2}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.norm(self.convolution(x)))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.register_buffer("shift", torch.full((1,), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.shift
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


def opened(strategy: Any) -> slipstream.Session[Net, torch.optim.AdamW]:
    torch.manual_seed(0)
    net = Net()
    session = slipstream.accelerate(net, torch.optim.AdamW(net.parameters()), strategy=strategy)
    update(session)
    return session


def update(session: Any) -> None:
    x = torch.randn(2, 3, 8, 8)
    session.backward(session.model(x).square().mean())
    session.step()


def size(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def check_copy(session: Any, copied: Copied) -> None:
    twin, state = copied(session.model), session.model.state_dict()
    assert type(twin) is Net
    assert {t.dtype for t in [*twin.parameters(), twin.shift]} == {torch.float32}
    for name, value in twin.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert size(twin) == size(Net())
    for module in twin.modules():
        assert hooks_of(module) == []
        assert "forward" not in vars(module)
    before = {name: value.clone() for name, value in state.items()}
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(torch.ones(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    after = session.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    update(session)


@WAYS
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_copy_is_a_plain_model(
    name: str, copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(STRATEGIES[name]) as session:
        check_copy(session, copied)
        layer = copied(session.model.blocks[0])
        assert layer(torch.ones(1, 4, 8, 8)).dtype == torch.float32


def copies_on_ranks() -> None:
    transport = {"gradients": {"transport": "sharded"}}
    with opened({**HALF, **transport}) as session:
        check_copy(session, copy.deepcopy)


def test_a_copy_of_shared_half_weights_is_a_plain_model(two: Ranks) -> None:
    two.run(copies_on_ranks)


def test_averages_of_half_weights_move_in_full_precision() -> None:
    """Updates far below the rounding of bf16, averaged by torch's own class."""
    with opened(HALF) as session:
        average = AveragedModel(session.model, avg_fn=get_ema_avg_fn(0.999))
        before = copy.deepcopy(average.module.state_dict())
        for _ in range(3):
            update(session)
            average.update_parameters(session.model)
        after = average.module.state_dict()
        assert {p.dtype for p in average.parameters()} == {torch.float32}
        assert not torch.equal(before["stem.weight"], after["stem.weight"])


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied(take: Any) -> None:
    with (
        opened({}) as session,
        pytest.raises(slipstream.errors.UsageError, match=r"session\.model"),
    ):
        take(session)
