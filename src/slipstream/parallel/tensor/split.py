"""Layers of a model split over the ranks of a group, from outside: ``split_layers``.

Parameters stay the user's objects under their names, so an optimizer made before keeps them; each
holds this rank's share of its values. ``close()`` makes the model whole again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slipstream.comm import Group
from slipstream.comm.collectives import AllGather, Like
from slipstream.errors import ModelError
from slipstream.parallel.clip import clip_grad_norm_
from slipstream.parallel.tensor.assign import Assignment, assign, named_shards
from slipstream.parallel.tensor.layers import (
    Region,
    RowParallel,
    VocabularyParallel,
    column_hooks,
    sequence_hooks,
    switch_hooks,
)
from slipstream.parallel.tensor.plans import Plan
from slipstream.parallel.tensor.rng_streams import Streams
from slipstream.parallel.tensor.shard import Shard
from slipstream.strategy.parallel import Column, Row, Sequence, Switch, Vocabulary
from slipstream.transport import broadcast


class SplitLayers:
    """A model whose layers are split; made by `split_layers`.

    Attributes:
        model: the user's.
        group: the ranks that share its layers.
        shards: how each tensor of ``model.state_dict()`` is cut; a name that is missing is whole.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        assignments: list[Assignment],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.model, self.group = model, group
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        region = Region(group, Streams(group, device))
        if group.size > 1:
            broadcast.broadcast([*model.parameters(), *model.buffers()], group.members)
            region.streams.unify()
        self._optimizer = optimizer
        self.shards = _with_aliases(model, dict(named_shards(assignments)))
        self._undo: list[Callable[[], object]] = []
        self._change(lambda shard, whole: shard.cut(whole, group.rank))
        for one in assignments:
            self._install(one, region)
        self._undo += [
            model.register_forward_pre_hook(lambda *_: region.end()).remove,
            model.register_forward_hook(lambda *_: region.end()).remove,
        ]

    @property
    def shares(self) -> dict[str, torch.Size]:
        """The shapes of the largest shares of cut parameters, by name."""
        found = {}
        for name, parameter in self.model.named_parameters():
            if name in self.shards:
                shard, shape = self.shards[name], list(parameter.shape)
                shape[shard.axis] = shard.parts * max(shard.sizes)
                found[name] = torch.Size(shape)
        return found

    def full_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` with whole tensors, on every rank; all ranks of the group call it.

        It fits the unsplit model, and a model split over any number of ranks.
        """
        return self.joined(self.model.state_dict())

    def joined(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` with whole tensors instead of this rank's shares; all ranks call it."""
        return {name: self._joined(name, value) for name, value in state.items()}

    def cut(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` with this rank's shares instead of whole tensors.

        Raises:
            ModelError: a tensor has another shape.
        """
        return {name: self._cut(name, value) for name, value in state.items()}

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's shares of a state of the whole model.

        Raises:
            ModelError: names are missing or not known, or a shape differs.
        """
        own = self.cut(state)
        try:
            self.model.load_state_dict(own)
        except RuntimeError as error:
            raise ModelError(f"this state is not that of the whole model: {error}") from None

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` with whole tensors where they have their parameter's shape."""
        return self._optimizer_state(optimizer, optimizer.state_dict(), self._joined, local=True)

    def load_full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Take this rank's shares of what `full_optimizer_state_dict` gave."""
        optimizer.load_state_dict(self._optimizer_state(optimizer, state, self._cut, local=False))

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, by the norm of the whole model's gradients.

        Returns:
            The norm before, the same on every rank.
        """
        named = list(self.model.named_parameters())
        counted = [p for n, p in named if n in self.shards or self.group.rank == 0]
        return clip_grad_norm_([p for _, p in named], counted, max_norm, self.group)

    def close(self) -> None:
        """Make the model whole on every rank, with its own modules; twice is once.

        All ranks of the group call it, as the shares are gathered.
        """
        while self._undo:
            self._undo.pop()()
        if self.shards:
            self._change(lambda shard, own: _gathered(own, shard, self.group))
        self.shards = {}

    # Inside.

    def _install(self, one: Assignment, region: Region) -> None:
        """Put the layer or the hooks of one module in place."""
        for name, values in one.attributes.items():
            before = getattr(one.module, name)
            self._undo.append(_setter(one.module, name, before))
            setattr(one.module, name, values[self.group.rank])
        match one.style:
            case Column(gather=gather, sequence=sequence):
                hooks = column_hooks(
                    one.module, region, one.shards["weight"], gather=gather, sequence=sequence
                )
                self._undo += [hook.remove for hook in hooks]
            case Row(sequence=sequence):
                row = RowParallel(one.module, region, sequence=sequence)
                self._undo.append(row.remove)
                self._replace(one.module, row)
            case Vocabulary():
                assert isinstance(one.module, nn.Embedding)
                self._replace(
                    one.module, VocabularyParallel(one.module, region, one.shards["weight"])
                )
            case Sequence(axis=axis, enter=enter, leave=leave):
                hooks = sequence_hooks(one.module, region, axis, enter=enter, leave=leave)
                self._undo += [hook.remove for hook in hooks]
            case Switch(axis=axis, before=before, after=after):
                hooks = switch_hooks(one.module, region, axis, before, after)
                self._undo += [hook.remove for hook in hooks]

    def _replace(self, module: nn.Module, by: nn.Module) -> None:
        for path, child in list(self.model.named_modules(remove_duplicate=False)):
            if child is module:
                parent, _, name = path.rpartition(".")
                owner = self.model.get_submodule(parent)
                setattr(owner, name, by)
                self._undo.append(_setter(owner, name, module))
        self._undo.append(lambda: module.train(by.training))

    @torch.no_grad()
    def _change(self, change: Callable[[Shard, torch.Tensor], torch.Tensor]) -> None:
        """Give every cut tensor, its gradient and its optimizer's state other values."""
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, tensor in tensors.items():
            shard = self.shards.get(name)
            if shard is None:
                continue
            before = tensor.shape
            gradient = tensor.grad if tensor.requires_grad else None
            if gradient is not None:
                tensor.grad = None
            values = change(shard, tensor.data)
            # Graphs that are still alive hold a node of the parameter, which knows its shape; torch
            # makes another one where the dtype has changed.
            other = torch.float32 if tensor.dtype != torch.float32 else torch.float64
            tensor.data = torch.empty(0, dtype=other, device=tensor.device)
            tensor.data = values
            if gradient is not None:
                tensor.grad = change(shard, gradient)
            state = self._optimizer.state.get(tensor, {}) if self._optimizer is not None else {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == before:
                    state[key] = change(shard, value)

    def _joined(self, name: str, value: Any) -> Any:
        shard = self.shards.get(name)
        if shard is None or not isinstance(value, torch.Tensor):
            return value
        return _gathered(value.detach(), shard, self.group)

    def _cut(self, name: str, value: Any) -> Any:
        shard = self.shards.get(name)
        if shard is None or not isinstance(value, torch.Tensor):
            return value
        if value.dim() <= shard.axis or value.shape[shard.axis] != shard.length:
            raise ModelError(
                f"{name} has shape {list(value.shape)} in this state; allowed: {shard.length} "
                f"along axis {shard.axis}, as of the whole model"
            )
        return shard.cut(value, self.group.rank)

    def _optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        change: Callable[[str, Any], Any],
        *,
        local: bool,
    ) -> dict[str, Any]:
        """``state`` with ``change(name, tensor)`` for tensors of their parameter's shape."""
        names = {p: n for n, p in self.model.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        changed = {}
        for index, values in state["state"].items():
            parameter = parameters[index]
            name = names.get(parameter, "")
            shard = self.shards.get(name)
            shape = list(parameter.shape)
            if shard is not None and not local:
                shape[shard.axis] = shard.length
            changed[index] = {
                key: change(name, value)
                if isinstance(value, torch.Tensor) and list(value.shape) == shape
                else value
                for key, value in values.items()
            }
        return {**state, "state": changed}


def split_layers(
    model: nn.Module,
    group: Group,
    plan: Plan,
    optimizer: torch.optim.Optimizer | None = None,
) -> SplitLayers:
    """Split layers of ``model`` over ``group`` as ``plan`` says; every rank then trains on the same
    batches and gets the same loss.

    All ranks start from the parameters, buffers and random numbers of the group's first rank.
    Columns and rows are those of Megatron-LM (Shoeybi et al. 2019), sequences those of Korthikanti
    et al. 2022.

    Args:
        model: built whole on every rank.
        group: best made with ``check=False``, as shapes are known to agree.
        plan: places, e.g. ``known_plan(model.config)`` or those of ``TensorParallel``.
        optimizer: of the model's parameters; what it keeps of them is cut, too.

    Exactness: reordered.

    Raises:
        StrategyError: the plan does not fit the model; before anything is changed.

    Example:
        >>> from slipstream import comm
        >>> from slipstream.strategy.parallel import TensorParallel
        >>> mlp = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> plan = TensorParallel(ranks=2, plan={"0": "column", "2": "row"}).plan
        >>> split = split_layers(mlp, comm.group(check=False), plan)
        >>> split.shards["0.weight"].axis, split.shards["2.weight"].axis
        (0, 1)
        >>> split.close()
    """
    return SplitLayers(model, group, assign(model, plan, group.size), optimizer)


def _with_aliases(model: nn.Module, shards: dict[str, Shard]) -> dict[str, Shard]:
    """``shards`` by every name of a tied parameter."""
    by_tensor = {
        id(p): shards[n] for n, p in model.named_parameters(remove_duplicate=False) if n in shards
    }
    aliases = {
        n: by_tensor[id(p)]
        for n, p in model.named_parameters(remove_duplicate=False)
        if id(p) in by_tensor
    }
    return shards | aliases


def _gathered(own: torch.Tensor, shard: Shard, group: Group) -> torch.Tensor:
    """The whole tensor, from the shares of all ranks."""
    widths = tuple(size * shard.parts for size in shard.sizes)
    together = Like.of(own).sized(sum(widths), shard.axis)
    return shard.join(AllGather(group, together, shard.axis, widths)(own).split(widths, shard.axis))


def _setter(owner: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)
