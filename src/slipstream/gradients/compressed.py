"""Buckets whose gradients a codec compresses, and the plan of which codec codes which gradient.

Never encodes (``codecs`` does), and never decides whether a step counts: only the engine knows all
buckets.

[Note: A step that does not count]
Where the gradients of one rank are not finite (a loss scale was too high, say), they would poison
what a codec keeps, on all ranks and for good. So a flag travels with the gradients; all ranks start
the same collectives whatever it says. When every exchange is done, all ranks know all flags: either
every codec commits what it has learned from this step, or every codec rolls back, and the gradients
are NaN on all ranks, as they would be without a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from slipstream.codecs import (
    Compressor,
    HalfCodec,
    HostsCompressor,
    Momentum,
    Ranks,
    make_compressor,
    wire_bytes,
)
from slipstream.codecs.compressor import any_infinite
from slipstream.gradients.buckets import Bucket, DenseBucket, gradient_dtype
from slipstream.gradients.shard_bucket import ShardBucket
from slipstream.gradients.shards import Shards
from slipstream.strategy import HalfConfig, PlainCodecConfig, phase_of
from slipstream.transport.hosts import Rails
from slipstream.transport.requests import ExchangeSteps, Request

NamedState = Mapping[str, Mapping[str, torch.Tensor]]
"""What codecs keep, by parameter and then by name."""

CodecSample = Mapping[str, Sequence[torch.Tensor]]
"""Some values of what codecs keep, by the first parameter of those that are coded together."""


@dataclass(frozen=True, slots=True)
class NamedCompressor:
    """A compressor and the names of the parameters in its slots."""

    names: tuple[str, ...]
    compressor: Compressor

    def exchange(
        self, values: torch.Tensor, flags: torch.Tensor, step: int
    ) -> Generator[Request, None, bool]:
        """``Compressor.exchange``; returns whether all is finite, else ``values`` become NaN."""
        yield from self.compressor.exchange(values, flags, step)
        finite = not flags[-1]
        if not finite:
            values.fill_(torch.nan)
        return finite

    def settle(self, counts: bool) -> None:
        """Commit what the last exchange taught the codec, or roll it back."""
        if counts:
            self.compressor.commit()
        else:
            self.compressor.rollback()

    def state(self) -> NamedState:
        """State of the codec, by parameter."""
        pairs = zip(self.names, self.compressor.state(), strict=True)
        return {name: state for name, state in pairs if state}

    def load(self, states: NamedState) -> None:
        """Go on from the states of these parameters, whichever buckets they come from."""
        self.compressor.load([states.get(name, {}) for name in self.names])


class CodecStates:
    """State of codecs between exchanges, by parameter, while compressors come and go."""

    def __init__(self, states: NamedState | None = None) -> None:
        self._attached: list[NamedCompressor] = []
        self._detached: NamedState = states or {}  # of parameters without a compressor

    def __bool__(self) -> bool:
        return bool(self._attached)

    def attach(self, compressors: Iterable[NamedCompressor]) -> None:
        """New compressors go on from what was kept of their parameters."""
        for named in compressors:
            named.load(self._detached)
            self._detached = _without(self._detached, named.names)
            self._attached.append(named)

    def detach(self, compressors: Iterable[NamedCompressor] | None = None) -> None:
        """Keep the states of compressors (None: of all), and drop these."""
        leaving = list(self._attached if compressors is None else compressors)
        self._detached = {**self._detached, **_states(leaving)}
        self._attached = [named for named in self._attached if named not in leaving]

    def state(self) -> NamedState:
        """State on this rank, gradients included that travel uncompressed by now."""
        return {**self._detached, **_states(self._attached)}

    def num_bytes(self) -> int:
        """Bytes of what is kept on this rank."""
        detached = sum(t.nbytes for state in self._detached.values() for t in state.values())
        return detached + sum(named.compressor.state_bytes for named in self._attached)

    def sample(self) -> CodecSample:
        """Take some values of what compressors keep now, by the first parameter of each."""
        return {named.names[0]: named.compressor.sample() for named in self._attached}

    def load(self, states: NamedState) -> None:
        """Go on from ``state()``, of another layout maybe."""
        self._detached = states
        for named in self._attached:
            named.load(states)
            self._detached = _without(self._detached, named.names)

    def settle(self, counts: bool) -> None:
        """All commit what the last exchange taught them, or all roll back."""
        for named in self._attached:
            named.settle(counts)


def _states(compressors: Iterable[NamedCompressor]) -> NamedState:
    return {name: state for named in compressors for name, state in named.state().items()}


def _without(states: NamedState, names: Sequence[str]) -> NamedState:
    return {name: state for name, state in states.items() if name not in names}


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """Which codec codes each gradient of a model, and what DGC does for the optimizer."""

    codec_of: Callable[[str], PlainCodecConfig | None]
    """Takes the name of the parameter."""
    ranks: Ranks
    momenta: Mapping[str, Momentum] = field(default_factory=dict)
    pays: Callable[[int], bool] = lambda num_bytes: True
    """Whether a segment of so many bytes is to be compressed."""
    shards: Shards | None = None
    """Where every rank updates a shard of the parameters, and gets that shard of the averages."""
    rails: Rails | None = None
    """Between hosts, where codecs compress only what travels there."""
    narrow: bool = True
    """Whether gradients without a codec travel in the dtype of their parameters, where that is
    narrower than their own."""
    step: int = 0
    """Updates so far: some codecs begin late, or send less and less."""

    def for_segment(self, num_bytes: int) -> CompressionPlan:
        """The plan for a segment of so many bytes: no codec where that does not pay."""
        return self if self.pays(num_bytes) else replace(self, codec_of=lambda name: None)

    def of(self, name: str, parameter: torch.Tensor) -> PlainCodecConfig | None:
        """The codec of one gradient; None where it would not make that smaller."""
        codec = phase_of(self.codec_of(name), self.step)
        plain = parameter.dtype if self.narrow else gradient_dtype(parameter)
        num_bytes = parameter.numel() * plain.itemsize
        if codec is not None and codec.summed and wire_bytes(codec, parameter) >= num_bytes:
            return None
        return codec

    def compresses(self, codec: PlainCodecConfig | None) -> bool:
        """Whether a compressor does what the codec asks for: 16 bits need one between hosts."""
        return codec is not None and not (codec.summed and self.rails is None)

    def ever_compresses(self, names: Iterable[str]) -> bool:
        """Whether a compressor exchanges one of these gradients, now or in a later phase."""
        return any(self.compresses(self.codec_of(name)) for name in names)

    def wire_bytes(self, name: str, parameter: torch.Tensor, widest: torch.Tensor) -> int:
        """Bytes of one gradient on the wire, as ``codecs.wire_bytes`` says, as wide as on any
        rank."""
        ranks = self.ranks.count if self.rails is None else self.rails.num_hosts
        return wire_bytes(self.of(name, parameter), widest, ranks)

    def first_steps(self, names: Iterable[str]) -> tuple[int, ...]:
        """The updates from which on the codec of one of these parameters works in another way."""
        codecs = {self.codec_of(name) for name in names} - {None}
        return tuple(sorted({first for codec in codecs if codec for first, _ in codec.phases}))

    def cuts(self, parameter: torch.Tensor) -> bool:
        """Whether every rank gets a shard of the average alone."""
        return self.shards is not None and parameter in self.shards.names

    def compressor(
        self,
        codec: PlainCodecConfig,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        *,
        num_flags: int,
        seed: int,
    ) -> NamedCompressor:
        """A compressor for gradients of one dtype."""
        momenta = [self.momenta.get(name, Momentum(0.0)) for name in names]
        common: dict[str, Any] = {"momenta": momenta, "num_flags": num_flags, "seed": seed}
        if self.rails is not None:
            between_hosts = HostsCompressor(codec, parameters, self.rails, **common)
            return NamedCompressor(tuple(names), between_hosts)
        compressor = make_compressor(codec, parameters, self.ranks, **common)
        return NamedCompressor(tuple(names), compressor)

    def bucket(self, names: Sequence[str], parameters: Sequence[nn.Parameter], seed: int) -> Bucket:
        """A bucket for gradients of one dtype and codec, all of them cut or none."""
        codec = self.of(names[0], parameters[0])
        if codec is None or not self.compresses(codec):
            dtype = None
            if isinstance(codec, HalfConfig):
                dtype = HalfCodec(codec.dtype).wire_dtype
            elif self.narrow and parameters[0].dtype != gradient_dtype(parameters[0]):
                dtype = parameters[0].dtype
            if self.shards is not None and self.cuts(parameters[0]):
                return ShardBucket(parameters, self.shards, dtype)
            return DenseBucket(parameters, dtype)
        num_flags = len(parameters) + 1
        named = self.compressor(codec, names, parameters, num_flags=num_flags, seed=seed)
        shards = self.shards if self.cuts(parameters[0]) else None
        may_overflow = isinstance(codec, HalfConfig) and codec.dtype == "fp16"
        return CompressedBucket(parameters, named, shards, may_overflow=may_overflow)


class CompressedBucket(DenseBucket):
    """One flat tensor of gradients that a codec exchanges; see the note at the top of the file.

    Args:
        parameters: of one dtype.
        codec: compresses their gradients.
        shards: get this rank's part of the averages, which are whole on every rank.
        may_overflow: whether the codec sends fp16.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        codec: NamedCompressor,
        shards: Shards | None = None,
        *,
        may_overflow: bool = False,
    ) -> None:
        compressor = codec.compressor
        super().__init__(parameters, compressor.works_in, compressor.num_values)
        self._shards, self.may_overflow = shards, may_overflow
        self.codec = codec
        self._is_finite = True
        self._values = self.flat[: compressor.num_values]
        self._num_real = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
        self._wire_flags = torch.zeros(
            len(parameters) + 1, dtype=torch.uint8, device=self.flat.device
        )

    def look(self) -> None:
        """The codec tells the others by itself."""
        self.nonfinite_here = any_infinite(self._values)

    @property
    def nonfinite(self) -> torch.Tensor:
        return torch.tensor(not self._is_finite, device=self.flat.device)

    def exchange(self, step: int) -> ExchangeSteps:
        """Several requests."""
        self._values[self._num_real :] = 0
        self._wire_flags[:-1] = self._flags > 0
        self._wire_flags[-1] = 0
        self._is_finite = yield from self.codec.exchange(self._values, self._wire_flags, step)
        used = self._wire_flags.tolist()
        self.codec.compressor.forget([slot for slot in self._unused if not used[slot]])
        self._flags.copy_(self._wire_flags[:-1])

    @property
    def is_finite(self) -> bool:
        return self._is_finite

    def finish(self, loss_scale: float) -> None:
        super().finish(loss_scale)
        if self._shards is None:
            return
        for parameter in self.parameters:
            average = parameter.grad
            own = None if average is None else self._shards.own(average)
            self._shards.deliver(parameter, own)
