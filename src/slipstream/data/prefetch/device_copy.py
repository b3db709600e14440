"""Copies of batches to a CUDA device, one ahead, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from slipstream.pytree import mapped, tensors

_END = object()


class _Copy(NamedTuple):
    """A batch on the device, and the batch in host memory, which must live until it was copied."""

    batch: Any
    source: Any
    done: torch.cuda.Event


def copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches on a device; while one is computed with, the next one is copied.

    Args:
        batches: in pinned memory, for copies that do not hold up the host.
        device: of CUDA.
    """
    stream = torch.cuda.Stream(device)

    def start(batch: Any) -> _Copy:
        with torch.cuda.stream(stream):
            copied = mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))
            return _Copy(copied, batch, stream.record_event())

    following: _Copy | None = None
    while True:
        failure: Exception | None = None
        try:
            batch = next(batches, _END)
        except Exception as error:  # after the batch before it
            batch, failure = _END, error
        current, following = following, None if batch is _END else start(batch)
        if current is not None:
            yield _arrived(current, device)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # else the error holds itself
        if batch is _END:
            return


def _arrived(copy: _Copy, device: torch.device) -> Any:
    """The batch, for the stream that computes: it waits for the copy, not the host."""
    computing = torch.cuda.current_stream(device)
    computing.wait_event(copy.done)
    # The caching allocator must not reuse the memory before the computing stream is done with it.
    for tensor in tensors(copy.batch):
        tensor.record_stream(computing)
    return copy.batch
