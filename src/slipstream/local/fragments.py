"""Fragments: the parts of a model that meet together.

Layers are dealt out by bytes: each goes to the fragment that has the fewest so far. Layers of one
size so lie in fragments in turn (Streaming DiLoCo found such strides to use a link better than
neighbours in one fragment). A parameter that is larger than a fragment, an embedding most often, is
cut along its first axis. A tied parameter is there once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import nn

from slipstream.gradients.segments import NamedParameter


@dataclass(frozen=True, slots=True)
class ParameterRows:
    """Rows of a parameter.

    Attributes:
        name: of the parameter.
        parameter: with these rows.
        first, last: the rows, along the first axis; a parameter without axes has one.
    """

    name: str
    parameter: nn.Parameter
    first: int
    last: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """View these rows of a tensor of the parameter's shape, complex numbers as pairs."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return real[self.first : self.last] if tensor.dim() else real

    @property
    def values(self) -> torch.Tensor:
        """View these rows of the parameter."""
        return self.of(self.parameter.detach())

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows."""
        return self.last - self.first == _rows(self.parameter)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Pieces and buffers that meet together.

    Attributes:
        pieces: in the order of registration.
        buffers: names of buffers in floating point.
    """

    pieces: tuple[ParameterRows, ...]
    buffers: tuple[str, ...]

    @property
    def num_values(self) -> int:
        """Number of real values of the parameters."""
        return sum(piece.values.numel() for piece in self.pieces)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters of which it has rows."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))


def cut(model: nn.Module, trained: Sequence[NamedParameter], count: int) -> tuple[Fragment, ...]:
    """Deal a model's parameters out to at most ``count`` fragments, none of them empty.

    Buffers follow the layer that they belong to; those of layers without parameters are in the
    first fragment.

    Example:
        >>> from slipstream.gradients.segments import parameters_of
        >>> model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        >>> fragments = cut(model, parameters_of(model, trainable=True), 2)
        >>> [fragment.num_values for fragment in fragments]
        [328, 328]
    """
    total = sum(t.parameter.nbytes for t in trained)
    target = max(-(-total // count), 1)
    dealt: list[list[ParameterRows]] = [[] for _ in range(count)]
    filled = [0] * count
    home: dict[str, int] = {}
    for layer, named in groupby(trained, key=lambda t: t.name.rpartition(".")[0]):
        small: list[ParameterRows] = []
        for piece in (piece for t in named for piece in _pieces(t, target)):
            if piece.is_whole:
                small.append(piece)
            else:
                _deal([piece], dealt, filled)
        if small:
            home[layer] = _deal(small, dealt, filled)
    buffers: list[list[str]] = [[] for _ in range(count)]
    for name, buffer in model.named_buffers():
        if (buffer.is_floating_point() or buffer.is_complex()) and buffer.numel():
            buffers[home.get(name.rpartition(".")[0], 0)].append(name)
    return tuple(
        Fragment(tuple(pieces), tuple(names))
        for pieces, names in zip(dealt, buffers, strict=True)
        if pieces
    )


def sent_after(update: int, steps: int, fragments: int) -> list[int]:
    """Fragments that are sent after so many updates without warm-up, the same on all ranks.

    Fragment f of F is sent after update ``(f + 1) steps / F``, and every ``steps`` updates from
    then on; so fragments take turns, and the last one meets after whole rounds. What came back is
    merged ``delay`` updates later, before the next one is sent.

    Example:
        >>> [(update, sent_after(update, steps=4, fragments=2)) for update in range(1, 7)]
        [(1, []), (2, [0]), (3, []), (4, [1]), (5, []), (6, [0])]
    """
    firsts = [(fragment + 1) * steps // fragments for fragment in range(fragments)]
    late = [(fragment, update - first) for fragment, first in enumerate(firsts)]
    return [fragment for fragment, by in late if by >= 0 and by % steps == 0]


def _deal(
    pieces: Sequence[ParameterRows], dealt: list[list[ParameterRows]], filled: list[int]
) -> int:
    """Give pieces to the fragment with the fewest bytes; which one."""
    chosen = filled.index(min(filled))
    dealt[chosen] += pieces
    filled[chosen] += sum(piece.values.nbytes for piece in pieces)
    return chosen


def _pieces(t: NamedParameter, target: int) -> Iterable[ParameterRows]:
    """The parameter whole, or cut into rows where it is larger than a fragment."""
    rows = _rows(t.parameter)
    count = min(-(-t.parameter.nbytes // target), rows)
    borders = [number * rows // max(count, 1) for number in range(max(count, 1) + 1)]
    for first, last in pairwise(borders):
        yield ParameterRows(t.name, t.parameter, first, last)


def _rows(parameter: torch.Tensor) -> int:
    return parameter.shape[0] if parameter.dim() else 1
