"""Digests of tensors: two sums of their bits, one of them weighted by place.

Equal bits have equal digests. A plain sum misses values that have changed places, an exclusive or
even repetitions of one value; two sums of 64 bits, of which one knows places, miss neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

CHUNK = 1 << 16
"""Elements that are summed at a time, so that they stay in the cache."""
_FACTOR = 0x5851F42D4C957F2D  # of a linear congruential generator of 64 bits
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}

Digest = tuple[int, int]


def digest(tensors: Iterable[torch.Tensor]) -> Digest:
    """The digest of tensors in this order; many small ones are digested together.

    Example:
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> digest([one]) == digest([one.clone()]), digest([one]) == digest([other])
        (True, False)
    """
    sums: list[torch.Tensor] = []
    for words in _together(tensors):
        weights = _weights(words.device)
        for chunk in words.split(CHUNK):
            wide = chunk.to(torch.int64)
            sums += [wide.sum(), (wide * weights[: len(wide)]).sum()]
    first = second = 0
    values = torch.stack(sums).tolist() if sums else []
    for plain, weighted in zip(values[::2], values[1::2], strict=True):
        first = (first + plain) % (1 << 64)
        second = (second * _FACTOR + weighted) % (1 << 64)
    return first, second


def _together(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bits of the tensors as 1-D integers; neighbours that are small in one tensor."""
    small: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        words = _words(tensor.detach())
        fits = size + len(words) <= CHUNK
        same = not small or (small[0].dtype, small[0].device) == (words.dtype, words.device)
        if small and not (fits and same):
            yield torch.cat(small)
            small, size = [], 0
        small.append(words)
        size += len(words)
    if small:
        yield torch.cat(small) if len(small) > 1 else small[0]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        parts = (_words(tensor._indices()), _words(tensor._values()))
        return torch.cat([part.to(torch.int32) for part in parts])
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = flat.contiguous().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    return flat.view(_WORDS[flat.element_size()])


_kept: dict[torch.device, torch.Tensor] = {}


def _weights(device: torch.device) -> torch.Tensor:
    """An odd number of 64 bits for each place of a chunk."""
    if device not in _kept:
        places = torch.arange(1, CHUNK + 1, dtype=torch.int64, device=device)
        _kept[device] = (places * (_FACTOR - (1 << 64) if _FACTOR >> 63 else _FACTOR)) | 1
    return _kept[device]
