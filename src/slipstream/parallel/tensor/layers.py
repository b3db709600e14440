"""Layers that compute with a rank's shard of their weights; installed by ``split_layers``.

Where only the inputs and outputs of a layer change, hooks on the user's module are enough: columns,
sequences and switches. Two layers compute differently and replace the user's module: a row layer
adds its bias after the sum over ranks, and an embedding holds some of the words only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slipstream.comm import Group
from slipstream.errors import UsageError
from slipstream.parallel.tensor import regions
from slipstream.parallel.tensor.rng_streams import RngStreams
from slipstream.parallel.tensor.shard import Shard, even_sizes

SEQUENCE = 1
"""The axis of a sequence: tensors are [batch, sequence, features]."""


@dataclass(slots=True)
class RegionState:
    """State that the split layers of one model have in common.

    Attributes:
        group: the tensor-parallel ranks.
        streams: their random numbers.
        lengths: by axis, the length of batch and sequence where they are split at the moment.
        summed: parameters, by ``id``, whose gradients are summed over ranks.
        entered: the last input of a column: its version, whether it needed a gradient, and the
            result. Several columns may take one input, as query, key and value do; its gradient is
            then summed once for all.
    """

    group: Group
    streams: RngStreams
    lengths: dict[int, int] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    entered: tuple[torch.Tensor, int | None, bool, torch.Tensor] | None = None

    def enter_column(self, x: torch.Tensor, *, sequence: bool) -> torch.Tensor:
        """Pass ``x`` into a column; with ``sequence`` it is split along the sequence."""
        needs_grad = x.requires_grad and torch.is_grad_enabled()
        version = None if x.is_inference() else x._version  # None: changes cannot be told
        if self.entered is not None and version is not None:
            last, last_version, needed_grad, inside = self.entered
            if last is x and last_version == version and needed_grad == needs_grad:
                return inside
        if sequence:
            inside = regions.gather_to_region(x, self.group, SEQUENCE, self.piece_sizes(SEQUENCE))
        else:
            inside = regions.copy_to_region(x, self.group)
        self.entered = (x, version, needs_grad, inside)
        return inside

    def leave(self) -> None:
        """Let tensors be whole again from here on; idempotent."""
        self.streams.use_common()
        self.entered = None

    def piece_sizes(self, axis: int) -> tuple[int, ...]:
        """The ranks' pieces of the batch or the sequence.

        Raises:
            UsageError: no layer before has split it.
        """
        if axis not in self.lengths:
            raise UsageError(
                f"a layer takes its input split along axis {axis}, but no layer before it splits "
                "along that axis; add {kind: sequence, enter: true} to the plan, at a module "
                "before it"
            )
        return even_sizes(self.lengths[axis], self.group.size)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> list[Any]:
        """Hooks that sum the parameters' gradients over ranks; tied parameters get one hook."""
        new = {id(p): p for p in parameters if p.requires_grad and id(p) not in self.summed}
        self.summed |= new.keys()

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            return regions.reduce_from_region(gradient, self.group)

        return [p.register_hook(summed) for p in new.values()]

    def leave_group(self) -> None:
        """Let the process group go: its end is what tells ranks that wait for this one."""
        gone = replace(self.group, process_group=None)
        self.group = self.streams.group = gone

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionState:
        """A copy of the model runs on the same ranks."""
        return self


@dataclass(frozen=True, slots=True)
class WeightAxes:
    """The axes of a layer's weight.

    Attributes:
        outputs: axis of the weight.
        inputs: axis of the weight.
        features: axis of the layer's input and output.
        widths: by name of an attribute that holds a width, the axis of the weight it measures.
    """

    outputs: int
    inputs: int
    features: int
    widths: dict[str, int]


def weight_axes(layer: nn.Module) -> WeightAxes | None:
    """The axes of a linear or convolutional layer; None for a layer that cannot be split, such as
    a subclass with a forward of its own. ``Conv1D`` is that of transformers.
    """
    if not isinstance(dict(layer.named_parameters(recurse=False)).get("weight"), nn.Parameter):
        return None  # e.g. parametrised
    forward = type(layer).forward
    if forward is nn.Linear.forward:
        return WeightAxes(0, 1, -1, {"out_features": 0, "in_features": 1})
    if forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward):
        return WeightAxes(0, 1, 1, {"out_channels": 0, "in_channels": 1})
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"):
        return WeightAxes(1, 0, -1, {"nf": 1, "nx": 0})
    return None


def column_hooks(
    layer: nn.Module, region: RegionState, shard: Shard, *, gather: bool, sequence: bool
) -> list[Any]:
    """Inputs are whole, or with ``sequence`` split; outputs stay split, or with ``gather`` become
    whole.
    """
    axes = weight_axes(layer)
    assert axes is not None

    def after(module: nn.Module, _: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        if gather:
            region.leave()
            return _gather_outputs(y, region.group, axes.features, shard)
        if module.training:
            region.streams.use_local()
        return y

    def entered(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return region.enter_column(x, sequence=sequence)

    return [_changing_input(layer, entered), layer.register_forward_hook(after)]


def _changing_input(
    layer: nn.Module, change: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> Any:
    """Register a hook that changes the first argument of ``layer``, given by position or by name.

    Raises:
        UsageError: later, where the layer is called by other names.
    """

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(module, args[0]), *args[1:]), kwargs
        first = next(iter(signature(module.forward).parameters), "")
        if first not in kwargs:
            raise UsageError(
                f"a split {type(module).__name__} was called with {', '.join(kwargs) or 'nothing'}"
                " by name; allowed: its input by position"
            )
        return args, {**kwargs, first: change(module, kwargs[first])}

    return layer.register_forward_pre_hook(before, with_kwargs=True)


def _gather_outputs(y: torch.Tensor, group: Group, axis: int, shard: Shard) -> torch.Tensor:
    """The whole output of a column: the ranks' outputs gathered, their blocks put in order."""
    axis %= y.dim()
    y = regions.gather_from_region(y, group, axis, shard.widths)
    if shard.parts > 1:
        y = Shard(axis, shard.sizes, shard.parts).join(y.split(shard.widths, axis))
    return y


def sequence_hooks(
    layer: nn.Module, region: RegionState, axis: int, *, enter: bool, leave: bool
) -> list[Any]:
    """``layer`` computes on its rank's piece along ``axis``; its parameters' gradients are summed.

    ``enter``: its input is whole, and is split here. ``leave``: its output is gathered here.
    """

    def entered(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if enter:
            region.lengths[axis] = x.shape[axis]
            x = regions.scatter_to_region(x, region.group, axis)
        if module.training:
            region.streams.use_local()
        return x

    def after(_: nn.Module, __: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        region.streams.use_common()
        if not leave:
            return y
        return regions.gather_from_region(y, region.group, axis, region.piece_sizes(axis))

    hooks = [_changing_input(layer, entered), layer.register_forward_hook(after)]
    return hooks + region.sum_gradients(layer.parameters())


def switch_hooks(
    layer: nn.Module, region: RegionState, axis: int, before: str | None, after: str | None
) -> list[Any]:
    """Inputs and output of ``layer`` switch between split along ``axis`` and along features."""

    def switched(to: str | None, x: Any) -> Any:
        if to is None or not isinstance(x, torch.Tensor):
            return x
        features, length = x.dim() - 1, sum(region.piece_sizes(axis))
        if to == "features":
            return regions.switch_axis(x, region.group, split=features, joined=axis, length=length)
        width = x.shape[-1] * region.group.size
        return regions.switch_axis(x, region.group, split=axis, joined=features, length=width)

    return [
        layer.register_forward_pre_hook(lambda _, args: tuple(switched(before, x) for x in args)),
        layer.register_forward_hook(lambda _, __, y: switched(after, y)),
    ]


_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_backward_pre_hooks", "_backward_hooks"),
)


def _stand_in(layer: nn.Module, replacement: nn.Module) -> None:
    """The script finds the layer's attributes and hooks; its handles take these off both."""
    for name, value in vars(layer).items():
        if not name.startswith("_") and name != "forward":
            vars(replacement).setdefault(name, value)
    for name in _HOOKS:
        vars(replacement)[name] = vars(layer)[name]
    vars(replacement)["_is_full_backward_hook"] = vars(layer)["_is_full_backward_hook"]


class RowParallel(nn.Module):
    """A linear or convolutional layer whose inputs, and so the columns of its weight, are split.

    ``y = sum over ranks of x_i A_i + b``; the bias is added once, after the sum.
    """

    def __init__(self, layer: nn.Module, region: RegionState, *, sequence: bool) -> None:
        super().__init__()
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, nn.Parameter)
        assert bias is None or isinstance(bias, nn.Parameter)
        self.weight = weight
        self.bias: nn.Parameter | None = bias
        self._product, self._spatial_dims = _product_of(layer), weight.dim() - 2
        self._region, self._sequence = region, sequence
        self.hooks = region.sum_gradients([bias]) if sequence and bias is not None else []
        _stand_in(layer, self)
        self.train(layer.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input``: split along its features (channels)."""
        self._region.leave()
        y = self._product(input, self.weight)
        group = self._region.group
        if self._sequence:
            y = regions.reduce_scatter_from_region(y, group, SEQUENCE)
        else:
            y = regions.reduce_from_region(y, group)
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype).view(-1, *[1] * self._spatial_dims)

    def extra_repr(self) -> str:
        shape, size = list(self.weight.shape), self._region.group.size
        return f"weight={shape}, one of {size} ranks, bias={self.bias is not None}"


def _product_of(layer: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The function of input and weight that ``layer`` computes before it adds its bias."""
    if isinstance(layer, nn.Linear):
        return F.linear
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        convolve = (F.conv1d, F.conv2d, F.conv3d)[layer.weight.dim() - 3]
        options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation")}
        return partial(convolve, **options)
    return lambda x, weight: F.linear(x, weight.t())


class VocabularyParallel(nn.Module):
    """An embedding of which this rank holds the rows from ``start`` on.

    Exactness: bitwise, since for each word all ranks but one add zero.
    """

    def __init__(self, layer: nn.Embedding, region: RegionState, shard: Shard) -> None:
        super().__init__()
        self.weight = layer.weight
        self.start, self.rows = shard.start(region.group.rank), shard.sizes[region.group.rank]
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        padding = self.padding_idx = layer.padding_idx
        local = None if padding is None else padding - self.start
        self._local_padding = local if local is not None and 0 <= local < self.rows else None
        self._region = region
        _stand_in(layer, self)
        self.train(layer.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input``: words, integers of any shape, the same on every rank.

        Raises:
            IndexError: a word outside the embedding.
        """
        index = input - self.start
        # Words of other ranks are masked; words of no rank are left for torch to refuse.
        in_vocabulary = (input >= 0) & (input < self.num_embeddings)
        elsewhere = in_vocabulary & ((index < 0) | (index >= self.rows))
        rows = F.embedding(index.masked_fill(elsewhere, 0), self.weight, self._local_padding)
        local = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        return regions.reduce_from_region(local, self._region.group)

    def extra_repr(self) -> str:
        end = self.start + self.rows
        return f"words {self.start} .. {end - 1} of {self.num_embeddings}, {self.embedding_dim}"
