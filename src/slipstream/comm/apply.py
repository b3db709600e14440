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

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from slipstream.comm.collectives import Extreme, Maybe, Move, Receive, Send
from slipstream.comm.graphs import Graph, current
from slipstream.comm.wire import carry
from slipstream.trace.recorder import Recorder
from slipstream.transport.consistency import collective_errors, lost

P = ParamSpec("P")
R = TypeVar("R")


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
        return _run(name, move, x.detach() if x is not None and x.requires_grad else x)
    anchor = after
    if after is None and (x is None or not x.requires_grad):
        anchor = torch.empty(0, requires_grad=True)
    straight = not move.group.check and after is None and move.output is not None
    if straight and (x is None or x.requires_grad):  # a map that takes no tensor ignores the anchor
        return _straight(name, move, anchor if x is None else x)
    call = _Call(name, move)
    try:
        token, y = _Step.apply(anchor, x, call)  # type: ignore[no-untyped-call]
    except RuntimeError:
        if call.begun:
            raise
        token, y = _TransformedStep.apply(anchor, x, call)  # type: ignore[no-untyped-call]
    if move.group.size > 1 and (move.group.check or y is None):
        graph = current()
        call.waiting = weakref.ref(graph), graph.add(token)
    result: Maybe = y
    return result


def _straight(name: str, move: Move, x: Maybe) -> torch.Tensor:
    """Where ranks do not compare notes: no token, as each of them uses what it gets."""
    call = _Call(name, move)
    y: torch.Tensor
    try:
        y = _StraightStep.apply(x, call)  # type: ignore[no-untyped-call]
    except RuntimeError:
        if call.begun:
            raise
        _, y = _TransformedStep.apply(None, x, call)  # type: ignore[no-untyped-call]
    return y


def _run(name: str, move: Move, x: Maybe) -> Maybe:
    recorder = move.group.recorder
    try:
        if recorder is None or not recorder.active or getattr(move, "local", False):
            return move(x)
        return _recorded(recorder, name, move, x)
    except RuntimeError as error:
        raise lost(error, name, "in", move.group) from error


def _recorded(recorder: Recorder, name: str, move: Move, x: Maybe) -> Maybe:
    here = move.output if x is None else x
    assert here is not None
    start = recorder.stamp(here.device)
    y = move(x)
    end = recorder.stamp(here.device)
    moved = max(0 if t is None else t.nbytes for t in (x, y))
    recorder.add(name, start, end, bytes=moved, ranks=move.group.size)
    return y


@dataclass(eq=False, slots=True)
class _Call:
    """One operator, called; ``waiting``: the graph in which it waits for its backward, and as what.

    ``begun`` tells a step that failed from one that torch has refused, see `_TransformedStep`.
    """

    name: str
    move: Move
    begun: bool = False
    waiting: tuple[weakref.ref[Graph], int] | None = None


class _Step(torch.autograd.Function):
    """Of an anchor, this rank's tensor and the call: the token, and this rank's result.

    The anchor makes both require a gradient where this rank's own tensor does not.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Maybe, x: Maybe, call: _Call) -> tuple[torch.Tensor, Maybe]:
        call.begun = True
        output = _TransformedStep.forward(anchor, x, call)
        _TransformedStep.setup_context(ctx, (anchor, x, call), output)
        return output

    @staticmethod
    def backward(ctx: Any, _: Maybe, gradient: Maybe) -> tuple[None, Maybe, None]:
        call: _Call = ctx.call
        if call.waiting is not None:
            graph, number = call.waiting
            if (alive := graph()) is not None:
                alive.discard(number)
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


class _StraightStep(torch.autograd.Function):
    """As `_Step`, from this rank's tensor to its result alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: _Call) -> torch.Tensor:
        call.begun = True
        ctx.call = call
        y = _run(call.name, call.move, x)
        assert y is not None
        if isinstance(call.move, Extreme):
            ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Maybe, None]:
        call: _Call = ctx.call
        wants, name = torch.is_grad_enabled(), f"backward of {call.name}"
        back = apply(name, call.move.adjoint, gradient, wants=wants)
        if isinstance(call.move, Extreme) and back is not None:
            x, y = ctx.saved_tensors
            back = torch.where(x == y, back, 0)
        return back, None


class _TransformedStep(_Step):
    """The same for the transforms of torch.func, which refuse a forward that takes the context.

    Not always used: at every call torch matches the arguments with a signature that it makes anew,
    which takes longer than all the rest.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        anchor: Maybe, x: Maybe, call: _Call
    ) -> tuple[torch.Tensor, Maybe]:
        y = _run(call.name, call.move, x)
        here = x if y is None else y
        assert here is not None
        return torch.empty(0, device=here.device), y

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Maybe, Maybe, _Call], output: tuple[torch.Tensor, Maybe]
    ) -> None:
        _, x, ctx.call = inputs
        token, y = output
        extreme = isinstance(ctx.call.move, Extreme)
        ctx.save_for_backward(*((token, x, y) if extreme else (token,)))
        ctx.set_materialize_grads(False)


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
    with collective_errors(name, "in", group, advice):
        match move:
            case Send():
                carry({move.peer: flags}, {}, group)
            case Receive():
                carry({}, {move.peer: flags}, group)
            case _:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group.members)
    return bool(flags[0]), bool(flags[1])
