"""Which tensors of a model a plan cuts, and how: found and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from slipstream.errors import StrategyError
from slipstream.parallel.tensor.layers import Kind, kind_of
from slipstream.parallel.tensor.plans import Plan
from slipstream.parallel.tensor.shard import Shard
from slipstream.strategy.parallel import (
    Channels,
    Column,
    Heads,
    Row,
    Sequence,
    Style,
    Switch,
    Vocabulary,
)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A module and its style: the shards of its own tensors, and the attributes that change."""

    path: str
    module: nn.Module
    style: Style
    shards: dict[str, Shard]
    attributes: dict[str, tuple[int, ...]]
    """New values, by rank."""


def assign(model: nn.Module, plan: Plan, ranks: int) -> list[Assignment]:
    """What ``plan`` does to ``model`` on ``ranks`` ranks, in the order of ``named_modules()``.

    Raises:
        StrategyError: a pattern without a module, a style that does not fit its module, a size that
            cannot be divided, or a tied parameter that is cut in two ways.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    for place in plan:
        if not any(fnmatchcase(path, place.match) for path in paths):
            near = get_close_matches(place.match.replace("*", ""), paths, 3, cutoff=0.3)
            raise StrategyError(
                f"parallel.tensor.plan: no module matches {place.match!r}; "
                f"near it: {', '.join(near) or ', '.join(list(paths)[1:4])}"
            )
    found: list[Assignment] = []
    for path, module in paths.items():
        if any(one.module is module for one in found):
            continue  # the same module under another name
        style = next((p.style for p in plan if fnmatchcase(path, p.match)), None)
        if style is not None:
            found.append(_Case(path, module, style, ranks).assignment())
    _check_ties(model, found)
    return found


def named_shards(found: list[Assignment]) -> Iterator[tuple[str, Shard]]:
    """The shards by the names of tensors in ``state_dict()``, aliases of tied ones aside."""
    for one in found:
        for name, shard in one.shards.items():
            yield f"{one.path}.{name}" if one.path else name, shard


@dataclass(frozen=True, slots=True)
class _Case:
    """A module and the style that the plan gives it."""

    path: str
    module: nn.Module
    style: Style
    ranks: int

    def assignment(self) -> Assignment:
        match self.style:
            case Column():
                shards, attributes = self._column(self.style)
            case Row():
                shards, attributes = self._row()
            case Channels():
                shards, attributes = self._channels()
            case Vocabulary():
                shards, attributes = self._vocabulary(), {}
            case Heads():
                shards, attributes = {}, self._heads(self.style)
            case Sequence():
                shards, attributes = self._sequence(), {}
            case Switch():
                shards, attributes = self._switch(), {}
        return Assignment(self.path, self.module, self.style, shards, attributes)

    def _column(self, style: Column) -> tuple[dict[str, Shard], dict[str, tuple[int, ...]]]:
        kind = self._kind()
        length = self._weight().shape[kind.outputs]
        uneven = (style.uneven or style.gather) and style.block == 1
        if uneven:
            self._divides(length, style.parts, "outputs")
        else:
            self._divides(length, style.parts * style.block * self.ranks, "outputs", style)
        shard = Shard.even(kind.outputs, length, self.ranks, style.parts)
        if min(shard.sizes) == 0:
            raise self._wrong(f"{length} outputs", f"at least {self.ranks}")
        shards = {"weight": shard} | self._bias(shard)
        widths = tuple(size * style.parts for size in shard.sizes)
        return shards, self._width(kind.outputs, widths)

    def _row(self) -> tuple[dict[str, Shard], dict[str, tuple[int, ...]]]:
        kind = self._kind()
        length = self._weight().shape[kind.inputs]
        self._divides(length, self.ranks, "inputs")
        shard = Shard.even(kind.inputs, length, self.ranks)
        return {"weight": shard}, {}

    def _channels(self) -> tuple[dict[str, Shard], dict[str, tuple[int, ...]]]:
        layer = self.module
        match layer:
            case nn.GroupNorm():
                widths = ["num_groups", "num_channels"]
            case nn.SyncBatchNorm():
                raise self._wrong("SyncBatchNorm", "BatchNorm: its statistics are of all ranks")
            case nn.modules.batchnorm._NormBase():
                widths = ["num_features"]
            case nn.Conv1d() | nn.Conv2d() | nn.Conv3d() if layer.groups > 1:
                widths = ["groups", "in_channels", "out_channels"]
            case _:
                raise self._wrong(
                    type(layer).__name__, "batch, group or instance normalisation, or a convolution"
                )
        for name in widths:
            self._divides(getattr(layer, name), self.ranks, name)
        tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        shards = {name: Shard.even(0, len(t), self.ranks) for name, t in tensors if t.dim()}
        return shards, {name: (getattr(layer, name) // self.ranks,) * self.ranks for name in widths}

    def _vocabulary(self) -> dict[str, Shard]:
        layer = self.module
        plain = type(layer).forward is nn.Embedding.forward
        if not plain or not isinstance(layer, nn.Embedding) or layer.max_norm is not None:
            raise self._wrong(type(layer).__name__, "an Embedding without max_norm")
        if layer.sparse:
            raise self._wrong("sparse=True", "False: the rows of a rank are dense")
        if layer.scale_grad_by_freq:
            raise self._wrong("scale_grad_by_freq=True", "False: words are counted on one rank")
        if layer.num_embeddings < self.ranks:
            raise self._wrong(f"{layer.num_embeddings} words", f"at least {self.ranks}")
        return {"weight": Shard.even(0, layer.num_embeddings, self.ranks)}

    def _heads(self, style: Heads) -> dict[str, tuple[int, ...]]:
        for name in style.divide:
            value = getattr(self.module, name, None)
            if not isinstance(value, int) or isinstance(value, bool):
                numbers = [n for n, v in vars(self.module).items() if type(v) is int]
                raise self._wrong(f"divide {name!r}", f"whole numbers: {', '.join(numbers)}")
            self._divides(value, self.ranks, name)
        return {
            name: (getattr(self.module, name) // self.ranks,) * self.ranks for name in style.divide
        }

    def _sequence(self) -> dict[str, Shard]:
        for name, module in self.module.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise self._wrong(
                    f"{type(module).__name__} {name}".rstrip(),
                    "modules that treat samples one by one: its statistics would be of a part",
                )
        return {}

    def _switch(self) -> dict[str, Shard]:
        if next(self.module.parameters(), None) is not None:
            raise self._wrong("parameters", "a module without, such as an activation or Flatten")
        return {}

    # What they share.

    def _kind(self) -> Kind:
        kind = kind_of(self.module)
        if kind is None:
            raise self._wrong(
                type(self.module).__name__,
                "Linear, Conv1d, Conv2d, Conv3d, Conv1D, with torch's forward and a plain weight",
            )
        if getattr(self.module, "groups", 1) > 1:
            raise self._wrong(
                f"a convolution of {self.module.groups} groups",
                "one of 1 group; between a column and a row the style channels",
            )
        if getattr(self.module, "padding_mode", "zeros") != "zeros":
            raise self._wrong(f"padding_mode {self.module.padding_mode!r}", "zeros")
        return kind

    def _weight(self) -> nn.Parameter:
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def _bias(self, shard: Shard) -> dict[str, Shard]:
        names = [name for name, _ in self.module.named_parameters(recurse=False)]
        return {"bias": Shard(0, shard.sizes, shard.parts)} if "bias" in names else {}

    def _width(self, axis: int, widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {name: widths for name, of in self._kind().widths.items() if of == axis}

    def _divides(self, size: int, by: int, what: str, style: Column | None = None) -> None:
        if size % by:
            of = "" if style is None else _product(style, self.ranks)
            raise self._wrong(f"{size} {what}", f"a multiple of {by}{of}")

    def _wrong(self, seen: str, allowed: str) -> StrategyError:
        return StrategyError(
            f"parallel.tensor.plan: {self.path or 'the model'} is to be split as "
            f"{self.style.kind} over {self.ranks} ranks, but has {seen}; allowed: {allowed}"
        )


def _product(style: Column, ranks: int) -> str:
    """`` (3 parts x 2 ranks x 64 of a block)``"""
    factors = [f"{ranks} ranks"]
    factors += [f"{style.parts} parts"] if style.parts > 1 else []
    factors += [f"blocks of {style.block}"] if style.block > 1 else []
    return f" ({' x '.join(factors)})" if len(factors) > 1 else ""


def _check_ties(model: nn.Module, found: list[Assignment]) -> None:
    """A parameter under two names must be cut the same under both."""
    wishes = {id(one.module): one.shards for one in found}
    first: dict[int, tuple[str, Shard | None]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for local, parameter in module.named_parameters(recurse=False):
            name, config = f"{path}.{local}", wishes.get(id(module), {}).get(local)
            other, due = first.setdefault(id(parameter), (name, config))
            if config != due:
                raise StrategyError(
                    f"parallel.tensor.plan: {other} and {name} are one tied parameter, but the "
                    f"plan cuts {other} {_shown(due)} and {name} {_shown(config)}; split both "
                    "modules the same way (vocabulary and column), or neither"
                )


def _shown(shard: Shard | None) -> str:
    return "not at all" if shard is None else f"along axis {shard.axis} into {list(shard.sizes)}"
