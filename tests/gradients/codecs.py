"""Codecs by name, a small model, and one training step of it, for all tests of codecs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.codecs import Ranks as CodecRanks
from slipstream.gradients.compressed import CompressionPlan
from slipstream.gradients.engine import Engine
from slipstream.gradients.momentum import MomentumCorrection
from slipstream.gradients.segments import parameters_of
from slipstream.strategy import FlatConfig, SplitConfig, Strategy, codec_of
from slipstream.transport.channel import Channel
from slipstream.transport.transport import make_transport

CODECS: dict[str, dict[str, Any]] = {
    "bf16": {"kind": "half"},
    "fp16": {"kind": "half", "dtype": "fp16"},
    "int8": {"kind": "int8", "block": 8},
    "int8, stochastic": {"kind": "int8", "rounding": "stochastic", "error_feedback": True},
    "int4": {"kind": "int4", "block": 8},
    "onebit": {"kind": "onebit", "block": 64, "start_step": 0},
    "topk": {"kind": "topk", "chunk": 8, "keep": 2},
    "dgc": {"kind": "dgc", "density": 0.3, "warmup_steps": 0},
    "powersgd": {"kind": "powersgd", "rank": 1, "start_step": 1, "min_compression_rate": 1},
    "by name": {
        "kind": "by_name",
        "rules": [{"match": "*bias"}, {"match": "body.0.*", "codec": "half"}, {"match": "*"}],
    },
    "mixed": {
        "kind": "by_name",
        "rules": [{"match": "*bias", "codec": "half"}, {"match": "*", "codec": "int8"}],
    },
}


KEPT = ["int8, stochastic", "onebit", "dgc", "powersgd"]


NEAR = {
    "bf16": 0.03,
    "fp16": 0.01,
    "int8": 0.05,
    "int8, stochastic": 0.05,
    "int4": 0.3,
    "onebit": 0.9,
    "topk": 0.95,
    "dgc": 0.9,
    "powersgd": 0.9,
    "by name": 0.03,
    "mixed": 0.05,
}


"""How far three steps may end from those without a codec, over the way that these have come."""


def apart(a: nn.Module, b: nn.Module, start: nn.Module) -> float:
    """The distance of two models over the way that the second has come: 1 if one never left."""

    def distance(one: nn.Module, other: nn.Module) -> float:
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return sum(float((x - y).detach().abs().square().sum()) for x, y in pairs) ** 0.5

    return distance(a, b) / max(distance(b, start), 1e-30)


class Wide(nn.Module):
    """Two matrices and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def wide(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Wide()


def rows(step: int, poison: float = 1.0) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 32, generator=seed) * poison


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def session_of(model: nn.Module, codec: object, **settings: Any) -> Any:
    gradients = {"codec": codec, **settings}
    strategy = {"gradients": gradients, "checks": {"nonfinite": "skip"}}
    return slipstream.accelerate(model, sgd(model), None, strategy)


def step_of(session: Any, step: int, poison: float = 1.0, **scale: float) -> bool:
    session.backward(session.model(rows(step, poison)) * scale.get("loss_scale", 1.0), **scale)
    return session.step()


def left_over(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What all ranks together have not sent, by parameter."""
    total: dict[str, torch.Tensor] = {}
    for kept in state["codecs"]:
        for name, values in kept.items():
            for key in ("error", "velocity", "momentum"):
                if key in values:
                    place = f"{name} {'error' if key != 'momentum' else key}"
                    total[place] = total.get(place, 0) + values[key].double()
            if "served" in values:
                first, served = int(values["served_from"]), values["served"].double()
                total[f"{name} error"][first : first + len(served)] += served
    return total


@contextmanager
def engine_of(model: nn.Module, codec: object, split: SplitConfig) -> Iterator[Engine]:
    """An engine without a session; DGC gets the momentum of ``sgd``."""
    config = Strategy.load({"gradients": {"codec": codec}}).gradients.codec
    trainables, world = parameters_of(model, trainable=True), dist.get_world_size()
    correction = MomentumCorrection(sgd(model), trainables, config, world)
    transports = [make_transport(FlatConfig(), dist.new_group()) for _ in range(2)]
    channel = Channel(transports[0], transports[1:], torch.device("cpu"))
    ranks = CodecRanks(dist.get_rank(), world)
    engine = Engine(
        model,
        trainables,
        split=split,
        overlap=True,
        compression_plan=CompressionPlan(partial(codec_of, config), ranks, correction.momenta),
        channel=channel,
        control=dist.new_group(),
    )
    yield engine
    engine.close()
    channel.close()
