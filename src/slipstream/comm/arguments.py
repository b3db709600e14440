"""What the operators are given, checked: on all ranks of a group with ``check``, else on this one.

Whatever is wrong is found after the headers were exchanged and from them, so that every rank raises
and none waits for another.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from slipstream.comm.groups import Group, member
from slipstream.comm.signature import (
    Signature,
    check_tensor,
    consult_sizes,
    exchange_signatures,
    receive_header,
    same,
    send_header,
)
from slipstream.comm.wire import Like
from slipstream.errors import CommError, MismatchError

Device = torch.device | str | None
Sizes = tuple[int, ...]

_BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)


def equal(operator: str, x: torch.Tensor, group: Group, *options: int) -> bool:
    """Whether any rank wants a gradient; all must bring tensors of one shape and dtype."""
    if not group.consults:
        return _wants(operator, x)
    every, _, wants = _brought(operator, x, group, *options)
    same(every, group, f"calls {operator} with", str)
    return wants


def from_root(
    operator: str, x: torch.Tensor | None, group: Group, device: Device, *options: int
) -> tuple[Like, bool]:
    """What the root brings, and whether it wants a gradient.

    Raises:
        CommError: it brings no tensor.
    """
    if not group.consults:
        if x is None:
            raise CommError(
                f"{operator} in {group}: without check, every rank brings a tensor like the root's"
            )
        wants = _wants(operator, x)
        return Like.of(x), wants
    root = exchange_signatures(Signature.of(operator, x, options), group)[0]
    if x is not None:
        check_tensor(operator, x)
    if root.shape is None:
        raise CommError(
            f"{operator} in {group}: rank {group.ranks[0]}, the root, brings no tensor that can "
            "travel"
        )
    return _template(root, x, group, device), root.wants


def gathered(
    operator: str, x: torch.Tensor, group: Group, axis: int, sizes: Sequence[int] | None
) -> tuple[torch.Tensor, int, Sizes, bool]:
    """Of a gather: the tensor (a scalar as a vector of one), the axis, the ranks' lengths along it,
    and whether any wants a gradient.
    """
    if isinstance(x, torch.Tensor) and x.dim() == 0:
        x = x.reshape(1)
    every, shape, wants = _brought(operator, x, group, axis)
    axis = axis_of(operator, axis, shape)
    found = _lengths(operator, every, shape, axis, group)
    if sizes is not None and not every:
        if len(sizes) != group.size or sizes[group.rank] != x.shape[axis]:
            raise CommError(
                f"{operator}: sizes {list(sizes)}, but rank {group.rank} of {group} brings "
                f"{x.shape[axis]} along axis {axis}; allowed: the sizes of all {group.size} ranks"
            )
        found = tuple(sizes)
    return x, axis, found, wants


def exchanged(
    operator: str,
    x: torch.Tensor,
    group: Group,
    split_axis: int,
    concat_axis: int,
    sizes: Sequence[int] | None,
) -> tuple[int, int, Sizes, Sizes, bool, bool]:
    """Of an all-to-all: both axes, the sizes of the pieces that go along the first and of those
    that come along the second, whether all pieces of all ranks are alike, and whether any rank
    wants a gradient.

    The ranks' tensors may differ along the axis where pieces are joined, unless that is also the
    one where they are cut, into equal pieces.
    """
    options = (split_axis, concat_axis, len(sizes or ()))
    every, shape, wants = _brought(operator, x, group, *options)
    cut, join = axis_of(operator, split_axis, shape), axis_of(operator, concat_axis, shape)
    if cut == join and sizes is None:
        if every:
            same(every, group, f"calls {operator} with", str)
        own = pieces_of(operator, x.shape[cut], cut, group, None)
        return cut, join, own, own, True, wants
    lengths = _lengths(operator, every, shape, join, group)
    own = pieces_of(operator, x.shape[cut], cut, group, sizes)
    if cut == join:
        come = tuple(row[group.rank] for row in consult_sizes(own, group))
        return cut, join, own, come, False, wants
    if every and sizes is not None:
        rows = [tuple(row) for row in consult_sizes(own, group)]
        if len(set(rows)) > 1:
            raise CommError(
                f"{operator}: pieces of {rows[0]} and {max(rows, key=rows[0].__ne__)} along axis "
                f"{cut}, to be joined along axis {join}; allowed: the same sizes on every rank"
            )
    alike = len(set(own)) == len(set(lengths)) == 1
    return cut, join, own, lengths, alike, wants


def sent(x: torch.Tensor, to: int, group: Group) -> bool:
    """Whether the tensor for rank ``to`` wants a gradient, of which that rank has been told."""
    if group.check:
        send_header(Signature.of("send", x), to, group)
    return _wants("send", x)


def received(
    source: int, group: Group, like: torch.Tensor | None, device: Device
) -> tuple[Like, bool]:
    """What comes from rank ``source``, and whether it wants a gradient.

    Raises:
        CommError: no tensor comes, or it is not known which.
    """
    if group.check:
        header = receive_header(source, group)
        if header.shape is not None:
            return _template(header, like, group, device), header.wants
    elif like is not None:
        wants = _wants("recv", like)
        return Like.of(like), wants
    why = "brings no tensor that can travel" if group.check else "is not checked: pass like="
    raise CommError(f"recv from rank {group.ranks[source]} of {group}, which {why}")


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
) -> Sizes:
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


def _brought(
    operator: str, x: torch.Tensor, group: Group, *options: int
) -> tuple[Sequence[Signature], Sizes, bool]:
    """The ranks' headers (none where they do not consult), the shape of the first rank's tensor,
    and whether any rank wants a gradient.

    Raises:
        MismatchError: a rank brings no tensor that can travel.
    """
    if not group.consults:
        wants = _wants(operator, x)
        return (), x.shape, wants
    every = exchange_signatures(Signature.of(operator, x, options), group)
    if x is not None:
        check_tensor(operator, x)
    for rank, header in zip(group.ranks, every, strict=True):
        if header.shape is None:
            raise MismatchError(
                f"rank {rank} calls {operator} in {group} with no tensor that can travel; allowed: "
                "a dense tensor on every rank"
            )
    shape = every[0].shape
    assert shape is not None
    return every, shape, any(header.wants for header in every)


def _wants(operator: str, x: torch.Tensor) -> bool:
    """Whether ``x``, which must be a tensor that travels, wants a gradient."""
    check_tensor(operator, x)
    return x.requires_grad and torch.is_grad_enabled()


def _lengths(
    operator: str, every: Sequence[Signature], shape: Sizes, axis: int, group: Group
) -> Sizes:
    """The ranks' lengths along ``axis``; in all else their tensors must be equal."""

    def fixed(header: Signature) -> str:
        sides = enumerate(header.shape or ())
        kept = ["any" if side == axis else size for side, size in sides]
        return f"{header.dtype} {kept}".replace("'", "").removeprefix("torch.")

    if not every:
        return (shape[axis],) * group.size
    same(every, group, f"calls {operator} with", fixed)
    return tuple(header.shape[axis] for header in every if header.shape is not None)


def _template(header: Signature, x: torch.Tensor | None, group: Group, device: Device) -> Like:
    """The tensor of another rank's header, where ``x`` is, or on ``device``."""
    assert header.shape is not None
    assert header.dtype is not None
    if x is not None:
        return Like(header.shape, header.dtype, x.device)
    here = group.device if device is None else torch.device(device)
    return Like(header.shape, header.dtype, here)
