"""A linear map between ranks as a step of autograd, whose backward is the adjoint map.

[Note: Order of backward]
On every rank autograd runs the steps of a graph in the reverse order of their forward: of the steps
that are ready it takes the latest, and whatever leads to an operator that is not ready is later
than it. So ranks that call operators in the same order run their backwards in the same order, as
long as each of them runs on every rank. Two things see to that in a group with ``check``: an
operator's result requires a gradient on all ranks as soon as one rank's tensor does, and
``graphs.backward`` starts from each operator, also from those whose result nobody used. For second
derivatives the backward of an operator is one in turn, and leads to the operator on every rank,
also where its gradient does not depend on anything.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slipstream.comm.agreement import together
from slipstream.comm.graphs import Graph, current
from slipstream.comm.moves import Maybe, Move, Receive, Send
from slipstream.comm.transfer import transfer

_numbers = itertools.count()


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """One operator, called."""

    name: str
    move: Move
    number: int
    graph: weakref.ref[Graph]

    def run(self, x: Maybe) -> Maybe:
        with together(f"{self.name} in {self.move.group}"):
            return self.move(x)


def apply(name: str, move: Move, x: Maybe, *, wants: bool, after: Maybe = None) -> Maybe:
    """Run ``move``, named ``name`` in errors.

    Args:
        name: of the operator.
        move: known to all ranks of its group.
        x: this rank's tensor.
        wants: whether any rank's tensor requires a gradient, so that all take part in backward.
        after: the token of the operator of which this is the backward, see the note.

    Raises:
        ExchangeError: a rank does not come, or is gone.
    """
    graph = current()
    call = _Call(name, move, next(_numbers), weakref.ref(graph))
    if not wants:
        with torch.no_grad():
            return call.run(x)
    anchor = after
    if after is None and (x is None or not x.requires_grad):
        anchor = torch.empty(0, requires_grad=True)
    token: torch.Tensor
    y: Maybe
    token, y = _Step.apply(anchor, x, call)  # type: ignore[no-untyped-call]
    if move.group.size > 1 and (move.group.check or y is None):
        graph.add(call.number, token)
    return y


class _Step(torch.autograd.Function):
    """``anchor`` makes the result require a gradient where this rank's own tensor does not."""

    @staticmethod
    def forward(anchor: Maybe, x: Maybe, call: _Call) -> tuple[torch.Tensor, Maybe]:
        return torch.empty(0), call.run(x)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Maybe, Maybe, _Call], output: tuple[torch.Tensor, Maybe]
    ) -> None:
        ctx.call = inputs[2]
        ctx.save_for_backward(output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, _: Maybe, gradient: Maybe) -> tuple[None, Maybe, None]:
        call: _Call = ctx.call
        graph = call.graph()
        if graph is not None:
            graph.discard(call.number)
        name = f"backward of {call.name}"
        given, wants = _given(name, call.move, gradient)
        if not given:
            return None, None, None
        if gradient is None and call.move.output is not None:
            gradient = call.move.output.zeros()
        (token,) = ctx.saved_tensors
        back = apply(name, call.move.adjoint, gradient, wants=wants, after=token)
        return None, back if ctx.needs_input_grad[1] else None, None


def _given(name: str, move: Move, gradient: Maybe) -> tuple[bool, bool]:
    """Whether any rank has a gradient, and whether any wants that of the gradient in turn.

    In a group without ``check`` all ranks take the same: yes, and where backward is recorded, yes.
    """
    wants = gradient is not None and gradient.requires_grad and torch.is_grad_enabled()
    group = move.group
    if group.size == 1:
        return gradient is not None, wants
    if not group.check:
        return True, torch.is_grad_enabled()
    flags = torch.tensor([gradient is not None, wants], dtype=torch.uint8, device=group.device)
    what = f"{name} in {group} (backward runs on every rank: comm.backward(), with or without loss)"
    with together(what):
        match move:
            case Send():
                transfer({group.places[move.peer]: flags}, {}, group.members)
            case Receive():
                transfer({}, {group.places[move.peer]: flags}, group.members)
            case _:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group.members)
    return bool(flags[0]), bool(flags[1])
