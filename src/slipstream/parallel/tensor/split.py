"""Splits layers of a model over the ranks of a group, from outside: ``split_layers``.

Parameters stay the user's objects under their names, so an optimizer made before stays valid; each
parameter holds this rank's shard of its values. ``close()`` restores the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream.comm import Group
from slipstream.comm.shards import AllGatherOperation
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.errors import ModelError
from slipstream.parallel.clip import clip_grad_norm_
from slipstream.parallel.tensor import layers
from slipstream.parallel.tensor.assign import ShardedModule, assign, named_shards
from slipstream.parallel.tensor.plans import TensorPlan
from slipstream.parallel.tensor.rng_streams import RngStreams
from slipstream.parallel.tensor.shard import Shard
from slipstream.strategy.parallel import (
    ColumnConfig,
    RowConfig,
    SequenceConfig,
    SwitchConfig,
    VocabularyConfig,
)
from slipstream.transport import broadcast


class SplitLayers:
    """A model whose layers are split over ranks; made by `split_layers`.

    Attributes:
        model: the user's.
        group: the tensor-parallel ranks.
        shards: by name in ``model.state_dict()``, how a tensor is split; other tensors are whole.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        assignments: list[ShardedModule],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.model, self.group = model, group
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        region = self._region = layers.RegionState(group, RngStreams(group, device))
        if group.size > 1:
            broadcast.broadcast([*model.parameters(), *model.buffers()], group.members)
            region.streams.synchronize()
        self._optimizer = optimizer
        self.shards = _with_aliases(model, named_shards(assignments))
        self._undo: list[Callable[[], object]] = []
        self._replace_values(lambda shard, whole: shard.piece(whole, group.rank))
        for assignment in assignments:
            self._install(assignment, region)
        # A forward that an error or a checkpoint ended early may have left a region open.
        for register in (model.register_forward_pre_hook, model.register_forward_hook):
            self._undo.append(register(lambda *_: region.leave()).remove)

    @property
    def largest_shapes(self) -> dict[str, torch.Size]:
        """The shape of the largest shard of each split parameter on any rank, by name."""
        return {
            name: self.shards[name].resized(parameter.shape, max(self.shards[name].widths))
            for name, parameter in self.model.named_parameters()
            if name in self.shards
        }

    def full_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` with whole tensors, on every rank. Collective.

        It fits the unsplit model, and a model split over any number of ranks.
        """
        return self.gather_state(self.model.state_dict())

    def gather_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` with whole tensors instead of this rank's shards. Collective."""
        return {name: self._gather_tensor(name, value) for name, value in state.items()}

    def shard_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` with this rank's shards instead of whole tensors.

        Raises:
            ModelError: a tensor does not have the whole model's shape.
        """
        return {name: self._shard_tensor(name, value) for name, value in state.items()}

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's shards of a state of the whole model.

        Raises:
            ModelError: names are missing or unknown, or a shape differs.
        """
        try:
            self.model.load_state_dict(self.shard_state(state))
        except RuntimeError as error:
            raise ModelError(f"the state does not fit the whole model: {error}") from None

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` with whole tensors, on every rank. Collective.

        Only tensors of their parameter's shape are gathered; other values, such as step counts,
        are the same on every rank.
        """
        state = optimizer.state_dict()
        return self._map_optimizer_state(optimizer, state, self._gather_tensor, is_local=True)

    def load_full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load this rank's shards of a state from `full_optimizer_state_dict`."""
        optimizer.load_state_dict(
            self._map_optimizer_state(optimizer, state, self._shard_tensor, is_local=False)
        )

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` does, by the norm of the whole model's.

        Returns:
            The norm before clipping, the same on every rank. Collective.
        """
        named = list(self.model.named_parameters())
        # Parameters that are whole are equal on all ranks, and count on the first one.
        counted = [p for n, p in named if n in self.shards or self.group.rank == 0]
        return clip_grad_norm_([p for _, p in named], counted, max_norm, self.group)

    def close(self) -> None:
        """Restore the whole model on every rank, with its own modules; idempotent. Collective."""
        while self._undo:
            self._undo.pop()()
        if self.shards:
            self._replace_values(lambda shard, local: _gather_shards(local, shard, self.group))
        self.shards = {}

    def abandon(self) -> None:
        """Leave the layers split after an error, and the group to the other ranks."""
        self._region.leave_group()
        self.group = self._region.group

    def _install(self, assignment: ShardedModule, region: layers.RegionState) -> None:
        """Install the attributes, hooks or replacement of one module."""
        module = assignment.module
        for name, values in assignment.attributes.items():
            self._undo.append(partial(setattr, module, name, getattr(module, name)))
            setattr(module, name, values[self.group.rank])
        hooks: list[Any] = []
        match assignment.style:
            case ColumnConfig(gather=gather, sequence=sequence):
                shard = assignment.shards["weight"]
                hooks = layers.column_hooks(module, region, shard, gather=gather, sequence=sequence)
            case RowConfig(sequence=sequence):
                row = layers.RowParallel(module, region, sequence=sequence)
                self._replace_module(module, row)
                hooks = row.hooks
            case VocabularyConfig():
                assert isinstance(module, nn.Embedding)
                shard = assignment.shards["weight"]
                self._replace_module(module, layers.VocabularyParallel(module, region, shard))
            case SequenceConfig(axis=axis, enter=enter, leave=leave):
                hooks = layers.sequence_hooks(module, region, axis, enter=enter, leave=leave)
            case SwitchConfig(axis=axis, before=before, after=after):
                hooks = layers.switch_hooks(module, region, axis, before, after)
        self._undo += [hook.remove for hook in hooks]

    def _replace_module(self, module: nn.Module, replacement: nn.Module) -> None:
        """Put another module in the place of one, under every name of it."""
        for path, child in list(self.model.named_modules(remove_duplicate=False)):
            if child is module:
                parent_path, _, name = path.rpartition(".")
                parent = self.model.get_submodule(parent_path)
                setattr(parent, name, replacement)
                self._undo.append(partial(setattr, parent, name, module))
        self._undo.append(lambda: module.train(replacement.training))

    @torch.no_grad()
    def _replace_values(self, change: Callable[[Shard, torch.Tensor], torch.Tensor]) -> None:
        """Apply ``change`` to every split tensor, its gradient and its optimizer state."""
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, tensor in tensors.items():
            if (shard := self.shards.get(name)) is None:
                continue
            before, gradient, tensor.grad = tensor.shape, tensor.grad, None
            values = change(shard, tensor.data)
            # A graph that is still alive holds the parameter's AccumulateGrad node, which checks
            # gradients against the old shape; torch makes a new node when the dtype changes.
            other_dtype = torch.float32 if tensor.dtype != torch.float32 else torch.float64
            tensor.data = torch.empty(0, dtype=other_dtype, device=tensor.device)
            tensor.data = values
            if gradient is not None:
                tensor.grad = change(shard, gradient)
            state = self._optimizer.state.get(tensor, {}) if self._optimizer is not None else {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == before:
                    state[key] = change(shard, value)

    def _gather_tensor(self, name: str, value: Any) -> Any:
        shard = self.shards.get(name)
        if shard is None or not isinstance(value, torch.Tensor):
            return value
        return _gather_shards(value.detach(), shard, self.group)

    def _shard_tensor(self, name: str, value: Any) -> Any:
        shard = self.shards.get(name)
        if shard is None or not isinstance(value, torch.Tensor):
            return value
        if value.dim() <= shard.axis or value.shape[shard.axis] != shard.length:
            raise ModelError(
                f"{name} has shape {list(value.shape)} in this state; allowed: the whole model's, "
                f"{shard.length} along axis {shard.axis}"
            )
        return shard.piece(value, self.group.rank)

    def _map_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        change: Callable[[str, Any], Any],
        *,
        is_local: bool,
    ) -> dict[str, Any]:
        """``state`` with ``change(name, tensor)`` for tensors of their parameter's shape: this
        rank's shape where the state ``is_local``, else the whole model's.
        """
        names = {p: n for n, p in self.model.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        changed = {}
        for index, values in state["state"].items():
            if not isinstance(index, int):  # of no parameter
                changed[index] = values
                continue
            name, shape = names.get(parameters[index], ""), parameters[index].shape
            if name in self.shards and not is_local:
                shape = self.shards[name].resized(shape, self.shards[name].length)
            changed[index] = {
                key: change(name, x) if isinstance(x, torch.Tensor) and x.shape == shape else x
                for key, x in values.items()
            }
        return {**state, "state": changed}


def split_layers(
    model: nn.Module, group: Group, plan: TensorPlan, optimizer: torch.optim.Optimizer | None = None
) -> SplitLayers:
    """Split layers of ``model`` over ``group`` according to ``plan``.

    Every rank then trains on the same batches and gets the same loss. All ranks start from the
    parameters, buffers and random states of the group's first rank.

    Args:
        model: built whole on every rank.
        group: best made with ``check=False``, since shapes agree by construction.
        plan: e.g. ``known_plan(model.config)``, or the plan of a ``TensorParallel``.
        optimizer: of the model's parameters; its state is split, too.

    Sources: Megatron-LM (Shoeybi et al. 2019) for columns and rows; Korthikanti et al. 2022 for
    sequences.

    Exactness: reordered.

    Raises:
        StrategyError: the plan does not fit the model; raised before anything changes.

    Example:
        >>> from slipstream import comm
        >>> from slipstream.strategy.parallel import TensorParallelConfig
        >>> mlp = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> plan = TensorParallelConfig(ranks=2, plan={"0": "column", "2": "row"}).plan
        >>> split = split_layers(mlp, comm.group(check=False), plan)
        >>> split.shards["0.weight"].axis, split.shards["2.weight"].axis
        (0, 1)
        >>> split.close()
    """
    return SplitLayers(model, group, assign(model, plan, group.size), optimizer)


def _with_aliases(model: nn.Module, shards: dict[str, Shard]) -> dict[str, Shard]:
    """``shards``, also under the further names of tied parameters."""
    named = list(model.named_parameters(remove_duplicate=False))
    by_tensor = {id(p): shards[name] for name, p in named if name in shards}
    return shards | {name: by_tensor[id(p)] for name, p in named if id(p) in by_tensor}


def _gather_shards(local: torch.Tensor, shard: Shard, group: Group) -> torch.Tensor:
    """The whole tensor, from the shards of all ranks."""
    concatenated = TensorSpec.of(local).resized(shard.length, shard.axis)
    pieces = AllGatherOperation(group, concatenated, shard.axis, shard.widths)(local)
    return shard.join(pieces.split(shard.widths, shard.axis))
