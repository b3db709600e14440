"""Checks the arguments of the operators.

In a group with ``check`` the ranks first exchange signatures, and each rank validates all of them:
a mistake raises on every rank, and no rank waits for one that has failed. Without ``check`` a rank
validates its own arguments only.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from slipstream.comm.collectives import Reduction
from slipstream.comm.groups import Group
from slipstream.comm.shards import AllToAllOperation
from slipstream.comm.signature import (
    Signature,
    check_same,
    check_tensor,
    exchange_signatures,
    exchange_sizes,
)
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.comm.wire import SENT_AS_BYTES
from slipstream.errors import CommError, MismatchError

Device = torch.device | str | None
Sizes = Sequence[int] | None
"""The lengths of the ranks' pieces, as an operator takes them."""


def check_reducible(
    operator: str, x: torch.Tensor, group: Group, *options: int, reduction: Reduction = "sum"
) -> bool:
    """Require one shape and dtype on all ranks; return whether any rank needs a gradient.

    Raises:
        CommError: a dtype without this reduction; names those that have it.
    """
    signatures, _, needs_grad = _signatures(operator, x, group, *options)
    if signatures:
        check_same(signatures, group, f"calls {operator} with", str)
    if x.dtype in SENT_AS_BYTES:
        raise CommError(f"{operator} of {x.dtype}; allowed: a wider dtype, e.g. x.float()")
    if reduction == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise CommError(f"{operator} of {x.dtype}; allowed: floating-point and complex dtypes")
    if reduction in ("max", "min") and x.is_complex():
        raise CommError(f"{operator} of {x.dtype}; allowed: dtypes whose values have an order")
    return needs_grad


def root_spec(
    operator: str, x: torch.Tensor | None, group: Group, device: Device, *options: int
) -> TensorSpec:
    """The spec of the root's tensor.

    Raises:
        CommError: the root passes no tensor.
    """
    if not group.exchanges_signatures:
        if x is None:
            raise CommError(
                f"{operator} without a tensor in {group}, which has check=False; allowed: on every "
                "rank a tensor like the root's"
            )
        return checked_spec(operator, x)
    root = exchange_signatures(Signature.of(operator, x, options), group)[0]
    if x is not None:
        check_tensor(operator, x)
    if root.dtype is None:
        raise CommError(
            f"{operator} in {group}: rank {group.ranks[0]}, the root, passes no supported tensor"
        )
    return spec_of_signature(root, x, group, device)


def gather_of(
    operator: str, x: torch.Tensor, group: Group, axis: int, sizes: Sizes
) -> tuple[torch.Tensor, TensorSpec, int, tuple[int, ...], bool]:
    """Check a gather: returns the tensor (a scalar as a vector of one), the spec of the result, the
    axis from the front, the ranks' lengths along it, and whether any rank needs a gradient.
    """
    if isinstance(x, torch.Tensor) and x.dim() == 0:
        x = x.reshape(1)
    signatures, shape, needs_grad = _signatures(operator, x, group, axis)
    axis = normalized_axis(operator, axis, shape)
    lengths = _lengths(operator, signatures, shape, axis, group)
    if sizes is not None and not signatures:
        if len(sizes) != group.size or sizes[group.rank] != x.shape[axis]:
            raise CommError(
                f"{operator}: sizes {list(sizes)}, but rank {group.rank} of {group} passes "
                f"{x.shape[axis]} along axis {axis}; allowed: the sizes of all {group.size} ranks"
            )
        lengths = tuple(sizes)
    return x, TensorSpec.of(x).resized(sum(lengths), axis), axis, lengths, needs_grad


def all_to_all_of(
    operator: str, x: torch.Tensor, group: Group, split_axis: int, concat_axis: int, sizes: Sizes
) -> tuple[AllToAllOperation, bool]:
    """The all-to-all of ``x``, and whether any rank needs a gradient.

    The ranks' tensors may differ along ``concat_axis``, unless that is also the axis along which
    they are split into equal pieces.
    """
    options = (split_axis, concat_axis, len(sizes or ()))
    signatures, shape, needs_grad = _signatures(operator, x, group, *options)
    split = normalized_axis(operator, split_axis, shape)
    concat = normalized_axis(operator, concat_axis, shape)
    one_shape = split == concat and sizes is None
    received = _lengths(operator, signatures, shape, concat, group, may_differ=not one_shape)
    pieces = piece_sizes(operator, x.shape[split], split, group, sizes)
    if one_shape:
        received = pieces
    elif split == concat:
        received = tuple(row[group.rank] for row in exchange_sizes(pieces, group))
    elif signatures and sizes is not None:
        rows = [tuple(row) for row in exchange_sizes(pieces, group)]
        if len(set(rows)) > 1:
            raise CommError(
                f"{operator}: pieces of {rows[0]} and {max(rows, key=rows[0].__ne__)} along axis "
                f"{split}, to be joined along axis {concat}; allowed: the same sizes on every rank"
            )
    may_be_equal = split != concat or sizes is None
    equal = may_be_equal and len(set(pieces)) == len(set(received)) == 1
    collective = AllToAllOperation(group, TensorSpec.of(x), split, concat, pieces, received, equal)
    return collective, needs_grad


def normalized_axis(operator: str, axis: int, shape: Sequence[int]) -> int:
    """``axis`` counted from the front.

    Raises:
        CommError: the tensor has no such axis.
    """
    if not -len(shape) <= axis < len(shape):
        allowed = f"{-len(shape)} .. {len(shape) - 1}" if shape else "none, it is a scalar"
        raise CommError(f"{operator}: axis {axis} of a tensor of {list(shape)}; allowed: {allowed}")
    return axis % len(shape)


def piece_sizes(
    operator: str, length: int, axis: int, group: Group, sizes: Sizes
) -> tuple[int, ...]:
    """The sizes of the pieces of ``length`` along ``axis``: ``sizes``, or equal ones.

    Raises:
        CommError: they do not add up to ``length``.
    """
    if sizes is None:
        if length % group.size:
            raise CommError(
                f"{operator}: {length} along axis {axis} cannot be split into {group.size} equal "
                f"pieces; allowed: a multiple of {group.size}, or sizes=[...] that add up to "
                f"{length}"
            )
        return (length // group.size,) * group.size
    if len(sizes) != group.size or sum(sizes) != length or min(sizes) < 0:
        raise CommError(
            f"{operator}: sizes {list(sizes)}; allowed: one for each of the {group.size} ranks of "
            f"{group}, together {length}, the length along axis {axis}"
        )
    return tuple(sizes)


def sizes_digest(sizes: Sizes) -> tuple[int, int]:
    """``sizes`` as two options of a `Signature`: how many, and a checksum."""
    return (0, 0) if sizes is None else (len(sizes), zlib.crc32(repr(list(sizes)).encode()))


def checked_spec(operator: str, x: torch.Tensor) -> TensorSpec:
    """The spec of ``x``, which must be a supported tensor; needs a gradient if one is recorded."""
    check_tensor(operator, x)
    return TensorSpec(x.shape, x.dtype, x.device, x.requires_grad and torch.is_grad_enabled())


def spec_of_signature(
    signature: Signature, x: torch.Tensor | None, group: Group, device: Device
) -> TensorSpec:
    """The spec of another rank's tensor on this rank: where ``x`` is, else on ``device``."""
    assert signature.dtype is not None
    default = group.device if device is None else torch.device(device)
    here = default if x is None else x.device
    return TensorSpec(signature.shape, signature.dtype, here, signature.requires_grad)


def _signatures(
    operator: str, x: torch.Tensor, group: Group, *options: int
) -> tuple[Sequence[Signature], tuple[int, ...], bool]:
    """The ranks' signatures (none without ``check``), the shape of the first rank's tensor, and
    whether any rank needs a gradient.

    Raises:
        MismatchError: a rank passes no supported tensor.
    """
    if not group.exchanges_signatures:
        spec = checked_spec(operator, x)
        return (), spec.shape, spec.requires_grad
    signatures = exchange_signatures(Signature.of(operator, x, options), group)
    if x is not None:
        check_tensor(operator, x)
    for rank, signature in zip(group.ranks, signatures, strict=True):
        if signature.dtype is None:
            raise MismatchError(
                f"rank {rank} calls {operator} in {group} with no supported tensor; allowed: a "
                "dense tensor on every rank"
            )
    return signatures, signatures[0].shape, any(s.requires_grad for s in signatures)


def _lengths(
    operator: str,
    signatures: Sequence[Signature],
    shape: tuple[int, ...],
    axis: int,
    group: Group,
    may_differ: bool = True,
) -> tuple[int, ...]:
    """The ranks' lengths along ``axis``; dtype and all other lengths must be equal."""

    def without_axis(signature: Signature) -> str:
        sides = enumerate(signature.shape)
        shown = ["any" if may_differ and side == axis else size for side, size in sides]
        return f"{signature.dtype} {shown}".replace("'", "").removeprefix("torch.")

    if not signatures:
        return (shape[axis],) * group.size
    check_same(signatures, group, f"calls {operator} with", without_axis)
    return tuple(s.shape[axis] for s in signatures)
