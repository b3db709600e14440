"""What the operators are given, checked: on all ranks of a group with ``check``, else on this one.

Whatever is wrong is found after the headers were exchanged and from them, so that every rank raises
and none waits for another.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.comm.groups import Group, member
from slipstream.comm.header import Header, check_tensor, consult, same
from slipstream.comm.moves import Like
from slipstream.errors import CommError, MismatchError

_BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Pieces:
    """What the ranks bring to a gather: ``sizes`` along the axis; whether any wants a gradient."""

    sizes: tuple[int, ...]
    wants: bool


def headers(operator: str, x: object, group: Group, *options: int) -> list[Header]:
    """What every rank of the group brings, in its order; without ``check`` what this one does."""
    own = Header.of(operator, x, options)
    consults = group.check and group.size > 1
    every = consult(own, group) if consults else [own] * group.size
    if x is not None:
        check_tensor(operator, x)
    return every


def present(operator: str, every: Sequence[Header], group: Group) -> tuple[int, ...]:
    """The shape that the first rank brings, once all are known to bring a tensor."""
    for rank, header in zip(group.ranks, every, strict=True):
        if header.shape is None:
            raise MismatchError(
                f"rank {rank} calls {operator} in {group} with no tensor that can travel; allowed: "
                "a dense tensor on every rank"
            )
    shape = every[0].shape
    assert shape is not None
    return shape


def equal(operator: str, x: torch.Tensor, group: Group, *options: int) -> list[Header]:
    """`headers`, which must bring tensors of one shape and dtype."""
    every = headers(operator, x, group, *options)
    present(operator, every, group)
    same(every, group, f"calls {operator} with", str)
    return every


def same_but(operator: str, every: Sequence[Header], group: Group, free: set[int]) -> None:
    """Refuse headers that differ in dtype, or in shape along another axis than those ``free``."""

    def fixed(header: Header) -> str:
        sides = enumerate(header.shape or ())
        shape = ["any" if axis in free else size for axis, size in sides]
        return f"{header.dtype} {shape}".replace("'", "").removeprefix("torch.")

    same(every, group, f"calls {operator} with", fixed)


def gathered(
    operator: str,
    x: torch.Tensor,
    group: Group | None,
    axis: int,
    sizes: Sequence[int] | None,
) -> tuple[Group, torch.Tensor, int, Pieces]:
    """Group, tensor (a scalar as a vector of one), axis and pieces of a gather."""
    group = member(group, operator)
    if isinstance(x, torch.Tensor) and x.dim() == 0:
        x = x.reshape(1)
    every = headers(operator, x, group, axis)
    axis = axis_of(operator, axis, present(operator, every, group))
    same_but(operator, every, group, {axis})
    found = tuple(h.shape[axis] for h in every if h.shape is not None)
    if sizes is not None and (not group.check or group.size == 1):
        if len(sizes) != group.size or sizes[group.rank] != x.shape[axis]:
            raise CommError(
                f"{operator}: sizes {list(sizes)}, but rank {group.rank} of {group} brings "
                f"{x.shape[axis]} along axis {axis}; allowed: the sizes of all {group.size} ranks"
            )
        found = tuple(sizes)
    return group, x, axis, Pieces(found, wanted(every))


def wanted(every: Sequence[Header]) -> bool:
    """Whether any rank wants a gradient, so that all take part in backward."""
    return any(header.wants for header in every)


def template(
    sent: Header, x: torch.Tensor | None, group: Group, device: torch.device | str | None
) -> Like:
    """What comes from the rank that has sent this header.

    Raises:
        CommError: it brings no tensor.
    """
    if sent.shape is None or sent.dtype is None:
        checked = group.check and group.size > 1
        raise CommError(
            f"{sent.operator} in {group}: "
            + (
                f"rank {group.ranks[0]}, the root, brings no tensor that can travel"
                if checked
                else "without check, every rank brings a tensor like the root's"
            )
        )
    if x is not None:
        return Like(sent.shape, sent.dtype, x.device)
    return Like(sent.shape, sent.dtype, group.device if device is None else torch.device(device))


def axis_of(operator: str, axis: int, shape: Sequence[int]) -> int:
    """``axis`` counted from the front.

    Raises:
        CommError: there is no such axis.
    """
    if not -len(shape) <= axis < len(shape):
        allowed = f"{-len(shape)} .. {len(shape) - 1}" if shape else "none, it is a scalar"
        raise CommError(f"{operator}: axis {axis} of a tensor of {list(shape)}; allowed: {allowed}")
    return axis % len(shape)


def pieces_of(
    operator: str, size: int, axis: int, group: Group, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """The sizes into which ``size`` along ``axis`` is cut: ``sizes``, or equal ones.

    Raises:
        CommError: they do not make up the whole.
    """
    if sizes is None:
        if size % group.size:
            raise CommError(
                f"{operator}: {size} along axis {axis} cannot be cut into {group.size} equal "
                f"pieces; allowed: a multiple of {group.size}, or sizes=[...] that add up to {size}"
            )
        return (size // group.size,) * group.size
    if len(sizes) != group.size or sum(sizes) != size or min(sizes) < 0:
        raise CommError(
            f"{operator}: sizes {list(sizes)}; allowed: one for each of the {group.size} ranks of "
            f"{group}, together {size}, the length along axis {axis}"
        )
    return tuple(sizes)


def digest(sizes: Sequence[int] | None) -> tuple[int, int]:
    """``sizes`` as two numbers to compare: how many, and a checksum."""
    return (0, 0) if sizes is None else (len(sizes), zlib.crc32(repr(list(sizes)).encode()))


def must_add_up(operator: str, x: torch.Tensor, *, mean: bool = False, order: bool = False) -> None:
    """Refuse a dtype that has no sum, no ``mean``, or no ``order``.

    Raises:
        CommError: names the dtype and those that are allowed.
    """
    if x.dtype in _BYTES:
        raise CommError(f"{operator} of {x.dtype}; allowed: a wider dtype, e.g. x.float()")
    if mean and not (x.is_floating_point() or x.is_complex()):
        raise CommError(f"{operator} of {x.dtype}; allowed: floating-point and complex dtypes")
    if order and x.is_complex():
        raise CommError(f"{operator} of {x.dtype}; allowed: dtypes whose values have an order")


def peer_group(operator: str, peer: int, group: Group | None) -> Group:
    """The group in which a tensor goes to or comes from ``peer``.

    Raises:
        CommError: no such rank in the group, or this one.
    """
    group = member(group, operator)
    if not 0 <= peer < group.size or peer == group.rank:
        raise CommError(
            f"{operator} with rank {peer} of {group}, on rank {group.rank} of it; allowed: another "
            f"one of 0 .. {group.size - 1}"
        )
    return group
