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

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch

from slipstream.codecs.compressor import (
    Compressor,
    Ranks,
    SlotState,
    any_infinite,
    memory_order,
    mixed,
    parts,
    real_dtype,
    slot_slices,
)
from slipstream.transport.requests import AllGather, AllReduce, Exchange

EXACT_BELOW = 4096
"""Fewer values than this are sorted; of more, a sampled threshold finds the largest."""

_FEW, _MANY = 0.8, 1.3  # how far the number found may be below the wanted one; what to aim at
_TRIES = 10
_ROW = 64


@dataclass(frozen=True, slots=True)
class DgcCodec:
    """The largest values and their indices.

    Example:
        >>> codec = DgcCodec(density=0.25)
        >>> indices, kept = codec.encode(torch.tensor([0.1, -3.0, 0.2, 1.0]))
        >>> indices.tolist(), kept.tolist()
        ([1], [-3.0])
        >>> codec.decode(indices, kept, 4)
        tensor([ 0., -3.,  0.,  0.])
    """

    density: float = 0.001
    sample: float = 0.01

    def count(self, numel: int) -> int:
        """How many of ``numel`` values are sent; at least one, if there is any."""
        return min(max(round(self.density * numel), 1), numel)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the payload: 4 for an index, and a value, for each that is sent."""
        return self.count(numel) * (4 + real_dtype(dtype).itemsize)

    def encode(self, values: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices (int32) and values of the at most ``count`` largest; ``values`` are 1-D."""
        values = values.detach()
        indices = largest(values, self.count(values.numel()), self.sample, seed)
        return indices.to(torch.int32), values[indices]

    def decode(self, indices: torch.Tensor, values: torch.Tensor, numel: int) -> torch.Tensor:
        """The values at their indices, zeros elsewhere."""
        return values.new_zeros(numel).index_add_(0, indices, values)


def largest(
    values: torch.Tensor, count: int, sample: float, seed: int, peaks: torch.Tensor | None = None
) -> torch.Tensor:
    """Indices of about the ``count`` values of the largest magnitude, never more than that.

    Among many values, a threshold is estimated from a sample and lowered until enough values pass
    it; of those, the largest are taken. At least 0.8 of ``count`` are found, unless magnitudes
    are so alike that ten estimates fail. ``peaks``: as ``_row_peaks`` writes them, if known.
    """
    total = values.numel()
    if total < EXACT_BELOW or count * 4 > total:
        return torch.topk(values.abs(), count, sorted=False).indices
    stride = max(round(1 / sample), 1) | 1  # odd, so that it follows no pattern of the layout
    stride = min(stride, total // 2)
    sampled = values[seed % stride :: stride].abs()
    wanted = min(max(round(_MANY * count * sampled.numel() / total), 1), sampled.numel())
    threshold = torch.topk(sampled, wanted, sorted=True).values[-1]
    threshold = threshold.clamp(min=torch.finfo(values.dtype).tiny)
    if peaks is None:
        peaks = values.new_empty(total // _ROW)
        for part in parts(total, values.device, _ROW):
            _row_peaks(values[part], peaks[part.start // _ROW :])
    indices = _at_least(threshold, values, peaks)
    for _ in range(_TRIES):
        if indices.numel() >= _FEW * count:
            break
        threshold = (threshold * _FEW).clamp(min=torch.finfo(values.dtype).tiny)  # never all zeros
        indices = _at_least(threshold, values, peaks)
    if indices.numel() > count:
        indices = indices[torch.topk(values[indices].abs(), count, sorted=False).indices]
    return indices


def _row_peaks(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write the largest magnitude of every full row of a part to the front of ``out``."""
    rows = values.numel() // _ROW
    torch.amax(values[: rows * _ROW].view(-1, _ROW).abs(), 1, out=out[:rows])


def _at_least(threshold: torch.Tensor, values: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Indices of the values of that magnitude and above; searches rows with such a peak alone."""
    end = values.numel() // _ROW * _ROW
    rows, rest = values[:end].view(-1, _ROW), values[end:]
    passing = (peaks >= threshold).nonzero().view(-1)
    row, column = (rows[passing].abs() >= threshold).nonzero().unbind(1)
    last = (rest.abs() >= threshold).nonzero().view(-1)
    return torch.cat([passing[row] * _ROW + column, last + end])


@dataclass(frozen=True, slots=True)
class Momentum:
    """What DGC applies for the optimizer: its momentum, and the weight decay of ``parameter``."""

    momentum: float
    nesterov: bool = False
    weight_decay: float = 0.0
    parameter: torch.Tensor | None = None


class DgcCompressor(Compressor):
    """The exchange of a bucket: slots that stay dense in one request, then the sparse ones.

    Args:
        codec: how many values are sent, and how they are found.
        shapes: of the gradients, slot by slot.
        dtype: of the gradients.
        ranks: that take part.
        device: of the gradients.
        momenta: slot by slot; decay is added to gradients before the momentum, as SGD does.
        stages: pairs of a step, ascending, and the density from that step on.
        clip: clips each gradient of a rank to this norm over the root of the number of ranks;
            None: does not clip.
        seed: of the samples.
    """

    def __init__(
        self,
        codec: DgcCodec,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        ranks: Ranks,
        device: torch.device,
        *,
        momenta: Sequence[Momentum],
        stages: Sequence[tuple[int, float]] = (),
        clip: float | None = None,
        seed: int = 0,
    ) -> None:
        self.works_in = real_dtype(dtype)
        self._codec, self._stages, self._clip = codec, list(stages), clip
        self._ranks, self._momenta, self._seed = ranks, list(momenta), seed
        self._slots = slot_slices(map(prod, shapes))
        self._matrices = [len(shape) > 1 for shape in shapes]
        self.num_values = self._slots[-1].stop if self._slots else 0
        state = torch.zeros(2, 2, self.num_values, dtype=self.works_in, device=device)
        self._momentum, self._velocity = state[0]
        self._next_momentum, self._next_velocity = state[1]
        pairs = zip(self._slots, self._matrices, strict=True)
        rows = [_length(slot) // _ROW if matrix else 0 for slot, matrix in pairs]
        self._peaks = [torch.empty(n, dtype=self.works_in, device=device) for n in rows]

    def density(self, step: int) -> float:
        """The share of values that is sent after ``step`` updates."""
        densities = [density for first, density in self._stages if step >= first]
        return densities[-1] if densities else self._codec.density

    def exchange(self, values: torch.Tensor, flags: torch.Tensor, step: int) -> Exchange:
        density = self.density(step)
        sparse = [i for i, matrix in enumerate(self._matrices) if matrix and density < 1]
        dense = [i for i in range(len(self._slots)) if i not in set(sparse)]
        self._apply_momentum(values, set(sparse), flags[-1:])
        unsent = self._next_velocity
        first = torch.cat([flags.to(self.works_in), *(unsent[self._slots[i]] for i in dense)])
        for i in dense:
            unsent[self._slots[i]] = 0
        yield AllReduce(first)
        flags.copy_(first[: flags.numel()] > 0)
        flags[-1:] |= any_infinite(first)
        sums = first[flags.numel() :].split([_length(self._slots[i]) for i in dense])
        if sparse:
            yield from self._exchange_sparse(values, sparse, density, step, flags[-1:])
        for i, total in zip(dense, sums, strict=True):
            values[self._slots[i]] = total

    def _apply_momentum(
        self, values: torch.Tensor, sparse: Container[int], nonfinite: torch.Tensor
    ) -> None:
        """Compute the next momentum and velocity, before anything of them is sent.

        Writes the row peaks of the sparse slots; raises the flag where a gradient is not finite.
        """
        for number, (slot, config) in enumerate(zip(self._slots, self._momenta, strict=True)):
            if self._clip is not None:
                limit = self._clip / sqrt(self._ranks.count) / self._ranks.count
                values[slot].mul_((limit / values[slot].norm()).clamp(max=1.0))
            weights = None if config.parameter is None else memory_order(config.parameter)
            for part in parts(_length(slot), values.device, _ROW):
                gradient, momentum = values[slot][part], self._momentum[slot][part]
                following = self._next_momentum[slot][part]
                velocity = self._next_velocity[slot][part]
                if config.weight_decay and weights is not None:
                    gradient.add_(weights[part], alpha=config.weight_decay / self._ranks.count)
                if config.nesterov:
                    torch.add(momentum, gradient, out=following).mul_(config.momentum)
                    torch.add(following, gradient, out=velocity)
                    velocity.add_(self._velocity[slot][part])
                else:
                    torch.add(gradient, momentum, alpha=config.momentum, out=following)
                    torch.add(following, self._velocity[slot][part], out=velocity)
                if number in sparse:  # an infinite gradient makes the velocity infinite
                    peaks = self._peaks[number][part.start // _ROW :][: len(velocity) // _ROW]
                    _row_peaks(velocity, peaks)
                    rest = velocity[len(peaks) * _ROW :]
                    nonfinite |= any_infinite(torch.cat([peaks, rest]))
                    gradient.zero_()  # for the sparse sum, while it is in the cache
                else:
                    nonfinite |= any_infinite(velocity)

    def _exchange_sparse(
        self,
        values: torch.Tensor,
        sparse: Sequence[int],
        density: float,
        step: int,
        nonfinite: torch.Tensor,
    ) -> Exchange:
        codec = DgcCodec(density, self._codec.sample)
        counts = [codec.count(_length(self._slots[i])) for i in sparse]
        width = self.works_in.itemsize // 4
        # A message is values, then indices, then padding.
        border, total = sum(counts) * width, sum(counts) * (1 + width)
        length = -(-total // width) * width  # so that the values of every row are aligned
        send = values.new_zeros(length, dtype=torch.int32)
        sent, indices = send[:border].view(self.works_in), send[border:total]
        start = 0
        for i, count in zip(sparse, counts, strict=True):
            slot = self._slots[i]
            seed = mixed(self._seed, step, self._ranks.rank, i)
            unsent = self._next_velocity[slot]
            chosen = largest(unsent, count, codec.sample, seed, self._peaks[i]) + slot.start
            indices[start : start + chosen.numel()] = chosen
            sent[start : start + chosen.numel()] = self._next_velocity[chosen]
            start += count
            self._next_velocity[chosen] = 0
            self._next_momentum[chosen] = 0
        receive = send.new_empty(self._ranks.count, send.numel())
        yield AllGather(send, receive)
        for message in receive:
            sent, indices = message[:border].view(self.works_in), message[border:total]
            values.index_add_(0, indices, sent)
        nonfinite |= any_infinite(values[receive[:, border:total].reshape(-1)])

    def commit(self) -> None:
        self._momentum, self._next_momentum = self._next_momentum, self._momentum
        self._velocity, self._next_velocity = self._next_velocity, self._velocity

    def rollback(self) -> None:
        """Nothing to do: the next exchange starts from the state committed last."""

    def forget(self, slots: Sequence[int]) -> None:
        for slot in (self._slots[i] for i in slots):
            self._next_momentum[slot] = self._momentum[slot]
            self._next_velocity[slot] = self._velocity[slot]

    def state(self) -> list[dict[str, torch.Tensor]]:
        """``momentum`` and, of sparse slots, ``velocity``: what was not sent yet."""
        states = []
        for slot, matrix in zip(self._slots, self._matrices, strict=True):
            state = {"momentum": self._momentum[slot].clone()}
            if matrix:
                state["velocity"] = self._velocity[slot].clone()
            states.append(state)
        return states

    def load(self, states: Sequence[SlotState]) -> None:
        self._momentum.zero_()
        self._velocity.zero_()
        for slot, state in zip(self._slots, states, strict=True):
            if "momentum" in state:
                self._momentum[slot] = state["momentum"]
            if "velocity" in state:
                self._velocity[slot] = state["velocity"]


def _length(part: slice) -> int:
    return int(part.stop - part.start)
