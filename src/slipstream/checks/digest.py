"""Digests of tensors: two sums of their bits, one of them weighted by place.

Equal bits have equal digests. A plain sum misses values that have changed places, an exclusive or
even repetitions of one value; two sums of 64 bits, of which one knows places, miss neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

CHUNK = 1 << 16
"""Words of 64 bits that are summed at a time, so that they stay in the cache."""
_FACTOR = 0x5851F42D4C957F2D  # of a linear congruential generator of 64 bits

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
            sums += [chunk.sum(), (chunk * weights[: len(chunk)]).sum()]
    first = second = 0
    values = [0] * len(sums)
    for device in {one.device for one in sums}:  # numbers of steps may lie beside a GPU's moments
        here = [place for place, one in enumerate(sums) if one.device == device]
        found = torch.stack([sums[place] for place in here]).tolist()
        for place, value in zip(here, found, strict=True):
            values[place] = value
    for plain, weighted in zip(values[::2], values[1::2], strict=True):
        first = (first + plain) % (1 << 64)
        second = (second * _FACTOR + weighted) % (1 << 64)
    return first, second


def _together(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bits of the tensors as words; neighbours that are small in one tensor."""
    small: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        words = _words(tensor.detach())
        fits = size + len(words) <= CHUNK
        if small and not (fits and small[0].device == words.device):
            yield torch.cat(small)
            small, size = [], 0
        small.append(words)
        size += len(words)
    if small:
        yield torch.cat(small) if len(small) > 1 else small[0]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as words of 64 bits, 1-D; zeros follow the last ones."""
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return torch.cat([_words(tensor._indices()), _words(tensor._values())])
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    # a view of one value may have any stride, which `contiguous` lets be
    flat = flat.contiguous().as_strided((flat.numel(),), (1,))
    begins, size = flat.storage_offset() * flat.itemsize, flat.nbytes
    if begins % 8 or size % 8:
        padded = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[:size] = flat.view(torch.uint8)
        flat = padded
    return flat.view(torch.int64)


_kept: dict[torch.device, torch.Tensor] = {}


def _weights(device: torch.device) -> torch.Tensor:
    """An odd number of 64 bits for each place of a chunk."""
    if device not in _kept:
        places = torch.arange(1, CHUNK + 1, dtype=torch.int64, device=device)
        _kept[device] = (places * (_FACTOR - (1 << 64) if _FACTOR >> 63 else _FACTOR)) | 1
    return _kept[device]
