"""A map between ranks as a step of autograd, whose backward is the adjoint map.

[Note: Order of backward]
On every rank autograd runs the steps of a graph in the reverse order of their forward: of the steps
that are ready it takes the latest, and whatever leads to an operator that is not ready is later
than it. So ranks that call operators in the same order run their backwards in the same order, as
long as each of them runs on every rank. Two things see to that in a group with ``check``: an
operator's result requires a gradient on all ranks as soon as one rank's tensor does, and
``graphs.backward`` starts from each operator, also from those whose result nobody used. For second
derivatives the backward of an operator is one in turn, and leads to the operator on every rank,
also where its gradient does not depend on anything.

[Note: The token] of an operator is a tensor of no elements that leads to it. It lies where the
operator's tensors are: autograd has a thread, and a stream, for each device.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from slipstream.comm.agreement import together
from slipstream.comm.graphs import Graph, current
from slipstream.comm.moves import Extreme, Maybe, Move, Receive, Send
from slipstream.comm.wire import carry

P = ParamSpec("P")
R = TypeVar("R")

_numbers = itertools.count()


def eager(operator: Callable[P, R]) -> Callable[P, R]:
    """Under ``torch.compile`` the graph breaks here; its machinery is loaded only then."""

    @wraps(operator)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            aside: Callable[P, R] = torch.compiler.disable(operator)
            return aside(*args, **kwargs)
        return operator(*args, **kwargs)

    return call


def everywhere(name: str, move: Move, x: Maybe, *, wants: bool) -> torch.Tensor:
    """`apply` of a map that has a result on every rank."""
    y = apply(name, move, x, wants=wants)
    assert y is not None
    return y


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
    if not wants:
        with torch.no_grad():
            return _run(name, move, x)
    graph = current()
    call = _Call(name, move, next(_numbers), weakref.ref(graph))
    anchor = after
    if after is None and (x is None or not x.requires_grad):
        anchor = torch.empty(0, requires_grad=True)
    token: torch.Tensor
    y: Maybe
    token, y = _Step.apply(anchor, x, call)  # type: ignore[no-untyped-call]
    if move.group.size > 1 and (move.group.check or y is None):
        graph.add(call.number, token)
    return y


def _run(name: str, move: Move, x: Maybe) -> Maybe:
    group, recorder = move.group, move.group.recorder
    with together(name, "in", group):
        if recorder is None or not recorder.active:
            return move(x)
        here = move.output if x is None else x
        assert here is not None
        start = recorder.stamp(here.device)
        y = move(x)
        end = recorder.stamp(here.device)
        moved = max(0 if t is None else t.nbytes for t in (x, y))
        recorder.add(name, start, end, bytes=moved, ranks=group.size)
        return y


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """One operator, called."""

    name: str
    move: Move
    number: int
    graph: weakref.ref[Graph]


class _Step(torch.autograd.Function):
    """Of an anchor, this rank's tensor and the call: the token, and this rank's result.

    The anchor makes both require a gradient where this rank's own tensor does not.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, Maybe]:
        _, x, call = inputs
        y = _run(call.name, call.move, x)
        return torch.empty(0, device=(x if y is None else y).device), y

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Maybe]
    ) -> None:
        _, x, ctx.call = inputs
        token, y = output
        extreme = isinstance(ctx.call.move, Extreme)
        ctx.save_for_backward(*((token, x, y) if extreme else (token,)))
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
        token, *values = ctx.saved_tensors
        back = apply(name, call.move.adjoint, gradient, wants=wants, after=token)
        if back is None or not ctx.needs_input_grad[1]:
            return None, None, None
        if values:
            x, y = values
            back = torch.where(x == y, back, 0)
        return None, back, None


# torch asks at every call for the signature of a forward: made once, that takes 2 instead of 25 us.
_Step.forward.__signature__ = inspect.signature(_Step.forward)  # type: ignore[attr-defined]


def _given(name: str, move: Move, gradient: Maybe) -> tuple[bool, bool]:
    """Whether any rank has a gradient, and whether any wants that of the gradient in turn.

    In a group without ``check`` all ranks take the same: yes, and where backward is recorded, yes.
    """
    group = move.group
    if not group.check and group.size > 1:
        return True, torch.is_grad_enabled()
    wants = gradient is not None and gradient.requires_grad and torch.is_grad_enabled()
    if group.size == 1:
        return gradient is not None, wants
    flags = torch.tensor([gradient is not None, wants], dtype=torch.uint8, device=group.device)
    advice = "(backward runs on every rank: comm.backward(), with or without loss)"
    with together(name, "in", group, advice):
        match move:
            case Send():
                carry({move.peer: flags}, {}, group)
            case Receive():
                carry({}, {move.peer: flags}, group)
            case _:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group.members)
    return bool(flags[0]), bool(flags[1])
