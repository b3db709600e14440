"""Deep gradient compression: each rank sends only the largest thousandth of its accumulated values.

On each rank, with the momentum ``m`` taken over from the optimizer:

    u = m u + g,    v = v + u,    send v where |v| is largest,    u = v = 0 there

(Nesterov: ``u = m (u + g)``, ``v = v + u + g``.) ``v`` accumulates what was not sent. The momentum
is applied before that, as gradients that are sent late would miss theirs otherwise (momentum
correction), and set to 0 where values were sent, as it is stale there (momentum factor masking).
Lin et al., "Deep Gradient Compression" (2018), and the authors' code.

Biases and norms travel dense, with the same momentum. Messages have the same length on all ranks:
the number of values that the density asks for, padded with zeros.

Exactness: lossy; at density 1 nothing accumulates or is masked, and it is SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from math import sqrt

import torch
from torch import Tensor

from slipstream.codecs.compressor import (
    Compressor,
    SlotState,
    any_infinite,
    memory_order,
    mixed,
    parts,
    real_dtype,
    slot_slices,
)
from slipstream.codecs.residual import Residual
from slipstream.transport.requests import AllGather, AllReduce, ExchangeSteps

EXACT_BELOW = 4096
"""Fewer values than this are sorted; of more, a sampled threshold finds the largest."""

_FEW, _MANY = 0.8, 1.3  # how far the number found may be below the wanted one; what to aim at
_TRIES = 10
_ROW = 64


@dataclass(frozen=True, slots=True)
class DgcCodec:
    """The share of values that is sent, each with its index.

    Example:
        >>> codec = DgcCodec(density=0.25)
        >>> codec.count(1000), codec.wire_bytes(1000, torch.float32)
        (250, 2000)
    """

    density: float = 0.001
    sample: float = 0.01

    def count(self, numel: int) -> int:
        """Number of values sent of ``numel``; at least one, if there is any."""
        return min(max(round(self.density * numel), 1), numel)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the payload: 4 for an index, and a value, for each that is sent."""
        return self.count(numel) * (4 + real_dtype(dtype).itemsize)


def largest(
    values: Tensor, count: int, sample: float, seed: int, peaks: Tensor | None = None
) -> Tensor:
    """Indices of about the ``count`` values of the largest magnitude, never more than that.

    Among many values, a threshold is estimated from a sample and lowered until enough values pass
    it; of those, the largest are taken. At least 0.8 of ``count`` are found, unless magnitudes
    are so alike that ten estimates fail. ``peaks``: of rows of
    64 values each, if known.

    Example:
        >>> largest(torch.tensor([0.1, -3.0, 0.2, 1.0]), 1, sample=0.01, seed=0)
        tensor([1])
    """
    total = values.numel()
    if total < EXACT_BELOW or count * 4 > total:
        return torch.topk(values.abs(), count, sorted=False).indices
    stride = max(round(1 / sample), 1) | 1  # odd, so that it follows no pattern of the layout
    stride = min(stride, total // 2)
    sampled = values[seed % stride :: stride].abs()
    wanted = min(max(round(_MANY * count * sampled.numel() / total), 1), sampled.numel())
    if peaks is None:
        peaks = values[: total // _ROW * _ROW].view(-1, _ROW).abs().amax(1)
    tiny = torch.finfo(values.dtype).tiny
    threshold = torch.topk(sampled, wanted, sorted=True).values[-1].clamp(min=tiny)
    for _ in range(1 + _TRIES):
        indices = _at_least(threshold, values, peaks)
        if indices.numel() >= _FEW * count:
            break
        threshold = (threshold * _FEW).clamp(min=tiny)  # never all zeros
    if indices.numel() > count:
        indices = indices[torch.topk(values[indices].abs(), count, sorted=False).indices]
    return indices


def _at_least(threshold: Tensor, values: Tensor, peaks: Tensor) -> Tensor:
    """Indices of the values of that magnitude and above; searches rows with such a peak alone."""
    end = values.numel() // _ROW * _ROW
    rows, rest = values[:end].view(-1, _ROW), values[end:]
    passing = (peaks >= threshold).nonzero().view(-1)
    row, column = (rows[passing].abs() >= threshold).nonzero().unbind(1)
    last = (rest.abs() >= threshold).nonzero().view(-1)
    return torch.cat([passing[row] * _ROW + column, last + end])


@dataclass(frozen=True, slots=True)
class Momentum:
    """The momentum that DGC applies for the optimizer, and the weight decay of ``parameter``."""

    momentum: float
    nesterov: bool = False
    weight_decay: float = 0.0
    parameter: Tensor | None = None


@dataclass(eq=False, repr=False)
class DgcCompressor(Compressor):
    """The exchange of a bucket: slots that stay dense in one request, then the sparse ones.

    Args, besides those of `Compressor`:
        momenta: slot by slot; decay is added to gradients before the momentum, as SGD does.
        stages: pairs of a step, ascending, and the density from that step on.
        clip: clips each gradient of a rank to this norm over the root of the number of ranks;
            None: does not clip.
    """

    codec: DgcCodec
    _: KW_ONLY
    momenta: Sequence[Momentum]
    stages: Sequence[tuple[int, float]] = ()
    clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        matrices = [i for i, shape in enumerate(self.shapes) if len(shape) > 1]
        self._peaks = {i: self.zeros(_length(self.slots[i]) // _ROW) for i in matrices}
        self._momentum = Residual(self.zeros(self.num_values))
        self._velocity = Residual(self.zeros(self.num_values))
        self.residuals = [self._momentum, self._velocity]

    def density(self, step: int) -> float:
        """The share of values that is sent after ``step`` updates."""
        densities = [density for first, density in self.stages if step >= first]
        return densities[-1] if densities else self.codec.density

    def exchange(self, values: Tensor, flags: Tensor, step: int) -> ExchangeSteps:
        density = self.density(step)
        sparse = self._peaks if density < 1 else {}
        dense = [slot for i, slot in enumerate(self.slots) if i not in sparse]
        self._apply_momentum(values, sparse, flags[-1:])
        unsent = self._velocity.left()
        first = torch.cat([flags.to(self.works_in), *(unsent[slot] for slot in dense)])
        for slot in dense:
            unsent[slot] = 0
        yield AllReduce(first)
        flags.copy_(first[: flags.numel()] > 0)
        flags[-1:] |= any_infinite(first)
        if sparse:
            yield from self._exchange_sparse(values, sparse, density, step, flags[-1:])
        sums = first[flags.numel() :].split([_length(slot) for slot in dense])
        for slot, total in zip(dense, sums, strict=True):
            values[slot] = total

    def _apply_momentum(self, values: Tensor, sparse: Collection[int], nonfinite: Tensor) -> None:
        """Compute the next momentum and velocity, before anything of them is sent.

        Writes the row peaks of the sparse slots; raises the flag where a gradient is not finite.
        """
        last = [residual.error for residual in self.residuals]
        following = [residual.left() for residual in self.residuals]
        for number, (slot, config) in enumerate(zip(self.slots, self.momenta, strict=True)):
            if self.clip is not None:
                limit = self.clip / sqrt(self.ranks.count) / self.ranks.count
                values[slot].mul_((limit / values[slot].norm()).clamp(max=1.0))
            weights = None if config.parameter is None else memory_order(config.parameter)
            for part in parts(_length(slot), values.device, _ROW):
                gradient, *tensors = (x[slot][part] for x in (values, *last, *following))
                last_momentum, last_velocity, momentum, velocity = tensors
                if config.weight_decay and weights is not None:
                    gradient.add_(weights[part], alpha=config.weight_decay / self.ranks.count)
                if config.nesterov:
                    torch.add(last_momentum, gradient, out=momentum).mul_(config.momentum)
                    torch.add(momentum, gradient, out=velocity).add_(last_velocity)
                else:
                    torch.add(gradient, last_momentum, alpha=config.momentum, out=momentum)
                    torch.add(momentum, last_velocity, out=velocity)
                if number in sparse:  # an infinite gradient makes the velocity infinite
                    peaks = self._peaks[number][part.start // _ROW :][: len(velocity) // _ROW]
                    rows, rest = velocity.split([len(peaks) * _ROW, len(velocity) % _ROW])
                    torch.amax(rows.view(-1, _ROW).abs(), 1, out=peaks)
                    nonfinite |= any_infinite(torch.cat([peaks, rest]))
                    gradient.zero_()  # for the sparse sum, while it is in the cache
                else:
                    nonfinite |= any_infinite(velocity)

    def _exchange_sparse(
        self, values: Tensor, sparse: Collection[int], density: float, step: int, nonfinite: Tensor
    ) -> ExchangeSteps:
        codec = DgcCodec(density, self.codec.sample)
        momentum, unsent = (residual.left() for residual in self.residuals)
        counts = [codec.count(_length(self.slots[i])) for i in sparse]
        width = self.works_in.itemsize // 4
        # A message is values, then indices, then padding.
        border, total = sum(counts) * width, sum(counts) * (1 + width)
        length = -(-total // width) * width  # so that the values of every row are aligned
        send = values.new_zeros(length, dtype=torch.int32)
        sent, indices = send[:border].view(self.works_in), send[border:total]
        places = slot_slices(counts)
        for i, count, place in zip(sparse, counts, places, strict=True):
            slot, seed = self.slots[i], mixed(self.seed, step, self.ranks.rank, i)
            chosen = largest(unsent[slot], count, codec.sample, seed, self._peaks[i]) + slot.start
            indices[place][: len(chosen)] = chosen
            sent[place][: len(chosen)] = unsent[chosen]
            unsent[chosen] = 0
            momentum[chosen] = 0
        receive = send.new_empty(self.ranks.count, length)
        yield AllGather(send, receive)
        for message in receive:
            sent, indices = message[:border].view(self.works_in), message[border:total]
            values.index_add_(0, indices, sent)
        nonfinite |= any_infinite(values[receive[:, border:total].reshape(-1)])

    def forget(self, slots: Sequence[int]) -> None:
        for residual in self.residuals:
            for i in slots:
                residual.forget(self.slots[i])

    def state(self) -> list[dict[str, Tensor]]:
        """``momentum`` and, of sparse slots, ``velocity``: what was not sent yet."""
        states = [{"momentum": self._momentum.error[slot].clone()} for slot in self.slots]
        for i in self._peaks:
            states[i]["velocity"] = self._velocity.error[self.slots[i]].clone()
        return states

    def load(self, states: Sequence[SlotState]) -> None:
        for name, residual in zip(("momentum", "velocity"), self.residuals, strict=True):
            residual.error.zero_()
            for slot, state in zip(self.slots, states, strict=True):
                if name in state:
                    residual.error[slot] = state[name]


def _length(part: slice) -> int:
    return int(part.stop - part.start)
