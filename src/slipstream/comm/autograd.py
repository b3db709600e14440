"""Runs a collective as an autograd function whose backward is the adjoint collective.

[Note: Order of backward]
On every rank autograd runs the backwards of a graph in the reverse order of their forwards: of the
nodes that are ready it takes the latest, and whatever leads to an operator that is not ready is
later than it. So ranks that call operators in the same order run their backwards in the same order,
as long as each backward runs on every rank. In a group with ``check`` two things ensure that: an
operator's result requires a gradient on all ranks as soon as one rank's tensor does, and
``graphs.backward`` starts from every operator, including those whose result nobody used. For second
derivatives the backward of an operator is an operator in turn, and is connected to the first one
on every rank, also where its gradient does not depend on anything.

[Note: Token]
An operator's token is a tensor of no elements that leads to it in the graph. It is on the device of
the operator's tensors, since autograd has a thread, and a stream, for each device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from slipstream.comm.collectives import AllReduceOperation, Collective, Receive, Send
from slipstream.comm.graphs import Graph, current
from slipstream.comm.wire import transfer_in_group
from slipstream.errors import UsageError
from slipstream.kernels.surroundings import needs_plain_functions
from slipstream.transport.consistency import collective_errors, lost

P = ParamSpec("P")
R = TypeVar("R")
MaybeTensor = torch.Tensor | None


def graph_break(operator: Callable[P, R]) -> Callable[P, R]:
    """Make ``operator`` a graph break under ``torch.compile``.

    ``torch.compiler.disable`` imports dynamo, which takes seconds: it is called on first need.
    """

    @wraps(operator)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        compiling = torch.compiler.is_compiling()
        function: Callable[P, R] = torch.compiler.disable(operator) if compiling else operator
        return function(*args, **kwargs)

    return call


def apply_with_output(
    name: str, collective: Collective, x: MaybeTensor, *, needs_grad: bool
) -> torch.Tensor:
    """`apply_collective` of one that has a result on every rank."""
    y = apply_collective(name, collective, x, needs_grad=needs_grad)
    assert y is not None
    return y


def apply_collective(
    name: str,
    collective: Collective,
    x: MaybeTensor,
    *,
    needs_grad: bool,
    token: MaybeTensor = None,
) -> MaybeTensor:
    """Run ``collective`` and record it for backward.

    Args:
        name: of the operator, for errors and traces.
        collective: the same on all ranks of its group.
        x: this rank's tensor.
        needs_grad: whether any rank's tensor requires a gradient, so that all take part in
            backward.
        token: of the operator of which this is the backward, see [Note: Order of backward].

    Raises:
        ExchangeError: another rank does not take part, or has ended.
    """
    if not needs_grad:
        return run(name, collective, x.detach() if x is not None and x.requires_grad else x)
    # An input that requires a gradient, so that the result does where this rank's tensor does not.
    if (anchor := token) is None and (x is None or not x.requires_grad):
        anchor = torch.empty(0, requires_grad=True)
    unchecked = not collective.group.check and token is None and collective.output is not None
    call = _Call(name, collective)
    y: MaybeTensor
    try:
        if unchecked and (x is None or x.requires_grad):
            # The collective of a rank without an input ignores the anchor that stands in for it.
            source = anchor if x is None else x
            y = _UncheckedOperator.apply(source, call)  # type: ignore[no-untyped-call]
            return y
        new_token, y = _Operator.apply(anchor, x, call)  # type: ignore[no-untyped-call]
    except RuntimeError:
        if call.started:
            raise
        new_token, y = _FuncOperator.apply(anchor, x, call)  # type: ignore[no-untyped-call]
    waits = y is None
    if collective.group.check:  # but for what a checkpoint computes again, inside of backward
        waits = token is not None or torch._C._current_graph_task_id() == -1
    if collective.group.size > 1 and waits:
        graph = current()
        call.pending = weakref.ref(graph), graph.add(new_token)
    return y


def run(name: str, collective: Collective, x: MaybeTensor) -> MaybeTensor:
    """Run a collective and record its time; nothing for backward.

    Raises:
        ExchangeError: another rank does not take part, or has ended.
        UsageError: a transform that cannot follow it.
    """
    recorder = collective.group.recorder
    try:
        if recorder is None or not recorder.active or getattr(collective, "is_local", False):
            return collective(x)
        tensor = collective.output if x is None else x
        assert tensor is not None
        start = recorder.stamp(tensor.device)
        y = collective(x)
        end = recorder.stamp(tensor.device)
    except RuntimeError as error:
        if needs_plain_functions():
            raise UsageError(
                f"{name} in {collective.group} under a transform of torch.func or torch.jit.trace, "
                "which do not follow an exchange between ranks (torch.func.grad and vjp alone do); "
                f"call the model without it, or load its state into one that is whole ({error})"
            ) from error
        raise lost(error, name, "in", collective.group) from error
    num_bytes = max(0 if t is None else t.nbytes for t in (x, y))
    recorder.add(name, start, end, bytes=num_bytes, ranks=collective.group.size)
    return y


@dataclass(eq=False, slots=True)
class _Call:
    """One call of an operator.

    Attributes:
        started: tells a forward that failed from one that torch refused, see `_FuncOperator`.
        pending: the graph in which the call waits for its backward, and its number there.
    """

    name: str
    collective: Collective
    started: bool = False
    pending: tuple[weakref.ref[Graph], int] | None = None


class _Operator(torch.autograd.Function):
    """From an anchor, this rank's tensor and the call to the token and this rank's result."""

    @staticmethod
    def forward(
        ctx: Any, anchor: MaybeTensor, x: MaybeTensor, call: _Call
    ) -> tuple[torch.Tensor, MaybeTensor]:
        call.started = True
        output = _FuncOperator.forward(anchor, x, call)
        _FuncOperator.setup_context(ctx, (anchor, x, call), output)
        return output

    @staticmethod
    def backward(ctx: Any, _: MaybeTensor, gradient: MaybeTensor) -> tuple[None, MaybeTensor, None]:
        call: _Call = ctx.call
        if call.pending is not None:
            graph_ref, number = call.pending
            if (graph := graph_ref()) is not None:
                graph.discard(number)
        any_gradient, needs_grad = _gradient_flags(call, gradient)
        if not any_gradient:
            return None, None, None
        if gradient is None and call.collective.output is not None:
            gradient = call.collective.output.empty().zero_()
        token, *values = ctx.saved_tensors
        x_grad = _apply_adjoint(call, gradient, values, needs_grad=needs_grad, token=token)
        return None, x_grad if ctx.needs_input_grad[1] else None, None


class _UncheckedOperator(torch.autograd.Function):
    """An `_Operator` without a token, for groups without ``check``: each rank uses its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: _Call) -> torch.Tensor:
        call.started = True
        ctx.call = call
        y = run(call.name, call.collective, x)
        assert y is not None
        if _is_extreme(call):
            ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[MaybeTensor, None]:
        needs_grad = torch.is_grad_enabled()
        return _apply_adjoint(ctx.call, gradient, ctx.saved_tensors, needs_grad=needs_grad), None


class _FuncOperator(_Operator):
    """`_Operator` for the transforms of torch.func, which refuse a forward that takes the context.

    Used only where torch refused the other one: with ``setup_context`` torch builds a signature and
    binds the arguments at every call, which takes longer than all the rest.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        anchor: MaybeTensor, x: MaybeTensor, call: _Call
    ) -> tuple[torch.Tensor, MaybeTensor]:
        y = run(call.name, call.collective, x)
        tensor = x if y is None else y
        assert tensor is not None
        return torch.empty(0, device=tensor.device), y

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[MaybeTensor, MaybeTensor, _Call],
        output: tuple[torch.Tensor, MaybeTensor],
    ) -> None:
        _, x, ctx.call = inputs
        token, y = output
        ctx.save_for_backward(*((token, x, y) if _is_extreme(ctx.call) else (token,)))
        ctx.set_materialize_grads(False)


def _is_extreme(call: _Call) -> bool:
    return isinstance(call.collective, AllReduceOperation) and call.collective.is_extreme


def _apply_adjoint(
    call: _Call,
    gradient: MaybeTensor,
    values: Sequence[torch.Tensor],
    *,
    needs_grad: bool,
    token: MaybeTensor = None,
) -> MaybeTensor:
    """The gradient of the input; ``values``: of a minimum or maximum, its input and its result."""
    name, adjoint = f"backward of {call.name}", call.collective.adjoint
    x_grad = apply_collective(name, adjoint, gradient, needs_grad=needs_grad, token=token)
    if values and x_grad is not None:
        x, y = values
        x_grad = torch.where(x == y, x_grad, 0)
    return x_grad


def _gradient_flags(call: _Call, gradient: MaybeTensor) -> tuple[bool, bool]:
    """Whether any rank has a gradient, and whether any needs a second derivative.

    Without ``check`` all ranks assume a gradient, and a second derivative if backward is recorded.
    """
    collective, group = call.collective, call.collective.group
    if not group.check and group.size > 1:
        return True, torch.is_grad_enabled()
    needs_grad = gradient is not None and gradient.requires_grad and torch.is_grad_enabled()
    if group.size == 1:
        return gradient is not None, needs_grad
    flags = torch.tensor([gradient is not None, needs_grad], dtype=torch.uint8, device=group.device)
    advice = "(backward runs on every rank: comm.backward(), with or without loss)"
    with collective_errors(f"backward of {call.name}", "in", group, advice):
        if isinstance(collective, Send):
            transfer_in_group({collective.peer: flags}, {}, group)
        elif isinstance(collective, Receive):
            transfer_in_group({}, {collective.peer: flags}, group)
        else:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group.members)
    return bool(flags[0]), bool(flags[1])
