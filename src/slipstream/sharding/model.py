"""A model of which every rank updates a share: its optimizer's steps, and its state as a whole.

[Note: One parameter, its share] Parameters stay the user's objects, in the model and in the
optimizer's groups. While the optimizer steps, their ``data`` is this rank's share, a view of the
same memory, and their ``grad`` the share of the average. So the optimizer updates in place, and its
state has the size of the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.gradients.segments import NamedParameter
from slipstream.gradients.shares import Shares, flat
from slipstream.optim.elementwise import COUNTERS
from slipstream.optim.layerwise import Layerwise
from slipstream.parallel.full_state import FullState
from slipstream.precision import HalfWeights
from slipstream.sharding.gather import ParameterGather
from slipstream.strategy import Row
from slipstream.transport.requests import AllGather, AllReduce, Request
from slipstream.transport.transport import Transport


class ShardedModel(FullState):
    """Steps the shares of this rank, and gathers the others' afterwards.

    Args:
        model: whole on every rank.
        optimizer: as ``check_sharded`` accepts it; its state is cut to this rank's shares.
        shares: which values belong to this rank.
        transport: sums norms, gathers states.
        gather: brings the others' shares.
        order: the parameters in the order in which forward needs them, once known.
        half_weights: have the fp32 values of this rank's shares.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        shares: Shares,
        transport: Transport,
        gather: ParameterGather,
        order: Callable[[], Sequence[NamedParameter]],
        half_weights: HalfWeights | None = None,
    ) -> None:
        super().__init__(model, optimizer)
        self._names = shares.names
        self._shares, self._transport, self._gather = shares, transport, gather
        self._order, self._half_weights = order, half_weights
        self._stepping = False
        self._whole: dict[nn.Parameter, torch.Tensor] = {}  # while the optimizer steps
        # TorchScript and compiled code read parameters without a call that could be noticed.
        self._at_once = any(map(_reads_unnoticed, model.modules()))
        self._cut_state()
        if isinstance(optimizer, Layerwise):
            optimizer.sum_squares = self._sum_squares
        eager: Any = torch.compiler.disable
        self._hooks = [
            optimizer.register_step_pre_hook(eager(self._step_begins)),
            optimizer.register_step_post_hook(eager(self._step_ends)),
            optimizer.register_load_state_dict_post_hook(self._cut_state),
        ]

    # The update.

    def _step_begins(self, optimizer: object, args: Any, kwargs: Any) -> None:
        if any(x is not None for x in [*args[1:], *kwargs.values()]):
            raise UsageError(
                "optimizer.step(closure) with gradients.transport sharded: the closure would "
                "compute with shares of the parameters; use transport: direct"
            )
        self.complete()
        self._stepping = True
        for parameter in self._held():
            whole, gradient = parameter.data, None
            if parameter.grad is not None:
                gradient = self._shares.gradients.get(parameter)
            parameter.grad = None
            if parameter not in self._masters:  # whose hook has put the share there already
                self._whole[parameter] = whole
                parameter.data = self._shares.own(whole)
            parameter.grad = gradient

    def _step_ends(self, *_: object) -> None:
        self._restore()
        held = set(self._held())
        self._gather.lay_out([p for p in self._order() if p.parameter in held])
        self._gather.start()
        if self._at_once:
            self._gather.finish()

    def _restore(self) -> None:
        if not self._stepping:
            return
        for parameter in self._held():
            parameter.grad = None
        for parameter, whole in self._whole.items():
            parameter.data = whole
        self._whole.clear()
        self._stepping = False

    @property
    def _masters(self) -> Mapping[nn.Parameter, torch.Tensor]:
        return {} if self._half_weights is None else self._half_weights.masters

    def _held(self) -> Iterator[nn.Parameter]:
        """The optimizer's parameters that are cut."""
        for group in self._optimizer.param_groups:
            yield from (p for p in group["params"] if p in self._names)

    @property
    def _numbered(self) -> list[nn.Parameter]:
        """All parameters of the optimizer, by their numbers in its ``state_dict()``."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _sum_squares(
        self, parameters: Sequence[torch.Tensor], squares: torch.Tensor
    ) -> torch.Tensor:
        """Sum squared norms over ranks, in place; those of whole parameters are all equal."""
        count = self._shares.ranks.count
        squares *= squares.new_tensor([1.0 if p in self._names else 1 / count for p in parameters])
        self._run(AllReduce(squares))
        return squares

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        whole = {p: p.grad for p in self._model.parameters() if p.grad is not None}
        of = {**whole, **self._shares.gradients}
        gradients = list(of.values())
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        squares = torch.stack([torch.linalg.vector_norm(g).double().square() for g in gradients])
        norm = self._sum_squares(list(of), squares).sum().sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return norm

    def _run(self, request: Request) -> None:
        self._gather.finish()  # a thread of it uses the transport until then
        for work in self._transport.start(request):
            work.wait()

    # The state.

    def complete(self) -> None:
        self._restore()  # a step may have raised
        self._gather.finish()

    def full_state_dict(self) -> dict[str, Any]:
        state = super().full_state_dict()
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if parameter in self._masters and parameter in self._names:
                state[name] = self._joined(parameter, self._shares.own(state[name]))
        return state

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        parameters, state = self._numbered, self._optimizer.state_dict()
        joined = {
            number: {
                key: self._joined(parameters[number], value)
                if isinstance(value, torch.Tensor) and parameters[number] in self._names
                else value
                for key, value in values.items()
            }
            for number, values in state["state"].items()
        }
        return {**state, "state": joined}

    def load_full_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)  # a hook cuts it

    def sharded_optimizer_state_dict(self) -> dict[str, Any]:
        ranks = self._shares.ranks
        shapes = {
            number: (tuple(p.shape), tuple(p.stride()))
            for number, p in enumerate(self._numbered)
            if p in self._names
        }
        state = self._optimizer.state_dict()
        return {"rank": ranks.rank, "ranks": ranks.count, "shapes": shapes, "optimizer": state}

    def _joined(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor of which this rank has a share, others as they are; collective."""
        if parameter not in self._names or value.shape != self._shares.own(parameter).shape:
            return value
        length = self._shares.length(parameter)
        rows = value.new_zeros(self._shares.ranks.count, length)
        row = rows[self._shares.ranks.rank]
        row[: value.numel()] = value.view(-1)
        self._run(AllGather(row, rows))
        whole = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        flat(whole).copy_(rows.view(-1)[: whole.numel()])
        return whole

    @torch.no_grad()
    def _cut_state(self, *_: object) -> None:
        """Keep this rank's share of whole states, which a checkpoint or earlier steps have left."""
        for parameter in self._held():
            own = self._shares.own(parameter)
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape == own.shape:
                    continue
                if value.shape == parameter.shape and (value.ndim or key not in COUNTERS):
                    like = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                    state[key] = self._shares.own(like).clone()
                elif value.numel() > 1:
                    raise UsageError(
                        f"the optimizer's {key} of {self._names[parameter]} has shape "
                        f"{tuple(value.shape)}; allowed: {tuple(parameter.shape)}, that of the "
                        f"parameter, or {tuple(own.shape)}, that of this rank's share; states of "
                        "another number of ranks are loaded by "
                        "session.load_sharded_optimizer_state_dict"
                    )

    # The end.

    def close(self) -> None:
        """Complete the parameters, and give every rank the whole state; collective."""
        self._gather.finish()
        if self._half_weights is not None:
            self._half_weights.join(self._joined)
        self._take_off()
        whole = self.full_optimizer_state_dict()["state"]
        for number, parameter in enumerate(self._numbered):
            if number in whole:
                self._optimizer.state[parameter] = whole[number]

    def abandon(self) -> None:
        """After an error the other ranks may not be there to gather anything."""
        self._gather.abandon()
        self._take_off()

    def _take_off(self) -> None:
        self._restore()
        self._gather.close()
        for hook in self._hooks:
            hook.remove()
        if isinstance(self._optimizer, Layerwise):
            self._optimizer.sum_squares = None

    def report_rows(self) -> list[Row]:
        whole = sum(p.nbytes for p in self._names)
        own = sum(self._shares.own(p).nbytes for p in self._names)
        sizes = self._gather.num_bytes
        value = f"{own / 2**20:.1f} of {whole / 2**20:.1f} MB updated here"
        if not sizes:
            return [Row("sharded", value, "gathered after the first update")]
        under = "at the end of step()" if self._at_once else "under the next forward"
        return [Row("sharded", value, f"the rest arrives in {len(sizes)} segments {under}")]


def join_shares(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole optimizer state from the share states of all ranks of a run, in any order.

    Raises:
        UsageError: a rank's state is missing, or there are two of one rank.
    """
    by_rank = {state["rank"]: state for state in states}
    count = states[0]["ranks"] if states else 0
    if sorted(by_rank) != list(range(count)) or len(states) != count or not states:
        raise UsageError(
            f"these are the shares of ranks {sorted(s['rank'] for s in states)}; allowed: those of "
            f"all {count} ranks of the saved run, once each; pass all files that it saved"
        )
    first = by_rank[0]
    state: dict[int, dict[str, Any]] = {}
    for number, values in first["optimizer"]["state"].items():
        every = [by_rank[rank]["optimizer"]["state"][number] for rank in range(count)]
        shape = first["shapes"].get(number)
        join = partial(_join, every, shape)
        state[number] = {key: join(key, value) for key, value in values.items()}
    return {**first["optimizer"], "state": state}


def _join(
    every: Sequence[Mapping[str, Any]], shape: tuple[Any, Any] | None, key: str, value: Any
) -> Any:
    if shape is None or not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    size, stride = shape
    whole = torch.empty_strided(size, stride, dtype=value.dtype)
    flat(whole).copy_(torch.cat([values[key].view(-1) for values in every]))
    return whole


def _reads_unnoticed(module: nn.Module) -> bool:
    scripted = isinstance(module, torch.jit.ScriptModule)
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return scripted or compiled or hasattr(module, "_orig_mod")
