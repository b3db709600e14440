"""Copies of batches to a CUDA device, one ahead, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from slipstream.pytree import mapped, tensors


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
    for batch in batches:
        current, following = following, start(batch)
        if current is not None:
            yield _arrived(current, device)
    if following is not None:
        yield _arrived(following, device)


def _arrived(copy: _Copy, device: torch.device) -> Any:
    """The batch, for the stream that computes: it waits for the copy, not the host."""
    computing = torch.cuda.current_stream(device)
    computing.wait_event(copy.done)
    # The caching allocator must not reuse the memory before the computing stream is done with it.
    for tensor in tensors(copy.batch):
        tensor.record_stream(computing)
    return copy.batch
