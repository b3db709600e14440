"""Every codec by name, and what a bucket of theirs does on a number of ranks in one process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.codecs import Compressor, HostsCompressor, Ranks, make_compressor
from slipstream.strategy import (
    DgcConfig,
    Int4Config,
    Int8Config,
    OneBitConfig,
    PlainCodecConfig,
    PowerSgdConfig,
    TopKConfig,
)
from slipstream.transport.requests import AllGather, AllReduce, AllToAll, ExchangeSteps, sent_bytes

CONFIGS = {
    "int8": Int8Config(),
    "int8, small blocks": Int8Config(block=8),
    "int8, stochastic": Int8Config(rounding="stochastic"),
    "int8, feedback": Int8Config(error_feedback=True),
    "int8, stochastic, feedback": Int8Config(rounding="stochastic", error_feedback=True, block=64),
    "int4": Int4Config(),
    "int4, small blocks": Int4Config(block=8),
    "onebit": OneBitConfig(start_step=0),
    "onebit, small blocks": OneBitConfig(block=64, start_step=0),
    "topk": TopKConfig(chunk=64, keep=8),
    "topk, later": TopKConfig(chunk=64, keep=8, start_step=2),
    "dgc": DgcConfig(density=0.05, warmup_steps=0),
    "dgc, warm-up": DgcConfig(density=0.05, start_step=1, warmup_steps=2, warmup=(0.5, 0.1)),
    "powersgd": PowerSgdConfig(rank=2, start_step=0),
    "powersgd, rank 1": PowerSgdConfig(rank=1, start_step=0),
    "powersgd, later": PowerSgdConfig(rank=2, start_step=2),
    "powersgd, no feedback": PowerSgdConfig(rank=2, start_step=0, error_feedback=False),
}

FED_BACK = [
    name
    for name, config in CONFIGS.items()
    if isinstance(config, OneBitConfig | DgcConfig | Int4Config | TopKConfig)
    or getattr(config, "error_feedback", False)
]

SHAPES = [(17, 23), (5,), (3, 4, 3, 3), (1,), (0,), (40, 40)]


@dataclass
class Team:
    """The compressors of all ranks for one bucket."""

    config: PlainCodecConfig
    ranks: int
    shapes: Sequence[Sequence[int]] = field(default_factory=lambda: SHAPES)
    dtype: torch.dtype = torch.float32
    num_flags: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        parameters = [torch.zeros(tuple(shape), dtype=self.dtype) for shape in self.shapes]
        self.compressors: list[Compressor] = [
            make_compressor(
                *(self.config, parameters, Ranks(r, self.ranks)),
                num_flags=self.num_flags,
                seed=self.seed,
            )
            for r in range(self.ranks)
        ]
        self.sent = 0.0

    @property
    def size(self) -> int:
        pairs = 2 if self.dtype.is_complex else 1
        return pairs * sum(torch.Size(shape).numel() for shape in self.shapes)

    def gradients(self, seed: int) -> list[torch.Tensor]:
        return shares(self.size, self.ranks, seed, self.compressors[0].works_in)

    def exchange(
        self, gradients: Sequence[torch.Tensor], step: int = 0, counts: bool = True
    ) -> list[torch.Tensor]:
        """What each rank gets; ``flags`` holds what became of the flags (rank r raised flag r)."""
        values = []
        for compressor, gradient in zip(self.compressors, gradients, strict=True):
            padded = torch.zeros(compressor.num_values, dtype=compressor.works_in)
            padded[: self.size] = gradient
            values.append(padded)
        self.flags = [torch.zeros(self.num_flags, dtype=torch.uint8) for _ in self.compressors]
        for rank, flags in enumerate(self.flags[: self.num_flags]):
            flags[rank] = 1
        triples = zip(self.compressors, values, self.flags, strict=True)
        self.sent = run_together([compressor.exchange(v, f, step) for compressor, v, f in triples])
        for compressor in self.compressors:
            if counts:
                compressor.commit()
            else:
                compressor.rollback()
        return [one[: self.size] for one in values]

    def kept(self) -> torch.Tensor:
        """What all ranks together have not sent yet."""
        return sum_kept(self.compressors, self.shapes)


def shares(
    size: int, ranks: int, seed: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """The share of a mean of each rank: the same on all, plus noise."""
    random = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=random, dtype=dtype)
    noise = [torch.randn(size, generator=random) for _ in range(ranks)]
    return [(common + 0.5 * one) / ranks for one in noise]


def sum_kept(
    compressors: Sequence[Compressor] | Sequence[HostsCompressor],
    shapes: Sequence[Sequence[int]],
    keys: Collection[str] = ("error", "velocity"),
) -> torch.Tensor:
    """What ranks together keep under some keys; by default of values that they have not sent."""
    total = torch.zeros(sum(torch.Size(shape).numel() for shape in shapes), dtype=torch.float64)
    for compressor in compressors:
        start = 0
        for shape, state in zip(shapes, compressor.state(), strict=True):
            stop = start + torch.Size(shape).numel()
            for key in state.keys() & keys:
                total[start:stop] += state[key]
            if "error" in keys and "served" in state:
                first = start + int(state["served_from"])
                total[first : first + len(state["served"])] += state["served"]
            start = stop
    return total


def run_together(exchanges: Sequence[ExchangeSteps]) -> float:
    """Run the exchanges of all ranks in one process; returns the bytes that each rank would send.

    The plain reference of a transport: sums in rank order.
    """
    sent = 0.0
    while True:
        requests = [next(exchange, None) for exchange in exchanges]
        assert len({type(request) for request in requests}) == 1, f"ranks differ: {requests}"
        if requests[0] is None:
            return sent
        sent += sent_bytes(requests[0], len(exchanges))
        carry_out(requests)


def carry_out(requests: Sequence[Any]) -> None:
    """Requests of one type, by rank."""
    match requests[0]:
        case AllReduce():
            dtype = requests[0].tensor.dtype  # 16-bit floats are summed in 32
            total = requests[0].tensor.to(torch.promote_types(dtype, torch.float32), copy=True)
            for request in requests[1:]:
                total += request.tensor
            for request in requests:
                request.tensor.copy_(total)
        case AllToAll():
            for rank, request in enumerate(requests):
                for peer, other in enumerate(requests):
                    request.receive[peer].copy_(other.send[rank])
        case AllGather():
            for request in requests:
                for peer, other in enumerate(requests):
                    request.receive[peer].copy_(other.send)
