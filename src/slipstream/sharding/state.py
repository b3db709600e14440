"""The optimizer's state: this rank's shard while a session is open, and the whole for a file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.gradients.shards import Shards, flat
from slipstream.optim.elementwise import COUNTERS
from slipstream.optim.shard_state import MARK, ShardState, is_part, refuse_part, saving


class OptimizerState:
    """Cuts the state of an optimizer to this rank's shards, and joins it again.

    Args:
        optimizer: its state becomes a `ShardState`, which nobody else can save.
        shards: which values belong to this rank.
        gather: fills the rows of all ranks from this rank's; a collective.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Shards,
        gather: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._optimizer, self._shards, self._gather = optimizer, shards, gather
        self._loads_part = False
        left = optimizer.state  # by a session that ended with an error, maybe
        if isinstance(left, ShardState):
            self._loads_part = is_part({MARK: left.mark}, self._mark)
        self.cut()
        self._hooks = [
            optimizer.register_load_state_dict_pre_hook(self._load),
            optimizer.register_load_state_dict_post_hook(self.cut),
        ]
        self._refusal = optimizer.register_state_dict_pre_hook(refuse_part)

    @property
    def _mark(self) -> Mapping[str, int]:
        return {"rank": self._shards.ranks.rank, "ranks": self._shards.ranks.count}

    @property
    def held(self) -> Iterator[nn.Parameter]:
        """The optimizer's parameters that are cut."""
        for group in self._optimizer.param_groups:
            yield from (p for p in group["params"] if p in self._shards.names)

    @property
    def _numbered(self) -> list[nn.Parameter]:
        """All parameters of the optimizer, by their numbers in its ``state_dict()``."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def is_cut(self) -> bool:
        """Whether all that the optimizer has is this rank's: nobody has replaced it."""
        return isinstance(self._optimizer.state, ShardState)

    def part(self) -> dict[str, Any]:
        """This rank's part, which says so."""
        with saving(self._optimizer):
            return {**self._optimizer.state_dict(), MARK: dict(self._mark)}

    def part_with_shapes(self) -> dict[str, Any]:
        """This rank's part, and what `join_shards` needs to know."""
        shapes = {
            number: (tuple(p.shape), tuple(p.stride()))
            for number, p in enumerate(self._numbered)
            if p in self._shards.names
        }
        return {**self._mark, "shapes": shapes, "optimizer": self.part()}

    def whole(self) -> dict[str, Any]:
        """``optimizer.state_dict()`` with whole tensors; a collective."""
        parameters, state = self._numbered, self.part()
        del state[MARK]
        numbers = self._numbers(self._shards.shape)
        joined = {
            number: {
                key: self.joined(parameters[number], value)
                if isinstance(value, torch.Tensor) and not _counts(key, value, numbers)
                else value
                for key, value in values.items()
            }
            for number, values in state["state"].items()
            if isinstance(number, int)  # others are of no parameter
        }
        return {**state, "state": state["state"] | joined}

    @property
    def num_cut(self) -> int:
        """Count the tensors that `whole` gathers: as many on every rank, or ranks wait for ever."""
        numbers = self._numbers(self._shards.shape)
        return sum(
            isinstance(value, torch.Tensor)
            and value.shape == self._shards.shape(parameter)
            and not _counts(key, value, numbers)
            for parameter in self.held
            for key, value in self._optimizer.state.get(parameter, {}).items()
        )

    def _numbers(self, shape_of: Callable[[torch.Tensor], torch.Size]) -> set[str]:
        """Find the states that are a number for a whole parameter. A parameter, or a shard, of one
        value looks alike, so others tell."""
        return {
            key
            for parameter in self.held
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
            and value.numel() == 1
            and value.shape != shape_of(parameter)
        }

    def joined(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor of which this rank has a shard, others as they are; collective."""
        if parameter not in self._shards.names or value.shape != self._shards.shape(parameter):
            return value
        ranks = self._shards.ranks
        rows = value.new_zeros(ranks.count, self._shards.length(parameter))
        row = rows[ranks.rank]
        row[: value.numel()] = value.view(-1)
        self._gather(row, rows)
        whole = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        flat(whole).copy_(rows.view(-1)[: whole.numel()])
        return whole

    def _load(self, optimizer: object, state: dict[str, Any]) -> None:
        """Refuse what does not fit before torch loads it."""
        parts = is_part(state, self._mark)
        groups = self._optimizer.param_groups, state["param_groups"]
        if len({tuple(len(group["params"]) for group in given) for given in groups}) > 1:
            return  # of an optimizer of other parameters: torch refuses it, and says so
        for number, parameter in enumerate(self._numbered):
            for key, value in state["state"].get(number, {}).items():
                self._is_cut_from(parameter, key, value, parts)
        self._loads_part = parts

    @torch.no_grad()
    def cut(self, *_: object) -> None:
        """Keep this rank's shard of whole states, which a checkpoint or earlier steps have left.

        Raises:
            UsageError: a state has neither the shape of its parameter nor that of its shard.
        """
        parts, self._loads_part = self._loads_part, False
        numbers = self._numbers(self._shards.size)
        for parameter in self.held:
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                is_cut = self._is_cut_from(parameter, key, value, parts)
                if is_cut and not parts and not _counts(key, value, numbers):
                    state[key] = self._shard(parameter, value)
        self._optimizer.state = ShardState(**self._mark, state=self._optimizer.state)

    def _is_cut_from(self, parameter: nn.Parameter, key: str, value: Any, parts: bool) -> bool:
        """Whether ``value`` has a number for each of the parameter's, or of its shard's."""
        if parameter not in self._shards.names or not isinstance(value, torch.Tensor):
            return False
        if value.ndim == 0 and key in COUNTERS:
            return False
        allowed = self._shards.shape(parameter) if parts else self._shards.size(parameter)
        if value.shape != allowed and value.numel() > 1:
            raise UsageError(
                f"the optimizer's {key} of {self._shards.names[parameter]} has shape "
                f"{tuple(value.shape)}; allowed: {tuple(allowed)}: the state is of an optimizer of "
                "other parameters, or of these in another order; states of single ranks, of any "
                "number of them, are loaded by session.restore(states)"
            )
        return value.shape == allowed

    def _shard(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        like = torch.empty_like(parameter, dtype=whole.dtype).copy_(whole)  # in memory, too
        return self._shards.own(like).clone()

    def close(self, whole: Mapping[int, dict[str, Any]]) -> None:
        """Give the optimizer the whole state again."""
        self.abandon()
        self._refusal.remove()
        state = defaultdict(dict, self._optimizer.state)
        for number, parameter in enumerate(self._numbered):
            if number in whole:
                state[parameter] = whole[number]
        self._optimizer.state = state

    def abandon(self) -> None:
        """Leave this rank's part, which is still refused where it is saved or copied."""
        for hook in self._hooks:
            hook.remove()


def _counts(key: str, value: torch.Tensor, numbers: Container[str]) -> bool:
    """Whether ``value`` is a number for a whole parameter, as ``numbers`` says of others."""
    return value.numel() == 1 and key in numbers


def join_shards(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole optimizer state from the shard states of all ranks of a run, in any order.

    Raises:
        UsageError: a rank's state is missing, or there are two of one rank.
    """
    by_rank = {state["rank"]: state for state in states}
    count = states[0]["ranks"] if states else 0
    if sorted(by_rank) != list(range(count)) or len(states) != count or not states:
        raise UsageError(
            f"these are the shards of ranks {sorted(s['rank'] for s in states)}; allowed: those of "
            f"all {count} ranks of the saved run, once each; pass all files that it saved"
        )
    first = by_rank[0]
    state: dict[Any, Any] = {}
    for number, values in first["optimizer"]["state"].items():
        if not isinstance(number, int):  # of no parameter
            state[number] = values
            continue
        every = [by_rank[rank]["optimizer"]["state"].get(number, {}) for rank in range(count)]
        shape = first["shapes"].get(number)
        join = partial(_join, every, shape)
        state[number] = {key: join(key, value) for key, value in values.items()}
    others = {key: value for key, value in first["optimizer"].items() if key != MARK}
    return {**others, "state": state}


def _join(
    every: Sequence[Mapping[str, Any]], shape: tuple[Any, Any] | None, key: str, value: Any
) -> Any:
    if shape is None or not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    size, stride = shape
    parts = [part for values in every if isinstance(part := values.get(key), torch.Tensor)]
    found = sum(part.numel() for part in parts)
    fits = len(parts) == len(every) and all(part.dtype == value.dtype for part in parts)
    if fits and found == len(parts) != prod(size) and all(part.numel() == 1 for part in parts):
        return value  # a number for the whole parameter
    if found != prod(size) or not fits:
        raise UsageError(
            f"the ranks' shards of the optimizer's {key} have {found} numbers, its "
            f"parameter {prod(size)}; pass the files that all ranks saved together"
        )
    whole = torch.empty_strided(size, stride, dtype=value.dtype)
    flat(whole).copy_(torch.cat([part.reshape(-1) for part in parts]))
    return whole
