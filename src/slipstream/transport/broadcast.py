"""Many tensors in one transfer: parameters and buffers travel as the bytes of one flat tensor.

Never stages more than ``LIMIT_BYTES`` at a time, except for one larger tensor alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

LIMIT_BYTES = 128 * 2**20


def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> int:
    """Give every rank the values of the group's first rank; returns the number of broadcasts.

    Tensors of all dtypes travel together. Exactness: bitwise.
    """
    packs = list(_packs(tensors))
    for pack in packs:
        flat = pack_bytes(pack)
        dist.broadcast(flat, group=group, group_src=0)
        if dist.get_rank(group) != 0:
            unpack_bytes(flat, pack)
    return len(packs)


def pack_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new 1-D tensor of uint8 with the bytes of all tensors, one after the other."""
    return torch.cat([_contiguous_values(t.detach()).view(torch.uint8) for t in tensors])


def unpack_bytes(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy ``flat`` back into tensors of the shapes and dtypes that it was packed from."""
    parts = flat.split([t.nbytes for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        # clone(): a part may start at an address that is not aligned for the dtype.
        tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _contiguous_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a contiguous 1-D tensor; reshape alone may return one with gaps."""
    values = tensor.reshape(-1)
    return values if values.stride(0) == 1 else values.clone(memory_format=torch.contiguous_format)


def _packs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors that share a transfer: at most ``LIMIT_BYTES``, or one larger tensor."""
    pack: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        if pack and filled + tensor.nbytes > LIMIT_BYTES:
            yield pack
            pack, filled = [], 0
        if tensor.nbytes:
            pack.append(tensor)
            filled += tensor.nbytes
    if pack:
        yield pack
