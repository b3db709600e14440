"""Measure how much faster this host computes in 16 bits than in fp32, on two small blocks."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.calibration.codec_cost import synchronize
from slipstream.planner.network.costs import HalfSpeed
from slipstream.precision import half_weights
from slipstream.transport.consistency import maximum

ROUNDS, FEWEST = 5, 2


class _Residual(nn.Module):
    """A sum of its input and of layers of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return x + output


def _dense_block() -> tuple[nn.Module, Tensor]:
    """A layer of a transformer, and sequences of 128 tokens for it."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, activation="gelu", batch_first=True)
    return layer, torch.ones(4, 128, 256)


def _convolutional_block() -> tuple[nn.Module, Tensor]:
    """Two blocks of a residual network, and maps of 28 x 28 for them."""
    blocks = [_bottleneck() for _ in range(2)]
    return nn.Sequential(*blocks), torch.ones(4, 256, 28, 28)


def _bottleneck() -> nn.Module:
    return _Residual(
        *(nn.Conv2d(256, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256)),
    )


def half_speed(world: dist.ProcessGroup, device: torch.device, share: float = 1.0) -> HalfSpeed:
    """Measure what the slowest rank gains by ``half_weights`` in bf16, on all ranks at once.

    A block's forward and backward in fp32 and in bf16 take turns; its speed is the ratio of the
    medians. The user's random numbers stay as they are. ``share``: the part of the usual time to
    take.
    """
    rounds = max(round(share * ROUNDS), FEWEST)
    dist.barrier(group=world)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        speeds = [_speed(make, device, rounds) for make in (_dense_block, _convolutional_block)]
    slowest = maximum(-torch.tensor(speeds, dtype=torch.float64, device=device), world)
    dense, convolutional = (-slowest).tolist()
    return HalfSpeed(dense=dense, convolutional=convolutional)


def _speed(
    make: Callable[[], tuple[nn.Module, Tensor]], device: torch.device, rounds: int
) -> float:
    """Seconds of a block in fp32 over those in bf16."""
    block, inputs = make()
    wide, inputs = block.to(device), inputs.to(device)
    narrow = deepcopy(wide)
    half = half_weights(narrow, torch.optim.SGD(narrow.parameters(), lr=0.0))
    times = [(_seconds(wide, inputs), _seconds(narrow, inputs)) for _ in range(1 + rounds)]
    half.close()
    in_fp32, in_bf16 = (median(column) for column in zip(*times[1:], strict=True))
    return float(in_fp32 / in_bf16)


def _seconds(block: nn.Module, inputs: Tensor) -> float:
    start = perf_counter()
    block(inputs).square().mean().backward()
    synchronize(inputs.device)
    seconds = perf_counter() - start
    block.zero_grad()
    return seconds
