"""A model of which every rank updates a shard: its optimizer's steps, and its state as a whole.

[Note: One parameter, its shard] Parameters stay the user's objects, in the model and in the
optimizer's groups. While the optimizer steps, their ``data`` is this rank's shard, a view of the
same memory, and their ``grad`` the shard of the average. So the optimizer updates in place, and its
state has the size of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.errors import MismatchError, UsageError
from slipstream.gradients.report_rows import megabytes
from slipstream.gradients.segments import NamedParameter
from slipstream.gradients.shards import Shards
from slipstream.optim.layerwise import Layerwise
from slipstream.optim.nested_step import closure_of
from slipstream.optim.shard_state import is_part
from slipstream.parallel.whole_model import WholeModel
from slipstream.plain_copy import attach
from slipstream.precision import HalfWeights
from slipstream.sharding.gather import ParameterGather
from slipstream.sharding.state import OptimizerState
from slipstream.sharding.step_hooks import InnerHooks
from slipstream.sharding.unfinished import refuse_unfinished
from slipstream.strategy import Row
from slipstream.transport.requests import AllGather, AllReduce, Request
from slipstream.transport.transport import Transport


class ShardedModel(WholeModel):
    """Steps the shards of this rank, and gathers the others' afterwards.

    Args:
        model: whole on every rank.
        optimizer: as ``check_sharded`` accepts it; its state is cut to this rank's shards.
        shards: which values belong to this rank.
        transport: sums norms, gathers states.
        gather: brings the others' shards.
        order: the parameters in the order in which forward needs them, once known.
        meet: sums a number over ranks, all of which must have called the same verb; see
            ``transport.consistency.meet``.
        half_weights: have the fp32 values of this rank's shards.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        shards: Shards,
        transport: Transport,
        gather: ParameterGather,
        order: Callable[[], Sequence[NamedParameter]],
        meet: Callable[[str, float], float],
        half_weights: HalfWeights | None = None,
    ) -> None:
        super().__init__(model, optimizer)
        self._names = shards.names
        self._shards, self._transport, self._gather = shards, transport, gather
        self._order, self._meet, self._half_weights = order, meet, half_weights
        self._stepping = False
        # While the optimizer steps, the whole parameter and its shard.
        self._whole: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
        # Others read parameters without a call that could be noticed.
        self._at_once = any(map(_reads_unnoticed, model.modules())) or _shares_memory(model)
        self._state = OptimizerState(optimizer, shards, self._gather_rows)
        for parameter in self._names:
            shards.own_of(parameter)  # the form in which the state is cut
        if isinstance(optimizer, Layerwise):
            optimizer.sum_squares = self._sum_squares
        self._hooks = InnerHooks(optimizer, self._step_begins, self._step_ends)
        self._hooks.arrange()
        self._leave = attach(model.register_forward_pre_hook, _Entrance(gather.finish))
        # Ahead of those of half weights, which exchange the data of parameters meanwhile.
        self._load = optimizer.register_load_state_dict_pre_hook(self._load_begins, prepend=True)

    # The update.

    def _step_begins(self, optimizer: object, args: Any, kwargs: Any) -> None:
        if closure_of(args, kwargs) is not None:
            raise UsageError(
                "optimizer.step(closure) with gradients.transport sharded: the closure would "
                "compute with shards of the parameters; use transport: direct"
            )
        self._hooks.check()
        self._catch_up()
        if not self._state.is_cut:
            self._state.cut()
        self._shards.adopt()
        # All that may refuse comes before the first change.
        own = {p: self._shards.own_of(p) for p in self._state.held if p not in self._masters}
        self._stepping = True
        for parameter in self._state.held:
            parameter.grad = None
            if parameter in own:  # else the hook of half weights has put the shard there already
                self._whole[parameter] = parameter.data, own[parameter]
                parameter.data = own[parameter]
            parameter.grad = self._shards.gradients.get(parameter)

    def _step_ends(self, *_: object) -> None:
        self._restore()
        if not self._state.is_cut:
            self._state.cut()
        held = set(self._state.held)
        self._gather.lay_out([p for p in self._order() if p.parameter in held])
        self._gather.start()
        if self._at_once:
            self._gather.finish()

    def _restore(self) -> None:
        """Make parameters whole again; their gradients are guarded as before the step."""
        if not self._stepping:
            return
        for parameter in self._state.held:
            parameter.grad = None
        for parameter, (whole, own) in self._whole.items():
            stepped, parameter.data = parameter.data, whole
            if stepped.data_ptr() != own.data_ptr():  # the class has set ``data``
                parameter.data = whole.clone()  # it may have kept the former
                self._shards.own_of(parameter).copy_(stepped)
        self._whole.clear()
        self._stepping = False
        self._shards.guard()

    @property
    def _masters(self) -> Mapping[nn.Parameter, torch.Tensor]:
        return {} if self._half_weights is None else self._half_weights.masters

    def _sum_squares(
        self, parameters: Sequence[torch.Tensor], squares: torch.Tensor
    ) -> torch.Tensor:
        """Sum squared norms over ranks, in place; those of whole parameters are all equal."""
        squares *= _parts(parameters, self._names, self._shards.ranks.count).to(squares)
        self._run(AllReduce(squares))
        return squares

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip as torch does, by the norm over the shards of all ranks.

        Raises:
            UsageError: the gradients are not averages yet.
            MismatchError: other ranks have called something else.
        """
        having = [p for p in self._model.parameters() if p.grad is not None]
        if having and not self._shards.delivered:
            raise UsageError(
                "session.clip_grad_norm_() of gradients that are not averages yet; call it after "
                "the session.backward() that an update follows, before session.step()"
            )
        self._shards.adopt()
        self._shards.guard()
        of = {p: p.grad for p in having if p.grad is not None} | self._shards.gradients
        gradients, total = list(of.values()), 0.0
        if gradients:
            each = [torch.linalg.vector_norm(g).double().square() for g in gradients]
            count = self._shards.ranks.count
            total = float(torch.stack(each) @ _parts(of, self._names, count).to(each[0].device))
        total = self._meet("session.clip_grad_norm_", total)
        norm = torch.tensor(total, dtype=torch.float64).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return norm

    def _run(self, request: Request) -> None:
        self._gather.finish()  # a thread of it uses the transport until then
        for work in self._transport.start(request):
            work.wait()

    @property
    def waited(self) -> float:
        """Seconds for which forward has waited for parameters, so far."""
        return self._gather.waited

    def _gather_rows(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        self._run(AllGather(row, rows))

    # The state.

    def complete(self) -> None:
        """Return when all parameters hold their newest values, between two steps.

        A step that raised sends what it has left all the same: so messages of ranks stay paired,
        and the ranks equal, also where it raised on some alone.
        """
        self._hooks.arrange()
        self._catch_up()

    def _catch_up(self) -> None:
        if self._stepping:
            self._restore()
            layerwise = isinstance(self._optimizer, Layerwise)  # whose ranks wait inside the step
            if self._half_weights is None and not layerwise:
                self._step_ends()
        self._gather.finish()

    def full_state_dict(self) -> dict[str, Any]:
        if self._masters:
            self._meet("session.checkpoint", 0.0)
        state = super().full_state_dict()
        whole = {
            p: self._state.joined(p, self._shards.own(state[name]))
            for name, p in self._model.named_parameters()
            if p in self._masters and p in self._names
        }
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if parameter in whole:
                state[name] = whole[parameter]
        return state

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        self._meet_to_gather("session.checkpoint")
        return self._state.whole()

    def _meet_to_gather(self, verb: str) -> None:
        """Refuse to gather the optimizer's state where ranks would wait for one another.

        Raises:
            MismatchError: they have other numbers of tensors to gather; on every rank alike.
        """
        count, ranks = self._state.num_cut, self._shards.ranks.count
        same = self._meet(verb, count) == ranks * count
        if self._meet(verb, same) != ranks:
            raise MismatchError(
                f"{verb}() with gradients.transport sharded: {count} tensors of the optimizer's "
                "state have the shape of this rank's shards, on other ranks more or fewer; "
                "allowed: states of the shape of their parameter, also of one without values, and "
                "numbers, as torch.zeros(())"
            )

    def _load_begins(self, *_: object) -> None:
        self._gather.finish()

    def load_full_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        is_part(state)
        self._optimizer.load_state_dict(state)  # a hook cuts it

    def sharded_optimizer_state_dict(self) -> dict[str, Any]:
        return self._state.part_with_shapes()

    # The end.

    def close(self) -> None:
        """Complete the parameters, and give every rank the whole state; collective."""
        self._meet_to_gather("session.close")
        self._gather.finish()
        if self._half_weights is not None:
            self._half_weights.join(self._state.joined)
        whole = self._state.whole()["state"]
        self._take_off()
        self._state.close(whole)

    def abandon(self) -> None:
        """Gather nothing after an error: the other ranks may not be there."""
        missing = self._gather.abandon()
        self._take_off()
        self._state.abandon()
        if missing:
            refuse_unfinished(self._model, missing)

    def _take_off(self) -> None:
        self._restore()
        self._gather.close()
        self._hooks.remove()
        self._leave()
        self._load.remove()
        if isinstance(self._optimizer, Layerwise):
            self._optimizer.sum_squares = None

    def report_rows(self) -> list[Row]:
        whole = sum(p.nbytes for p in self._names)
        own = sum(self._shards.shape(p).numel() * p.element_size() for p in self._names)
        sizes = self._gather.num_bytes
        value = f"{megabytes(own)} of {megabytes(whole)} MB updated here"
        if not sizes:
            return [Row("sharded", value, "gathered after the first update")]
        under = "at the end of step()" if self._at_once else "under the next forward"
        return [Row("sharded", value, f"the rest arrives in {len(sizes)} segments {under}")]


class _Entrance:
    """Waits for all parameters at once before a forward of the model that no update follows.

    ``torch.jit.trace`` compares two traces, which must not differ by where a parameter was waited
    for; without gradients some modules take a faster path for parameters of the plain class.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self, *_: object) -> None:
        jit: Any = torch.jit
        if torch.compiler.is_compiling():
            return
        if jit.is_tracing() or not torch.is_grad_enabled():
            self._finish()


def _parts(
    parameters: Iterable[torch.Tensor], cut: Container[torch.Tensor], count: int
) -> torch.Tensor:
    """Count each parameter's part in the square of a norm: whole ones are on every rank."""
    return torch.tensor([1.0 if p in cut else 1 / count for p in parameters], dtype=torch.float64)


def _reads_unnoticed(module: nn.Module) -> bool:
    """TorchScript and compiled code."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return scripted or compiled or hasattr(module, "_orig_mod")


def _shares_memory(model: nn.Module) -> bool:
    """Whether some memory of a parameter is that of another tensor, too, known to the model or as
    part of a larger one."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    parts = any(p.untyped_storage().nbytes() > p.nbytes for p in model.parameters())
    return parts or len(set(storages)) < len(storages)
