"""Ranks exchange what they are about to do, before data moves: operator, dtype, shape, gradients.

Where sizes differ between ranks gloo aborts the process and NCCL hangs. Compared first, a
difference is an error on every rank instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.forward_ad import unpack_dual

from slipstream.comm.groups import Group
from slipstream.comm.wire import SENT_AS_BYTES
from slipstream.errors import CommError, MismatchError
from slipstream.transport.consistency import collective_errors
from slipstream.transport.p2p import gather_all, transfer

MAX_DIMS = 10
MAX_OPTIONS = 4
LENGTH = 6 + MAX_DIMS + MAX_OPTIONS
"""Numbers of an encoded signature, 8 bytes each."""

# Operators and dtypes are encoded by their place in these tuples, the same on every rank.
_REDUCTIONS = (
    "reduce_sum",
    "all_reduce_sum",
    "all_reduce_max",
    "all_reduce_min",
    "all_reduce_mean",
)
_GATHERS = ("broadcast", "gather", "all_gather", "scatter", "reduce_scatter_sum", "all_to_all")
OPERATORS = (*_REDUCTIONS, *_GATHERS, "send", "recv")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *COMPLEX, *_INTEGERS, *SENT_AS_BYTES)


@dataclass(frozen=True, slots=True)
class Signature:
    """One rank's call of an operator.

    Attributes:
        operator: one of ``OPERATORS``.
        dtype: of this rank's tensor; None where it passes no supported tensor.
        shape: of the tensor; empty where there is none.
        requires_grad: whether the tensor requires a gradient, and gradients are enabled.
        grad_enabled: ``torch.is_grad_enabled()``.
        options: the operator's numbers (axes, whether sizes are given), equal on all ranks.
    """

    operator: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    requires_grad: bool
    grad_enabled: bool
    options: tuple[int, ...] = ()

    @classmethod
    def of(cls, operator: str, x: object, options: tuple[int, ...] = ()) -> Signature:
        """The signature of ``operator(x)`` on this rank."""
        enabled = torch.is_grad_enabled()
        if not isinstance(x, torch.Tensor) or not is_supported(x):
            return cls(operator, None, (), False, enabled, options)
        return cls(operator, x.dtype, tuple(x.shape), x.requires_grad and enabled, enabled, options)

    def encode(self) -> list[int]:
        """``LENGTH`` numbers."""
        operator = OPERATORS.index(self.operator)
        dtype = -1 if self.dtype is None else DTYPES.index(self.dtype)
        counts = (len(self.shape), len(self.options))
        flags = (self.requires_grad, self.grad_enabled)
        numbers = [operator, dtype, *flags, *counts, *self.shape, *self.options]
        return numbers + [0] * (LENGTH - len(numbers))

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Signature:
        """The inverse of ``encode``."""
        operator, number, requires_grad, grad_enabled, dims, count, *rest = numbers
        shape, options = tuple(rest[:dims]), tuple(rest[dims : dims + count])
        dtype, flags = None if number < 0 else DTYPES[number], (requires_grad > 0, grad_enabled > 0)
        return cls(OPERATORS[operator], dtype, shape, *flags, options)

    def __str__(self) -> str:
        if self.dtype is None:
            return "no tensor"
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def is_supported(x: torch.Tensor) -> bool:
    """Whether the operators take ``x``: dense, of at most 10 dimensions and a known dtype, and not
    under a transform that they do not know."""
    known = x.dtype in DTYPES and x.layout == torch.strided and x.dim() <= MAX_DIMS
    return known and transform_of(x) is None


def transform_of(x: torch.Tensor) -> str | None:
    """The transform under which ``x`` has parts that a collective would leave out."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._functorch.is_batchedtensor(x):
        return "torch.func.vmap"
    if unpack_dual(x).tangent is not None:
        return "forward-mode differentiation (torch.func.jvp, jacfwd, dual tensors)"
    return None


def check_tensor(operator: str, x: object) -> None:
    """Refuse what is no supported tensor; called once the other ranks have the signature.

    Raises:
        CommError: not a tensor, too many dimensions, or an unsupported dtype or layout.
    """
    if not isinstance(x, torch.Tensor):
        raise CommError(f"{operator} of {type(x).__name__}; allowed: a tensor")
    if (transform := transform_of(x)) is not None:
        raise CommError(
            f"{operator} under {transform}, which would leave the other ranks' part out; allowed: "
            "torch.func.grad and vjp, and an operator on the whole batch"
        )
    if not is_supported(x):
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise CommError(
            f"{operator} of a tensor of {x.dim()} dimensions, {x.dtype}, {x.layout}; allowed: a "
            f"dense one of up to {MAX_DIMS} dimensions, {allowed}"
        )


def exchange_signatures(signature: Signature, group: Group) -> list[Signature]:
    """The signatures of all ranks, in the group's order; one collective.

    Raises:
        MismatchError: the ranks call different operators or pass different options, or gradients
            are enabled on some ranks only.
    """
    operator = signature.operator
    rows = _gather_rows(signature.encode(), group, operator, "in")
    signatures = [Signature.decode(row) for row in rows]
    check_same(signatures, group, "calls", lambda s: s.operator)
    check_same(signatures, group, f"calls {operator} with options", lambda s: s.options)
    if any(s.requires_grad for s in signatures):
        what = f"calls {operator} where gradients flow, with torch.is_grad_enabled()"
        check_same(signatures, group, what, lambda s: s.grad_enabled)
    return signatures


def exchange_sizes(sizes: Sequence[int], group: Group) -> list[list[int]]:
    """The ``sizes`` (one for each rank) of all ranks, in the group's order; one collective."""
    if group.size == 1:
        return [list(sizes)]
    return _gather_rows(sizes, group, "the comparison of sizes in")


def send_signature(signature: Signature, peer: int, group: Group) -> None:
    """Tell ``peer`` (a rank of the group) what this rank is about to send."""
    numbers = torch.tensor(signature.encode(), device=group.device)
    with collective_errors("send to rank", group.ranks[peer]):
        transfer({}, {group.process_group_ranks[peer]: numbers}, group.members)


def receive_signature(peer: int, group: Group) -> Signature:
    """Receive the signature of what ``peer`` (a rank of the group) is about to send."""
    numbers = torch.empty(LENGTH, dtype=torch.int64, device=group.device)
    with collective_errors("recv from rank", group.ranks[peer]):
        transfer({group.process_group_ranks[peer]: numbers}, {}, group.members)
    return Signature.decode(numbers.tolist())


def check_same(
    signatures: Sequence[Signature],
    group: Group,
    what: str,
    value_of: Callable[[Signature], object],
) -> None:
    """Refuse signatures that differ in ``value_of``.

    Raises:
        MismatchError: names two ranks that differ, and how; the same on every rank.
    """
    first = value_of(signatures[0])
    for rank, signature in zip(group.ranks, signatures, strict=True):
        if value_of(signature) != first:
            raise MismatchError(
                f"rank {rank} {what} {value_of(signature)}, rank {group.ranks[0]} {first}; "
                f"allowed: the same on every rank of {group}"
            )


def _gather_rows(numbers: Sequence[int], group: Group, *what: str) -> list[list[int]]:
    """The ``numbers`` of all ranks, in the group's order; ``what`` names them in errors."""
    row = torch.tensor(numbers, dtype=torch.int64, device=group.device)
    gathered = row.new_empty(group.size, row.numel())
    with collective_errors(*what, group):
        gather_all(gathered.view(-1), row, group.members)
    rows: list[list[int]] = gathered.tolist()
    return [rows[rank] for rank in group.process_group_ranks]
