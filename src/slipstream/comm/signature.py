"""What ranks tell each other before data moves: operator, dtype, shape, whether gradients flow.

gloo aborts the process where sizes differ between ranks, and NCCL hangs; after this they are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slipstream.comm.groups import Group
from slipstream.errors import CommError, MismatchError
from slipstream.transport.consistency import collective_errors
from slipstream.transport.p2p import gather_all, transfer

MAX_DIMS = 10
LENGTH = 6 + MAX_DIMS + 4
"""Numbers of a header, 8 bytes each."""

OPERATORS = (
    "broadcast",
    "reduce_sum",
    "all_reduce_sum",
    "all_reduce_max",
    "all_reduce_min",
    "all_reduce_mean",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter_sum",
    "all_to_all",
    "send",
    "recv",
)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


@dataclass(frozen=True, slots=True)
class Signature:
    """What one rank is about to do.

    ``dtype`` and ``shape`` are None where it brings no tensor. ``wants``: its tensor requires a
    gradient; ``records``: gradients are recorded here at all. ``options`` are the operator's own
    numbers (axes, whether sizes are given), which must be equal on all ranks.
    """

    operator: str
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    wants: bool
    records: bool
    options: tuple[int, ...] = ()

    @classmethod
    def of(cls, operator: str, x: object, options: tuple[int, ...] = ()) -> Signature:
        """The header of this rank, which calls ``operator(x)``."""
        records = torch.is_grad_enabled()
        if not isinstance(x, torch.Tensor) or not travels(x):
            return cls(operator, None, None, False, records, options)
        return cls(operator, x.dtype, tuple(x.shape), x.requires_grad and records, records, options)

    def numbers(self) -> list[int]:
        """As numbers, for the wire."""
        shape = self.shape or ()
        padding = [0] * (MAX_DIMS - len(shape))
        options = [*self.options, *[0] * (4 - len(self.options))]
        return [
            OPERATORS.index(self.operator),
            -1 if self.dtype is None else DTYPES.index(self.dtype),
            -1 if self.shape is None else len(shape),
            self.wants,
            self.records,
            len(self.options),
            *shape,
            *padding,
            *options,
        ]

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Signature:
        """The inverse of ``numbers``."""
        operator, dtype, dims, wants, records, count, *rest = numbers
        return cls(
            OPERATORS[operator],
            None if dtype < 0 else DTYPES[dtype],
            None if dims < 0 else tuple(rest[:dims]),
            bool(wants),
            bool(records),
            tuple(rest[MAX_DIMS : MAX_DIMS + count]),
        )

    def __str__(self) -> str:
        if self.dtype is None:
            return "no tensor"
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape or ())}"


def travels(x: torch.Tensor) -> bool:
    """Whether a header can describe ``x``."""
    return x.dtype in DTYPES and x.layout == torch.strided and x.dim() <= MAX_DIMS


def check_tensor(operator: str, x: object) -> None:
    """Refuse what does not travel; after the header has told the others.

    Raises:
        CommError: no tensor, too many dimensions, or a dtype or layout that does not travel.
    """
    if not isinstance(x, torch.Tensor):
        raise CommError(f"{operator} of {type(x).__name__}; allowed: a tensor")
    if not travels(x):
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise CommError(
            f"{operator} of a tensor of {x.dim()} dimensions, {x.dtype}, {x.layout}; allowed: a "
            f"dense one of up to {MAX_DIMS} dimensions, {allowed}"
        )


def exchange_signatures(own: Signature, group: Group) -> list[Signature]:
    """The headers of all members, in the group's order; one collective.

    Raises:
        MismatchError: the members call different operators, with different options, or only some
            record gradients.
    """
    mine = torch.tensor(own.numbers(), device=group.device)
    every = mine.new_empty(group.size, LENGTH)
    with collective_errors(own.operator, "in", group):
        gather_all(every.view(-1), mine, group.members)
    rows = every.tolist()
    headers = [Signature.read(rows[place]) for place in group.places]
    same(headers, group, "calls", lambda h: h.operator)
    same(headers, group, f"calls {own.operator} with options", lambda h: h.options)
    if any(h.wants for h in headers):
        what = f"calls {own.operator} where gradients flow, with torch.is_grad_enabled()"
        same(headers, group, what, lambda h: h.records)
    return headers


def send_header(own: Signature, peer: int, group: Group) -> None:
    """Tell ``peer`` (a rank of the group) what comes."""
    mine = torch.tensor(own.numbers(), device=group.device)
    with collective_errors("send to rank", group.ranks[peer]):
        transfer({}, {group.places[peer]: mine}, group.members)


def receive_header(peer: int, group: Group) -> Signature:
    """What ``peer`` (a rank of the group) is about to send."""
    theirs = torch.empty(LENGTH, dtype=torch.int64, device=group.device)
    with collective_errors("recv from rank", group.ranks[peer]):
        transfer({group.places[peer]: theirs}, {}, group.members)
    return Signature.read(theirs.tolist())


def same(
    headers: Sequence[Signature], group: Group, what: str, of: Callable[[Signature], object]
) -> None:
    """Refuse headers that differ in ``of``.

    Raises:
        MismatchError: names two ranks that differ, and how; the same on every rank.
    """
    first = of(headers[0])
    for rank, header in zip(group.ranks, headers, strict=True):
        if of(header) != first:
            raise MismatchError(
                f"rank {rank} {what} {of(header)}, rank {group.ranks[0]} {first}; allowed: the "
                f"same on every rank of {group}"
            )


def consult_sizes(sizes: Sequence[int], group: Group) -> list[list[int]]:
    """The ``sizes`` (one for each member) of all members, in the group's order; one collective."""
    if group.size == 1:
        return [list(sizes)]
    mine = torch.tensor(sizes, dtype=torch.int64, device=group.device)
    every = mine.new_empty(group.size, group.size)
    with collective_errors("the comparison of sizes in", group):
        gather_all(every.view(-1), mine, group.members)
    rows: list[list[int]] = every.tolist()
    return [rows[place] for place in group.places]
