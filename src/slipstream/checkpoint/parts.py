"""A rank's state, cut into tensors that are stored one by one and a document with the rest.

The document is what ``torch.save`` makes of the nested containers, with small tensors in it and a
note in the place of each large one. It is read by ``torch.load(weights_only=True)``, so it is data
alone; whether it can be read is tried when it is made.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from pickle import UnpicklingError
from typing import Any

import torch

from slipstream.errors import UsageError
from slipstream.pytree import plain_numbers

SMALL = 4096
"""Bytes below which a tensor is a part of the document: each entry of a file costs more."""
_MARK = "tensor of this checkpoint"
_KINDS: dict[type, type[dict[str, Any]]] = {Counter: Counter, OrderedDict: OrderedDict}
"""Of dicts, beside themselves, that torch reads as data; schedulers of torch keep a Counter."""


def document_key(rank: int) -> str:
    """The entry of a rank's document."""
    return f"rank{rank}.document"


def cut(state: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """The tensors of a rank's state by their paths, and its document among them.

    Those of rank 0's ``model`` are all there, by ``model.`` and their names, so that other tools of
    ``torch.distributed.checkpoint`` find them.

    Raises:
        UsageError: the state has something that is no data; names where.

    Example:
        >>> whole = {"model": {"weight": torch.ones(3)}, "session": {"steps": 7}}
        >>> pieces = cut(whole, rank=0)
        >>> list(pieces)
        ['model.weight', 'rank0.document']
        >>> joined(pieces, 0)
        {'model': {'weight': tensor([1., 1., 1.])}, 'session': {'steps': 7}}
    """
    pieces: dict[str, torch.Tensor] = {}
    prefix = f"rank{rank}." if rank else ""

    def walk(value: Any, path: str, *, every: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return kept(value.detach(), path, every=every)
        if isinstance(value, Mapping):
            return _like(
                value,
                ((plain_numbers(k), walk(v, f"{path}.{k}", every=every)) for k, v in value.items()),
            )
        if type(value) in (list, tuple):
            return type(value)(walk(v, f"{path}.{i}", every=every) for i, v in enumerate(value))
        return plain_numbers(value)

    def kept(tensor: torch.Tensor, path: str, *, every: bool) -> Any:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or not (every or tensor.nbytes >= SMALL):
            return tensor.cpu().clone() if plain else tensor  # a view would be saved as a whole
        while path in pieces:
            path += "'"
        pieces[path] = tensor
        dense = torch.empty_like(tensor, device="meta")  # as in memory, but without gaps
        return (_MARK, path, None if dense.is_contiguous() else tuple(dense.stride()))

    rest = {
        key: walk(value, f"{prefix}{key}", every=key == "model") for key, value in state.items()
    }
    pieces[document_key(rank)] = _encoded(rest)
    return pieces


def joined(pieces: Mapping[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """The state that `cut` got on a rank, from the pieces of all ranks."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return _like(value, ((key, filled(item)) for key, item in value.items()))
        if type(value) is tuple and len(value) == 3 and value[0] == _MARK:
            _, key, strides = value
            tensor = pieces[key]
            if strides is None:
                return tensor
            lying = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
            return lying.copy_(tensor)
        if type(value) in (list, tuple):
            return type(value)(map(filled, value))
        return value

    state: dict[str, Any] = filled(_decoded(pieces[document_key(rank)]))
    return state


def _like(value: Mapping[str, Any], items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of the same kind, where that is data."""
    made = _KINDS.get(type(value), dict)()
    for key, item in items:  # update() of a Counter adds
        made[key] = item
    return made


def _encoded(rest: Mapping[str, Any]) -> torch.Tensor:
    file = io.BytesIO()
    try:
        torch.save(rest, file)
        file.seek(0)
        torch.load(file, weights_only=True, map_location="cpu")
    except (UnpicklingError, TypeError, AttributeError, RuntimeError) as error:
        where = _culprit(rest, "") or "the state"
        raise UsageError(
            f"{where} is no data, and a checkpoint holds data alone: tensors, numbers, text, and "
            f"dicts, lists and tuples of them; keep it elsewhere ({str(error).splitlines()[0]})"
        ) from error
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _culprit(value: Any, path: str) -> str | None:
    """The first value in a state that cannot be read back as data."""
    if isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    else:
        items = []
    for name, item in items:
        if found := _culprit(item, name):
            return found
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True, map_location="cpu")
    except Exception:  # of pickle and torch: whatever they say, it is no data
        return f"{path} ({type(value).__name__})"
    return None


def _decoded(document: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(document.numpy().tobytes()), weights_only=True, map_location="cpu")
