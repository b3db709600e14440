"""Deep gradient compression: only the largest thousandth of what has gathered is sent.

On each rank, with the momentum ``m`` of the optimizer, which then has none of its own:

    u = m u + g,    v = v + u,    send v where |v| is largest,    u = v = 0 there

(Nesterov: ``u = m (u + g)``, ``v = v + u + g``.) ``v`` gathers what was not sent; the momentum is
taken before it gathers, as otherwise late gradients would miss theirs (momentum correction), and
forgotten where it was sent, as it is stale there (momentum factor masking). Lin et al., "Deep
Gradient Compression" (2018), and the authors' code.

Biases and norms travel dense, with the same momentum. Messages have one length on all ranks: the
wanted number of values, filled up with zeros.

Exactness: lossy; at density 1 nothing gathers or is masked, and it is SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
)
from slipstream.transport.requests import AllGather, AllReduce, Exchange

EXACT_BELOW = 4096
"""Values among which the largest are found by sorting rather than by a sampled threshold."""

_FEW, _MANY = 0.8, 1.3
_TRIES = 10
_ROW = 64


@dataclass(frozen=True, slots=True)
class DgcCodec:
    """The largest values and where they stood.

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
        """Values that are sent of a number; at least one, if there is any."""
        return min(max(round(self.density * numel), 1), numel)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the payload: an index of 4 bytes and a value each."""
        return self.count(numel) * (4 + real_dtype(dtype).itemsize)

    def encode(self, values: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices (int32) and values of at most ``count`` of the largest; ``values`` are 1-D."""
        values = values.detach()
        indices = largest(values, self.count(values.numel()), self.sample, seed)
        return indices.to(torch.int32), values[indices]

    def decode(self, indices: torch.Tensor, values: torch.Tensor, numel: int) -> torch.Tensor:
        """What they stand for: zeros elsewhere."""
        return values.new_zeros(numel).index_add_(0, indices, values)


def largest(
    values: torch.Tensor,
    count: int,
    sample: float,
    seed: int,
    peaks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Indices of about the ``count`` values of the largest magnitude, never more than that.

    Where there are many, a threshold is guessed from a sample, and lowered until enough pass it;
    of those that do, the largest are taken. At least 0.8 of ``count`` are found, unless magnitudes
    are so alike that ten guesses fail. ``peaks`` are those of the rows, where they are known.
    """
    total = values.numel()
    if total < EXACT_BELOW or count * 4 > total:
        return torch.topk(values.abs(), count, sorted=False).indices
    stride = max(round(1 / sample), 1) | 1  # odd, so that it meets no pattern of the layout
    few = values[seed % min(stride, total // 2) :: min(stride, total // 2)].abs()
    wanted = min(max(round(_MANY * count * few.numel() / total), 1), few.numel())
    threshold = torch.topk(few, wanted, sorted=True).values[-1]
    threshold = threshold.clamp(min=torch.finfo(values.dtype).tiny)
    if peaks is None:
        peaks = values.new_empty(total // _ROW)
        for part in parts(total, values.device, _ROW):
            _row_peaks(values[part], peaks[part.start // _ROW :])
    found = _at_least(threshold, values, peaks)
    for _ in range(_TRIES):
        if found.numel() >= _FEW * count:
            break
        threshold = (threshold * _FEW).clamp(min=torch.finfo(values.dtype).tiny)  # never all zeros
        found = _at_least(threshold, values, peaks)
    if found.numel() > count:
        found = found[torch.topk(values[found].abs(), count, sorted=False).indices]
    return found


def _row_peaks(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write the largest magnitude of every full row of a part to the front of ``out``."""
    rows = values.numel() // _ROW
    torch.amax(values[: rows * _ROW].view(-1, _ROW).abs(), 1, out=out[:rows])


def _at_least(threshold: torch.Tensor, values: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Indices of the values of that magnitude and above.

    They are few: only rows whose largest value passes are searched.
    """
    whole = values.numel() // _ROW * _ROW
    rows, rest = values[:whole].view(-1, _ROW), values[whole:]
    hot = (peaks >= threshold).nonzero().view(-1)
    row, column = (rows[hot].abs() >= threshold).nonzero().unbind(1)
    last = (rest.abs() >= threshold).nonzero().view(-1)
    return torch.cat([hot[row] * _ROW + column, last + whole])


@dataclass(frozen=True, slots=True)
class Momentum:
    """What an optimizer would do with a gradient: its momentum, and the decay of its parameter."""

    momentum: float
    nesterov: bool = False
    weight_decay: float = 0.0
    parameter: torch.Tensor | None = None


class DgcCompressor(Compressor):
    """The exchange of a bucket: what stays dense, then what is sparse.

    Args:
        codec: how many values, and how they are found.
        shapes: of the gradients, slot by slot.
        dtype: of the gradients.
        ranks: who takes part.
        device: where the gradients are.
        momenta: slot by slot; decay is added to gradients before the momentum, as SGD does.
        stages: updates from which on another density holds, ascending, and that density.
        clip: the norm that no gradient of a rank may exceed, times the root of the number of
            ranks; None: any.
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
        stops = accumulate(map(prod, shapes), initial=0)
        self._slots = [slice(*pair) for pair in pairwise(stops)]
        self._matrices = [len(shape) > 1 for shape in shapes]
        self.num_values = self._slots[-1].stop if self._slots else 0
        state = torch.zeros(2, 2, self.num_values, dtype=self.works_in, device=device)
        self._momentum, self._velocity = state[0]
        self._next_momentum, self._next_velocity = state[1]
        pairs = zip(self._slots, self._matrices, strict=True)
        rows = [_length(slot) // _ROW if matrix else 0 for slot, matrix in pairs]
        self._peaks = [torch.empty(n, dtype=self.works_in, device=device) for n in rows]

    def density(self, step: int) -> float:
        """The share of values that is sent after so many updates."""
        reached = [density for first, density in self._stages if step >= first]
        return reached[-1] if reached else self._codec.density

    def exchange(self, values: torch.Tensor, flags: torch.Tensor, step: int) -> Exchange:
        density = self.density(step)
        sparse = [i for i, matrix in enumerate(self._matrices) if matrix and density < 1]
        dense = [i for i in range(len(self._slots)) if i not in set(sparse)]
        self._gather_momentum(values, set(sparse), flags[-1:])
        waiting = self._next_velocity
        first = torch.cat([flags.to(self.works_in), *(waiting[self._slots[i]] for i in dense)])
        for i in dense:
            waiting[self._slots[i]] = 0
        yield AllReduce(first)
        flags.copy_(first[: flags.numel()] > 0)
        flags[-1:] |= any_infinite(first)
        sums = first[flags.numel() :].split([_length(self._slots[i]) for i in dense])
        if sparse:
            yield from self._exchange_sparse(values, sparse, density, step, flags[-1:])
        for i, total in zip(dense, sums, strict=True):
            values[self._slots[i]] = total

    def _gather_momentum(
        self, values: torch.Tensor, sparse: Container[int], unsound: torch.Tensor
    ) -> None:
        """The momentum and the velocity that are next, before anything of them is sent.

        Notes the row peaks of the sparse slots; raises the flag where a gradient is not finite.
        """
        for number, (slot, own) in enumerate(zip(self._slots, self._momenta, strict=True)):
            if self._clip is not None:
                limit = self._clip / sqrt(self._ranks.count) / self._ranks.count
                values[slot].mul_((limit / values[slot].norm()).clamp(max=1.0))
            weights = None if own.parameter is None else memory_order(own.parameter)
            for part in parts(_length(slot), values.device, _ROW):
                gradient, momentum = values[slot][part], self._momentum[slot][part]
                following = self._next_momentum[slot][part]
                velocity = self._next_velocity[slot][part]
                if own.weight_decay and weights is not None:
                    gradient.add_(weights[part], alpha=own.weight_decay / self._ranks.count)
                if own.nesterov:
                    torch.add(momentum, gradient, out=following).mul_(own.momentum)
                    torch.add(following, gradient, out=velocity)
                    velocity.add_(self._velocity[slot][part])
                else:
                    torch.add(gradient, momentum, alpha=own.momentum, out=following)
                    torch.add(following, self._velocity[slot][part], out=velocity)
                if number in sparse:  # what is infinite in the gradient is so in the velocity
                    peaks = self._peaks[number][part.start // _ROW :][: len(velocity) // _ROW]
                    _row_peaks(velocity, peaks)
                    rest = velocity[len(peaks) * _ROW :]
                    unsound |= any_infinite(torch.cat([peaks, rest]))
                    gradient.zero_()  # while it is in the cache: the result is sparse
                else:
                    unsound |= any_infinite(velocity)

    def _exchange_sparse(
        self,
        values: torch.Tensor,
        sparse: Sequence[int],
        density: float,
        step: int,
        unsound: torch.Tensor,
    ) -> Exchange:
        codec = DgcCodec(density, self._codec.sample)
        counts = [codec.count(_length(self._slots[i])) for i in sparse]
        width = self.works_in.itemsize // 4
        border, total = sum(counts) * width, sum(counts) * (1 + width)
        length = -(-total // width) * width  # so that the values of every row are aligned
        send = values.new_zeros(length, dtype=torch.int32)
        kept, indices = send[:border].view(self.works_in), send[border:total]
        at = 0
        for i, count in zip(sparse, counts, strict=True):
            slot = self._slots[i]
            seed = mixed(self._seed, step, self._ranks.rank, i)
            waiting = self._next_velocity[slot]
            found = largest(waiting, count, codec.sample, seed, self._peaks[i]) + slot.start
            indices[at : at + found.numel()] = found
            kept[at : at + found.numel()] = self._next_velocity[found]
            at += count
            self._next_velocity[found] = 0
            self._next_momentum[found] = 0
        receive = send.new_empty(self._ranks.count, send.numel())
        yield AllGather(send, receive)
        for message in receive:
            kept, indices = message[:border].view(self.works_in), message[border:total]
            values.index_add_(0, indices, kept)
        unsound |= any_infinite(values[receive[:, border:total].reshape(-1)])

    def commit(self) -> None:
        self._momentum, self._next_momentum = self._next_momentum, self._momentum
        self._velocity, self._next_velocity = self._next_velocity, self._velocity

    def rollback(self) -> None:
        """Nothing to do: what comes next begins with what was committed last."""

    def forget(self, slots: Sequence[int]) -> None:
        for slot in (self._slots[i] for i in slots):
            self._next_momentum[slot] = self._momentum[slot]
            self._next_velocity[slot] = self._velocity[slot]

    def state(self) -> list[dict[str, torch.Tensor]]:
        """``momentum`` and, of what is sent sparsely, ``velocity``: what waits to be sent."""
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
