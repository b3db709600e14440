"""Buckets whose gradients are made smaller for the wire, and which gradients are in which.

Never encodes (``codecs`` does), and never decides whether a step counts: the engine knows all
buckets.

[Note: A step that does not count]
Where the gradients of one rank are not finite (a loss scale was too high, say), they would poison
what a codec keeps, on all ranks and for good. So a flag travels along that says so; all ranks issue
the same collectives as ever. When everything has landed, all know of all flags: either every codec
keeps what it has learned from this step, or none does, and the gradients are NaN on all ranks, as
they would be without a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from slipstream.codecs import (
    AllGather,
    AllReduce,
    AllToAll,
    Compressor,
    Exchange,
    HalfCodec,
    Momentum,
    Ranks,
    make_compressor,
    wire_bytes,
)
from slipstream.gradients.buckets import DenseBucket, gradient_dtype
from slipstream.strategy import Half, PlainCodec
from slipstream.transport.p2p import all_to_all, gather_all

NamedState = Mapping[str, Mapping[str, torch.Tensor]]
"""What codecs keep, by parameter and then by name."""


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """How the gradients of a model are coded: by path, and what DGC does for the optimizer."""

    codec_of: Callable[[str], PlainCodec | None]
    ranks: Ranks
    momenta: Mapping[str, Momentum] = field(default_factory=dict)
    pays: Callable[[int], bool] = lambda num_bytes: True
    """Whether a segment of so many bytes is to be coded."""
    narrow: bool = True
    """Whether gradients without a codec travel in the type of their parameters, where that is
    narrower than their own."""

    def for_segment(self, num_bytes: int) -> CompressionPlan:
        """How the gradients of one segment are coded, if they are."""
        return self if self.pays(num_bytes) else replace(self, codec_of=lambda name: None)

    def of(self, name: str, parameter: torch.Tensor) -> PlainCodec | None:
        """The codec of one gradient, or None where it makes nothing smaller."""
        codec = self.codec_of(name)
        plain = parameter.dtype if self.narrow else gradient_dtype(parameter)
        num_bytes = parameter.numel() * plain.itemsize
        if isinstance(codec, Half) and wire_bytes(codec, parameter) >= num_bytes:
            return None
        return codec

    def bucket(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], seed: int
    ) -> DenseBucket:
        """A bucket for gradients of one dtype and codec."""
        codec = self.of(names[0], parameters[0])
        match codec:
            case None:
                wire, own = parameters[0].dtype, gradient_dtype(parameters[0])
                return DenseBucket(parameters, wire if self.narrow and wire != own else None)
            case Half():
                return DenseBucket(parameters, HalfCodec(codec.dtype).wire_dtype)
        momenta = [self.momenta.get(name, Momentum(0.0)) for name in names]
        compressor = make_compressor(
            codec,
            parameters,
            self.ranks,
            momenta=momenta,
            num_flags=len(parameters) + 1,
            seed=seed,
        )
        return CodedBucket(names, parameters, compressor)


class CodedBucket(DenseBucket):
    """One flat tensor of gradients, exchanged by a coder; see the note at the top of the file.

    Args:
        names: of the parameters.
        parameters: of one dtype.
        coder: codes their gradients, and keeps what there is to keep.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], compressor: Compressor
    ) -> None:
        super().__init__(parameters, compressor.works_in, compressor.num_values)
        self.compressor, self.names = compressor, list(names)
        self._is_finite = True
        self._values = self.flat[: compressor.num_values]
        self._num_real = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
        self._wire_flags = torch.zeros(
            len(parameters) + 1, dtype=torch.uint8, device=self.flat.device
        )

    def exchange(self, step: int, group: dist.ProcessGroup) -> None:
        """Leave the sum over ranks in the flat tensor: several collectives."""
        self._values[self._num_real :] = 0
        self._wire_flags[:-1] = self._flags > 0
        self._wire_flags[-1] = 0
        carry(self.compressor.exchange(self._values, self._wire_flags, step), group)
        used = self._wire_flags.tolist()
        self.compressor.forget([slot for slot in self._unused if not used[slot]])
        self._flags.copy_(self._wire_flags[:-1])
        self._is_finite = not self._wire_flags[-1]
        if not self._is_finite:
            self._values.fill_(torch.nan)

    @property
    def is_finite(self) -> bool:
        return self._is_finite

    def settle(self, counts: bool) -> None:
        """Keep what the coder has learned from the last exchange, or forget it."""
        if counts:
            self.compressor.commit()
        else:
            self.compressor.rollback()

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What the coder keeps, by parameter."""
        pairs = zip(self.names, self.compressor.state(), strict=True)
        return {name: state for name, state in pairs if state}

    def load(self, kept: NamedState) -> None:
        """Go on from the states of these parameters, wherever they come from."""
        self.compressor.load([kept.get(name, {}) for name in self.names])


def carry(exchange: Exchange, group: dist.ProcessGroup) -> None:
    """Do what a codec asks for, over a process group."""
    for request in exchange:
        match request:
            case AllReduce(tensor):
                dist.all_reduce(tensor, group=group)
            case AllToAll(send, receive):
                all_to_all(receive.unbind(), send.unbind(), group)
            case AllGather(send, receive):
                gather_all(receive.view(-1), send.view(-1), group)
