"""Keeps on each rank of a pipeline only the parameters of its stages.

A parameter of another rank's stage stays the same object of the same shape, but its data is a
placeholder: the memory of one element, which is NaN, and which scripts may not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.comm.groups import Group
from slipstream.errors import ModelError, UsageError
from slipstream.parallel.pipeline.absent_parameters import AbsentParameter, bring_back, leave_out
from slipstream.parallel.pipeline.split_points import SplitPoints
from slipstream.transport.consistency import collective_errors
from slipstream.transport.p2p import start_transfer


class StageParameters:
    """Which rank holds which parameters of a model that is split into stages.

    Stage s is on rank s % ranks.

    Args:
        model: whole and equal on every rank.
        split_points: of the model.
        group: the ranks of the pipeline.

    Attributes:
        local_stages: the stages of this rank.
    """

    def __init__(self, model: nn.Module, split_points: SplitPoints, group: Group) -> None:
        self._model, self._group, size = model, group, group.size
        self.local_stages = range(group.rank, split_points.num_stages, size)
        self._stages = split_points.tensor_stages(model)
        self._ranks = {
            name: tuple(sorted({stage % size for stage in stages}))
            for name, stages in self._stages.items()
        }
        self._released_strides: dict[str, tuple[int, ...]] = {}

    @property
    def replicated(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Parameters that require a gradient and that this and other ranks hold, with their ranks:
        tied ones, and those of modules around a split point."""
        return [
            (parameter, ranks)
            for name, parameter in self._model.named_parameters()
            if len(ranks := self._ranks_of(name)) > 1
            and parameter.requires_grad
            and self.is_local(name)
        ]

    def is_local(self, name: str) -> bool:
        """Whether this rank holds the parameter or buffer of that name."""
        return self._group.rank in self._ranks_of(name)

    def is_owner(self, name: str) -> bool:
        """Whether this rank is the first that holds it."""
        return self._group.rank == self._ranks_of(name)[0]

    def of_stage(self, stage: int) -> list[nn.Parameter]:
        """The parameters that a stage uses."""
        return [
            parameter
            for name, parameter in self._model.named_parameters()
            if self._ranks_of(name) and stage in self._stages[name]
        ]

    def release(self, ignored: Callable[[], bool]) -> None:
        """Free the memory of parameters that only other ranks hold.

        Args:
            ignored: whether a stage runs now, which drops what it computes of them.
        """
        named = dict(self._model.named_parameters(remove_duplicate=False))
        # Read all strides first: a tied parameter has several names, and becomes a placeholder.
        self._released_strides = {
            name: p.stride() for name, p in named.items() if not self.is_local(name)
        }
        released = {id(named[name]): name for name in reversed(self._released_strides)}
        for name in released.values():
            owner = self._group.ranks[self._ranks[name][0]]
            leave_out(named[name], name, owner=owner, ignored=ignored)

    def restore(self) -> None:
        """Give every rank the whole model again, from the owners. Collective.

        Raises:
            ExchangeError: another rank does not take part.
        """
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for name, strides in self._released_strides.items():
            if isinstance(named[name], AbsentParameter):  # not yet, under another name
                bring_back(named[name], strides)
        self._released_strides.clear()
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            tensor.data.copy_(self._from_owner(name, tensor.data))

    def full_state_dict(self) -> dict[str, object]:
        """``model.state_dict()`` of the whole model, copied, on every rank. Collective.

        Raises:
            ExchangeError: another rank does not take part.
        """
        return {
            name: self._from_owner(name, value) if name in self._ranks else value
            for name, value in self._local_state().items()
        }

    def load_full_state_dict(self, state: Mapping[str, object]) -> None:
        """Load this rank's part of a whole ``state``; every rank passes the same.

        Raises:
            ModelError: names or shapes are not those of the model.
        """
        local_state = self._local_state()
        if unmatched := local_state.keys() ^ state.keys():
            raise ModelError(
                f"a state with missing or unexpected names {sorted(unmatched)[:5]}; allowed: the "
                "names of model.state_dict()"
            )
        for name, tensor in local_state.items():
            loaded = state[name]
            if not isinstance(tensor, torch.Tensor) or not isinstance(loaded, torch.Tensor):
                continue
            if loaded.shape != tensor.shape:
                raise ModelError(
                    f"a state with {name} of shape {list(loaded.shape)}; allowed: the model's, "
                    f"{list(tensor.shape)}"
                )
            if name not in self._released_strides:
                tensor.detach().copy_(loaded)

    def sum_gradients(self) -> None:
        """Replace each gradient of a replicated parameter by its sum over the ranks that hold it.
        One that no rank has used has no gradient afterwards.

        Each rank sends its gradients to the others that hold them, and all sum in the order of the
        ranks, so that all get the same bits every time. Between two ranks, the usual case, no
        exchange moves fewer bytes. Exactness: reordered.

        Raises:
            ExchangeError: another rank does not take part.
        """
        group = self._group
        flat_groups: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for parameter, ranks in self.replicated:
            flat_groups.setdefault((ranks, parameter.dtype), []).append(parameter)
        sums, works = [], []
        with collective_errors("the sum of gradients of parameters on several stages"):
            for (ranks, _), parameters in flat_groups.items():
                used = [parameter.grad is not None for parameter in parameters]
                for parameter in parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                gradients = [p.grad for p in parameters if p.grad is not None]
                flags = gradients[0].new_tensor(used)
                local = torch.cat([*(gradient.reshape(-1) for gradient in gradients), flags])
                received = {r: torch.empty_like(local) for r in ranks if r != group.rank}
                works += start_transfer(received, dict.fromkeys(received, local), group.members)
                sums.append((parameters, gradients, [received.get(rank, local) for rank in ranks]))
            for work in works:
                work.wait()
        for parameters, gradients, terms in sums:
            sizes = [gradient.numel() for gradient in gradients]
            *pieces, flags = reduce(torch.add, terms).split([*sizes, len(sizes)])
            used = flags.bool().tolist()
            for parameter, gradient, piece, any_used in zip(
                parameters, gradients, pieces, used, strict=True
            ):
                gradient.copy_(piece.view_as(gradient))
                if not any_used:
                    parameter.grad = None

    def _ranks_of(self, name: str) -> tuple[int, ...]:
        """The ranks that hold what has this name.

        Raises:
            UsageError: nothing had it at the start.
        """
        if name not in self._ranks:
            raise UsageError(
                f"nothing in the model was named {name} at accelerate(), and a pipeline "
                "(parallel.pipeline) knows by names which rank holds what; close() the session "
                "before such a change and accelerate() again after it"
            )
        return self._ranks[name]

    def _local_state(self) -> dict[str, Any]:
        """The state with the parameters themselves: others' have no values to detach."""
        return dict(self._model.state_dict(keep_vars=True))

    def _from_owner(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the owner's tensor, on every rank."""
        if self.is_owner(name):
            values = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if self._group.size > 1:
            with collective_errors(f"the broadcast of {name}"):
                dist.broadcast(values, group=self._group.members, group_src=self._ranks[name][0])
        return values
