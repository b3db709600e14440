"""Layers that compute with a rank's share of their weights; put in place by ``split_layers``.

Where only the edges of a layer change, hooks do it and the user's module stays: columns, channels,
sequences. Two layers compute differently and take the place of the user's: a row adds its bias
once, behind the sum over ranks, and an embedding knows a part of the words only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slipstream.comm import Group
from slipstream.errors import UsageError
from slipstream.parallel.tensor import regions
from slipstream.parallel.tensor.rng_streams import Streams
from slipstream.parallel.tensor.shard import Shard

SEQUENCE = 1
"""The axis of a sequence: tensors are [batch, sequence, features]."""


@dataclass(slots=True)
class Region:
    """What the split layers of one model share: their ranks, random numbers, the lengths of batch
    and sequence where they are split at the moment, and the tensor that has entered last: where
    several columns take the same one, as query, key and value do, its gradient is added up once.
    """

    group: Group
    streams: Streams
    lengths: dict[int, int] = field(default_factory=dict)
    added_up: set[int] = field(default_factory=set)
    """Parameters, by ``id``, whose gradients are added up."""
    _entered: tuple[torch.Tensor, int, bool, torch.Tensor] | None = None

    def enter(self, x: torch.Tensor, *, sequence: bool) -> torch.Tensor:
        """``x`` at the entry of a column."""
        wants = x.requires_grad and torch.is_grad_enabled()
        if self._entered is not None:
            known, version, wanted, inside = self._entered
            if known is x and version == x._version and wanted == wants:
                return inside
        if sequence:
            inside = regions.join_in(x, self.group, SEQUENCE, self.parts(SEQUENCE))
        else:
            inside = regions.copy_to_region(x, self.group)
        self._entered = (x, x._version, wants, inside)
        return inside

    def parts(self, axis: int) -> tuple[int, ...]:
        """The ranks' parts of the batch or the sequence.

        Raises:
            UsageError: nothing has cut it.
        """
        if axis not in self.lengths:
            raise UsageError(
                f"a layer takes its input split along axis {axis}, but nothing has cut it there; "
                "allowed: a plan with {kind: sequence, enter: true} at a module before it"
            )
        return regions.even(self.lengths[axis], self.group)

    def add_up(self, parameters: Iterable[nn.Parameter]) -> list[Any]:
        """Hooks by which gradients are the sums of those of the ranks."""
        new = {id(p): p for p in parameters if p.requires_grad and id(p) not in self.added_up}
        self.added_up |= new.keys()
        return [p.register_hook(summed(self.group)) for p in new.values()]

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """A copy of the model has the same ranks."""
        return self

    def end(self) -> None:
        """What follows is whole again; nothing where it is already."""
        self.streams.whole()
        self._entered = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of layer that can be split: the axes of its weight, and of its input and output."""

    outputs: int
    inputs: int
    features: int
    widths: dict[str, int]
    """Attributes to be divided, and the axis (of the weight) that they measure."""


def kind_of(layer: nn.Module) -> Kind | None:
    """How ``layer`` is split; None where it cannot be, such as a subclass with a forward of its
    own. ``Conv1D`` is that of transformers.
    """
    if not isinstance(dict(layer.named_parameters(recurse=False)).get("weight"), nn.Parameter):
        return None  # e.g. parametrised
    forward = type(layer).forward
    if forward is nn.Linear.forward:
        return Kind(0, 1, -1, {"out_features": 0, "in_features": 1})
    if forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward):
        return Kind(0, 1, 1, {"out_channels": 0, "in_channels": 1})
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"):
        return Kind(1, 0, -1, {"nf": 1, "nx": 0})
    return None


def column_hooks(
    layer: nn.Module, region: Region, shard: Shard, *, gather: bool, sequence: bool
) -> list[Any]:
    """Whole (or, with ``sequence``, split) inputs enter; outputs stay split or are joined."""
    kind = kind_of(layer)
    assert kind is not None

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        return (region.enter(x, sequence=sequence), *others)

    def leave(module: nn.Module, _: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        if gather:
            region.end()
            return joined(y, region.group, kind.features, shard)
        if module.training:
            region.streams.split()
        return y

    return [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]


def joined(y: torch.Tensor, group: Group, axis: int, shard: Shard) -> torch.Tensor:
    """Outputs of a column, whole: each rank's blocks one behind the other, put in order."""
    axis, widths = axis % y.dim(), tuple(size * shard.parts for size in shard.sizes)
    y = regions.join(y, group, axis, widths)
    if shard.parts == 1:
        return y
    return Shard(axis, shard.sizes, shard.parts).join(y.split(widths, axis))


def sequence_hooks(
    layer: nn.Module, region: Region, axis: int, *, enter: bool, leave: bool
) -> list[Any]:
    """``layer`` works on its part along ``axis``; gradients of its parameters are added up."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        if enter:
            region.lengths[axis] = x.shape[axis]
            x = regions.cut(x, region.group, axis)
        if module.training:
            region.streams.split()
        return (x, *others)

    def after(_: nn.Module, __: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        region.streams.whole()
        return regions.join(y, region.group, axis, region.parts(axis)) if leave else y

    hooks: list[Any] = [
        layer.register_forward_pre_hook(before),
        layer.register_forward_hook(after),
    ]
    return hooks + region.add_up(layer.parameters())


def switch_hooks(
    layer: nn.Module, region: Region, axis: int, before: str | None, after: str | None
) -> list[Any]:
    """Inputs and output of ``layer`` change between split along ``axis`` and along features."""

    def switched(x: Any, to: str) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        features, length = x.dim() - 1, sum(region.parts(axis))
        if to == "features":
            return regions.switch(x, region.group, split=features, joined=axis, length=length)
        whole = x.shape[-1] * region.group.size
        return regions.switch(x, region.group, split=axis, joined=features, length=whole)

    hooks: list[Any] = []
    if before is not None:
        into = before
        hooks.append(
            layer.register_forward_pre_hook(lambda _, args: tuple(switched(x, into) for x in args))
        )
    if after is not None:
        out = after
        hooks.append(layer.register_forward_hook(lambda _, __, y: switched(y, out)))
    return hooks


def summed(group: Group) -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook on a parameter: its gradient is the sum of those of the ranks."""

    def add_up(gradient: torch.Tensor) -> torch.Tensor:
        return regions.reduce_from_region(gradient, group)

    return add_up


class RowParallel(nn.Module):
    """A linear or convolutional layer whose inputs, and so the columns of its weight, are split.

    ``y = sum over ranks of x_i A_i + b``; the bias is added once, behind the sum.
    """

    def __init__(self, layer: nn.Module, region: Region, *, sequence: bool) -> None:
        super().__init__()
        kind = kind_of(layer)
        assert kind is not None
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, nn.Parameter)
        assert bias is None or isinstance(bias, nn.Parameter)
        self.weight = weight
        self.bias: nn.Parameter | None = bias
        self._compute, self._spatial = product_of(layer), weight.dim() - 2
        self._region, self._sequence = region, sequence
        self._hooks = region.add_up([self.bias]) if sequence and self.bias is not None else []
        self.train(layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: split along its features (channels)."""
        self._region.end()
        y = self._compute(x, self.weight)
        group = self._region.group
        y = (
            regions.sum_cut(y, group, SEQUENCE)
            if self._sequence
            else regions.reduce_from_region(y, group)
        )
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype).view(-1, *[1] * self._spatial)

    def remove(self) -> None:
        """Take the hook off the bias."""
        for hook in self._hooks:
            hook.remove()

    def extra_repr(self) -> str:
        shape, size = list(self.weight.shape), self._region.group.size
        return f"weight={shape}, one of {size} ranks, bias={self.bias is not None}"


def product_of(layer: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What ``layer`` computes of input and weight, without its bias."""
    match layer:
        case nn.Linear():
            return F.linear
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[layer.weight.dim() - 2]
            return partial(
                convolve,
                bias=None,
                stride=layer.stride,
                padding=layer.padding,
                dilation=layer.dilation,
            )
    return lambda x, weight: F.linear(x, weight.t())


class VocabularyParallel(nn.Module):
    """An embedding of which this rank holds the rows from ``start`` on; others come from others.

    Exactness: bitwise, as all but one of the ranks add zero.
    """

    def __init__(self, layer: nn.Embedding, region: Region, shard: Shard) -> None:
        super().__init__()
        self.weight = layer.weight
        self.start, self.rows = shard.start(region.group.rank), shard.sizes[region.group.rank]
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.padding_idx = layer.padding_idx
        self._region = region
        self.train(layer.training)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """``words``: integers of any shape, the same on every rank.

        Raises:
            IndexError: a word that the embedding does not have.
        """
        own = words - self.start
        known = (words >= 0) & (words < self.num_embeddings)  # torch refuses the others
        elsewhere = known & ((own < 0) | (own >= self.rows))
        padding = None
        if self.padding_idx is not None and 0 <= self.padding_idx - self.start < self.rows:
            padding = self.padding_idx - self.start
        rows = F.embedding(own.masked_fill(elsewhere, 0), self.weight, padding)
        return regions.reduce_from_region(
            rows.masked_fill(elsewhere.unsqueeze(-1), 0), self._region.group
        )

    def extra_repr(self) -> str:
        end = self.start + self.rows
        return f"words {self.start} .. {end - 1} of {self.num_embeddings}, {self.embedding_dim}"
