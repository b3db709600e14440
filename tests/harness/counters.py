"""Count what travels: every collective that this process starts, its kind, its bytes, its work.

Sees calls of ``torch.distributed.<name>``; torch's own helpers for objects go past it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

COUNTED = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "isend",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
)


@dataclass(frozen=True)
class Collective:
    """``num_bytes`` are those of the first tensor (of each tensor of a list, summed)."""

    kind: str
    num_bytes: int
    work: dist.Work | None
    """None for a collective that the caller has waited for."""


@contextmanager
def collectives() -> Iterator[list[Collective]]:
    """The collectives started so far, in order; the list grows while the context is open."""
    log: list[Collective] = []
    with ExitStack() as patches:
        for kind in filter(partial(hasattr, dist), COUNTED):  # newer torch has more of them
            counted = partial(_counted, log, kind, getattr(dist, kind))
            patches.enter_context(patch.object(dist, kind, counted))
        yield log


def _counted(log: list[Collective], kind: str, start: Any, *args: Any, **kwargs: Any) -> Any:
    work = start(*args, **kwargs)
    tensors = [args[0]] if args and isinstance(args[0], torch.Tensor) else [*args[:1]]
    flat = [t for item in tensors for t in (item if isinstance(item, list) else [item])]
    log.append(Collective(kind, sum(t.nbytes for t in flat), work))
    return work


def count(log: list[Collective], kind: str) -> int:
    return sum(collective.kind == kind for collective in log)
