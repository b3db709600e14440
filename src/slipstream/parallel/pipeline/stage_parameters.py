"""What each rank of a pipeline holds: the parameters of its stages, and no memory for the others.

Never runs the model. A parameter that is elsewhere stays the same object, of the same shape, with
the memory of one element that is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from slipstream.errors import ModelError
from slipstream.parallel.pipeline.placeholders import placeholder
from slipstream.parallel.pipeline.split_points import Cuts
from slipstream.parallel.pipeline.tied import sum_shared
from slipstream.transport.consistency import collective_errors


class StageParameters:
    """Who holds which parameter of a model that is cut into stages; stage s is on rank s % ranks.

    Args:
        model: whole and equal on every rank.
        cuts: of it.
        group: the ranks of the pipeline; None where there is one.

    Attributes:
        ranks: by name, the ranks of the group that hold a parameter or buffer; the first owns it.
    """

    def __init__(self, model: nn.Module, cuts: Cuts, group: dist.ProcessGroup | None) -> None:
        self._model, self._group = model, group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self._stages = cuts.holders(model)
        self.ranks = {
            name: tuple(sorted({stage % self.size for stage in stages}))
            for name, stages in self._stages.items()
        }
        self._strides: dict[str, tuple[int, ...]] = {}

    @property
    def shared(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Pairs of a parameter that requires a gradient and the ranks that hold it, where these are
        several and this rank is one of them."""
        return [
            (parameter, self.ranks[name])
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and len(self.ranks[name]) > 1 and self.holds(name)
        ]

    def holds(self, name: str) -> bool:
        """Whether this rank holds the parameter or buffer of that name."""
        return self.rank in self.ranks[name]

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """The parameters that a stage uses."""
        return [p for name, p in self._model.named_parameters() if stage in self._stages[name]]

    def release(self) -> None:
        """Free the memory of the parameters that other ranks hold."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        self._strides = {name: p.stride() for name, p in named.items() if not self.holds(name)}
        for name in self._strides:
            named[name].data, named[name].grad = placeholder(named[name].data), None

    def restore(self) -> None:
        """Every rank has the whole model again, from the owners. Collective.

        Raises:
            ExchangeError: another rank does not come.
        """
        own = dict(self._model.named_parameters(remove_duplicate=False))
        for name, strides in self._strides.items():
            data = own[name].data
            own[name].data = torch.empty_strided(
                data.shape, strides, dtype=data.dtype, device=data.device
            )
        self._strides.clear()
        for name, tensor in self._tensors():
            tensor.data.copy_(self._from_owner(name, tensor.data))

    def full_state_dict(self) -> dict[str, object]:
        """``model.state_dict()`` of the whole model, copied, on every rank. Collective.

        Raises:
            ExchangeError: another rank does not come.
        """
        state: dict[str, object] = {}
        for name, value in self._model.state_dict().items():
            travels = isinstance(value, torch.Tensor) and name in self.ranks
            state[name] = self._from_owner(name, value) if travels else value
        return state

    def load_full_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over this rank's part of a whole ``state``; every rank gives the same.

        Raises:
            ModelError: names or shapes are not those of the model.
        """
        own = self._model.state_dict()
        if odd := own.keys() ^ state.keys():
            raise ModelError(
                f"a state with missing or unexpected names {sorted(odd)[:5]}; allowed: the names "
                "of model.state_dict()"
            )
        for name, tensor in own.items():
            given = state[name]
            if not isinstance(tensor, torch.Tensor) or not isinstance(given, torch.Tensor):
                continue
            if given.shape != tensor.shape:
                raise ModelError(
                    f"a state with {name} of shape {list(given.shape)}; allowed: the model's, "
                    f"{list(tensor.shape)}"
                )
            if name not in self._strides:
                tensor.copy_(given)

    def sum_gradients(self) -> None:
        """The gradients of shared parameters become their sums over the ranks that hold them."""
        gradients = []
        for parameter, ranks in self.shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append((parameter.grad, ranks))
        if self._group is not None:
            sum_shared(gradients, self._group)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    def _from_owner(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The owner's tensor, on every rank a copy."""
        owner = self.ranks[name][0]
        if owner == self.rank:
            whole = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if self._group is not None:
            with collective_errors(f"the broadcast of {name}"):
                dist.broadcast(whole, group=self._group, group_src=owner)
        return whole
