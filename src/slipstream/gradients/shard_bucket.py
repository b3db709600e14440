"""A bucket whose sum arrives in shards: each rank gets the part that it updates.

Never communicates: a bucket says what is to be exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from slipstream.codecs.compressor import any_infinite, is_finite
from slipstream.gradients.buckets import Bucket, gradient_dtype, gradient_of, scale_into
from slipstream.gradients.shards import Shards, flat
from slipstream.transport.requests import ReduceScatter


class ShardBucket(Bucket):
    """One row for each rank: its shards of the gradients, then the flags of use of all of them.

    Args:
        parameters: of one dtype, without holes in their memory.
        shards: get this rank's averages.
        dtype: in which gradients travel; None: their own. Sums are taken and kept in the wider of
            the two where the transport can.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], shards: Shards, dtype: torch.dtype | None = None
    ) -> None:
        self.parameters, self._shards = list(parameters), shards
        first = parameters[0]
        grad_dtype, device = gradient_dtype(first), first.device
        wire = grad_dtype if dtype is None or grad_dtype.is_complex else dtype
        borders = [0, *accumulate(shards.length(p) for p in parameters)]
        self._columns = [slice(*border) for border in pairwise(borders)]
        width = borders[-1] + len(parameters)
        self.rows = shards.workspace.rows(shards.ranks.count, width, wire)
        self._padding = [
            part
            for p, c in zip(parameters, self._columns, strict=True)
            for part in behind(self.rows[:, c], p.numel())
        ]
        # NCCL adds up in the type that travels
        summed = wire if device.type == "cuda" else grad_dtype
        self._sums = torch.zeros(width, dtype=summed, device=device)
        self._averages = self._sums
        if summed != grad_dtype:
            self._averages = torch.zeros(width, dtype=grad_dtype, device=device)
        self.may_overflow = wire == torch.float16 != grad_dtype
        self._filled, self.gone = set[int](), set[int]()
        self._unused: list[int] = []
        self.num_bytes = sum(p.nbytes for p in parameters)

    def fill(self, slot: int, scale: torch.Tensor) -> None:
        for part, values in self._parts(slot):
            scale_into(part, values, scale)
        self.parameters[slot].grad = None
        self._filled.add(slot)
        self.gone.add(slot)

    def complete(self, scale: torch.Tensor) -> None:
        self._unused = []
        for slot in set(range(len(self.parameters))) - self._filled:
            if self.parameters[slot].grad is not None:
                self.fill(slot, scale)
            else:
                self.rows[:, self._columns[slot]].zero_()
                self._unused.append(slot)
        for part in self._padding:  # parameters were here meanwhile
            part.zero_()
        self._flags.fill_(1)
        for slot in self._unused:
            self._flags[:, slot] = 0
        self._filled.clear()

    def look(self) -> None:
        self.nonfinite_here = any_infinite(self.rows)
        self._flags.masked_fill_(self.nonfinite_here, torch.nan)

    @property
    def nonfinite(self) -> torch.Tensor:
        found = self._sums[self._columns[-1].stop :].isnan().any()
        return found | any_infinite(self._sums) if self.may_overflow else found

    def _parts(self, slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The gradient in parts, each with its place: whole shards, then what is left."""
        parameter, places = self.parameters[slot], self.rows[:, self._columns[slot]]
        gradient = gradient_of(parameter)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        yield from in_shards(places, flat(gradient))

    @property
    def _flags(self) -> torch.Tensor:
        return self.rows[:, self._columns[-1].stop :]

    def exchange(self, step: int) -> ReduceScatter:
        return ReduceScatter(self.rows, self._sums)

    @property
    def is_finite(self) -> bool:
        return is_finite(self._sums)

    def finish(self, loss_scale: float) -> None:
        if self._averages is not self._sums:
            self._averages.copy_(self._sums)
        if self.may_overflow and loss_scale != 1.0:
            self._averages.mul_(1 / loss_scale)
        self.gone.clear()
        used = [True] * len(self.parameters)
        if self._unused:
            flags = self._sums[self._columns[-1].stop :]
            used = [bool(flag) for flag in (flags.real if flags.is_complex() else flags).tolist()]
        for parameter, columns, is_used in zip(self.parameters, self._columns, used, strict=True):
            shape = self._shards.shape(parameter)
            average = self._averages[columns][: shape.numel()].view(shape)
            self._shards.deliver(parameter, average if is_used else None)


def in_shards(
    rows: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the rows of a 2-D tensor with the values that belong there, in at most two pairs.

    Example:
        >>> for row, part in in_shards(torch.zeros(3, 2), torch.arange(3)):
        ...     row.shape, part.tolist()
        (torch.Size([1, 2]), [[0, 1]])
        (torch.Size([1]), [2])
    """
    length = rows.shape[1]
    if not length:
        return
    whole, rest = divmod(len(values), length)
    if whole:
        yield rows[:whole], values[: whole * length].view(whole, length)
    if rest:
        yield rows[whole, :rest], values[whole * length :]


def behind(rows: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """The parts of rows that ``numel`` values leave free."""
    whole, rest = divmod(numel, rows.shape[1]) if rows.shape[1] else (len(rows), 0)
    if rest:
        yield rows[whole, rest:]
        whole += 1
    if whole < len(rows):
        yield rows[whole:]
