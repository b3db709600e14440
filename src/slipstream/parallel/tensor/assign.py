"""Decides which tensors of a model a plan splits, and how; checks all before anything changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from slipstream.errors import StrategyError
from slipstream.parallel.tensor.layers import WeightAxes, weight_axes
from slipstream.parallel.tensor.plans import TensorPlan
from slipstream.parallel.tensor.shard import Shard
from slipstream.strategy import parallel as styles

AxisShards = dict[str, Shard]
"""By local name of a parameter or buffer."""
Attributes = dict[str, tuple[int, ...]]
"""By name of an attribute of a module, its values on the ranks."""


def assign(model: nn.Module, plan: TensorPlan, ranks: int) -> list[ShardedModule]:
    """Assign ``plan`` to the layers of ``model`` on ``ranks`` ranks, in the order of
    ``named_modules()``.

    Raises:
        StrategyError: a pattern that no module matches, a style that does not fit its module, a
            size that cannot be divided, or a tied parameter that would be split in two ways.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for place in plan:
        if not any(fnmatchcase(path, place.match) for path in modules):
            near = get_close_matches(place.match.replace("*", ""), modules, 3, cutoff=0.3)
            raise StrategyError(
                f"parallel.tensor.plan: no module matches {place.match!r}; "
                f"similar paths: {', '.join(near or list(modules)[1:4])}"
            )
    assignments: dict[int, ShardedModule] = {}
    for path, module in modules.items():
        if id(module) in assignments:
            continue  # the same module under another name
        style = next((p.style for p in plan if fnmatchcase(path, p.match)), None)
        if style is not None:
            assignments[id(module)] = ShardedModule(path, module, style, ranks)
    _check_tied(model, assignments)
    return list(assignments.values())


def named_shards(assignments: list[ShardedModule]) -> AxisShards:
    """The shards by name in ``state_dict()``, without the further names of tied parameters."""
    return {
        f"{a.path}.{name}".removeprefix("."): shard
        for a in assignments
        for name, shard in a.shards.items()
    }


@dataclass
class ShardedModule:
    """A module and its style: the shards of its own tensors, and the attributes that change."""

    path: str
    module: nn.Module
    style: styles.StyleConfig
    ranks: int
    shards: AxisShards = field(default_factory=dict)
    attributes: Attributes = field(default_factory=dict)

    def __post_init__(self) -> None:
        match self.style:
            case styles.ColumnConfig():
                self._column(self.style)
            case styles.RowConfig():
                axes = self._weight_axes()
                length = self._weight().shape[axes.inputs]
                self._check_divides(length, self.ranks, "inputs")
                shard = self.shards["weight"] = Shard.even(axes.inputs, length, self.ranks)
                self._widths(axes.inputs, shard)
            case styles.ChannelsConfig():
                self._channels()
            case styles.VocabularyConfig():
                self._vocabulary()
            case styles.HeadsConfig(divide=names):
                for name in names:
                    if type(getattr(self.module, name, None)) is not int:
                        integers = [n for n, v in vars(self.module).items() if type(v) is int]
                        allowed = f"whole numbers: {', '.join(integers)}"
                        raise self._error(f"divide {name!r}", allowed)
                self._divide(names)
            case styles.SequenceConfig():
                self._check_sequence()
            case styles.SwitchConfig():
                has_parameters = next(self.module.parameters(), None) is not None
                allowed = "a module without parameters, such as an activation or Flatten"
                self._refuse(has_parameters, "parameters", allowed)

    def _column(self, style: styles.ColumnConfig) -> None:
        axes = self._weight_axes()
        length = self._weight().shape[axes.outputs]
        if (style.uneven or style.gather) and style.block == 1:
            self._check_divides(length, style.parts, "outputs")
        else:
            factors = f" ({self.ranks} ranks x {style.parts} parts x blocks of {style.block})"
            self._check_divides(length, self.ranks * style.parts * style.block, "outputs", factors)
        shard = Shard.even(axes.outputs, length, self.ranks, style.parts)
        self._refuse(min(shard.sizes) == 0, f"{length} outputs", f"at least {self.ranks}")
        self.shards["weight"] = shard
        if any(name == "bias" for name, _ in self.module.named_parameters(recurse=False)):
            self.shards["bias"] = Shard(0, shard.sizes, shard.parts)
        self._widths(axes.outputs, shard)

    def _widths(self, axis: int, shard: Shard) -> None:
        """Attributes that measure an axis of the weight."""
        widths = (name for name, measured in self._weight_axes().widths.items() if measured == axis)
        self.attributes |= dict.fromkeys(widths, shard.widths)

    def _channels(self) -> None:
        layer = self.module
        match layer:
            case nn.GroupNorm():
                widths = ["num_groups", "num_channels"]
            case nn.SyncBatchNorm():
                allowed = "BatchNorm: SyncBatchNorm would mix channels of different ranks"
                raise self._error("SyncBatchNorm", allowed)
            case nn.modules.batchnorm._NormBase():
                widths = ["num_features"]
            case nn.Conv1d() | nn.Conv2d() | nn.Conv3d() if layer.groups > 1:
                widths = ["groups", "in_channels", "out_channels"]
            case _:
                allowed = "batch, group or instance normalisation, or a grouped convolution"
                raise self._error(type(layer).__name__, allowed)
        tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        self.shards |= {name: Shard.even(0, len(t), self.ranks) for name, t in tensors if t.dim()}
        self._divide(widths)

    def _vocabulary(self) -> None:
        layer = self.module
        is_plain = type(layer).forward is nn.Embedding.forward
        if not is_plain or not isinstance(layer, nn.Embedding) or layer.max_norm is not None:
            raise self._error(type(layer).__name__, "an Embedding without max_norm")
        words, by_frequency = layer.num_embeddings, layer.scale_grad_by_freq
        allowed = "False: a rank counts its own words only"
        self._refuse(layer.sparse, "sparse=True", "False: the rows of a rank get dense gradients")
        self._refuse(by_frequency, "scale_grad_by_freq=True", allowed)
        self._refuse(words < self.ranks, f"{words} words", f"at least {self.ranks}")
        self.shards["weight"] = Shard.even(0, words, self.ranks)

    def _check_sequence(self) -> None:
        for name, module in self.module.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise self._error(
                    f"{type(module).__name__} {name}".rstrip(),
                    "modules that treat samples one by one: its statistics would cover one rank's "
                    "piece only",
                )

    # Used by several styles.

    def _weight_axes(self) -> WeightAxes:
        axes = weight_axes(self.module)
        if axes is None:
            allowed = "Linear, Conv1d, Conv2d, Conv3d, Conv1D, with torch's forward, a plain weight"
            raise self._error(type(self.module).__name__, allowed)
        groups = getattr(self.module, "groups", 1)
        allowed = "one of 1 group; between a column and a row use the style channels"
        self._refuse(groups > 1, f"a convolution of {groups} groups", allowed)
        padding = getattr(self.module, "padding_mode", "zeros")
        self._refuse(padding != "zeros", f"padding_mode {padding!r}", "zeros")
        return axes

    def _weight(self) -> nn.Parameter:
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def _divide(self, names: Iterable[str]) -> None:
        """Integer attributes of the module, divided by the number of ranks."""
        for name in names:
            value: int = getattr(self.module, name)
            self._check_divides(value, self.ranks, name)
            self.attributes[name] = (value // self.ranks,) * self.ranks

    def _check_divides(self, size: int, divisor: int, what: str, factors: str = "") -> None:
        self._refuse(size % divisor, f"{size} {what}", f"a multiple of {divisor}{factors}")

    def _refuse(self, wrong: object, seen: str, allowed: str) -> None:
        if wrong:
            raise self._error(seen, allowed)

    def _error(self, seen: str, allowed: str) -> StrategyError:
        return StrategyError(
            f"parallel.tensor.plan: {self.path or 'the model'} is to be split as "
            f"{self.style.kind} over {self.ranks} ranks, but has {seen}; allowed: {allowed}"
        )


def _check_tied(model: nn.Module, assignments: dict[int, ShardedModule]) -> None:
    """Require that a parameter under two names is split the same way under both."""
    first_use: dict[int, tuple[str, Shard | None]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        assignment = assignments.get(id(module))
        for local_name, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{local_name}"
            shard = assignment.shards.get(local_name) if assignment is not None else None
            first_name, first_shard = first_use.setdefault(id(parameter), (name, shard))
            if shard != first_shard:
                raise StrategyError(
                    f"parallel.tensor.plan: {first_name} and {name} are one tied parameter, but "
                    f"the plan splits {first_name} {_shown(first_shard)} and {name} "
                    f"{_shown(shard)}; split both modules the same way (vocabulary and column), or "
                    "neither"
                )


def _shown(shard: Shard | None) -> str:
    return "not at all" if shard is None else f"along axis {shard.axis} into {list(shard.sizes)}"
