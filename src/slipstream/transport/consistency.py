"""Ranks compare notes before data moves: the same facts on all of them, or an error on all.

Never lets one rank go on where another cannot. Costs one collective of 33 bytes a rank when all is
well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from slipstream.errors import ExchangeError, MismatchError, SlipstreamError

_SHOWN = 5

T = TypeVar("T")


def agree(
    facts: Mapping[str, str], group: dist.ProcessGroup, error: Exception | None = None
) -> None:
    """Return if all ranks hold the same ``facts`` and none has an ``error``.

    Args:
        facts: what must be equal, subject to value: ``{"parameter a": "float32 (2,)", ...}``.
        group: a group of CPU tensors.
        error: what went wrong on this rank before it came here.

    Raises:
        Exception: ``error`` itself, on the rank that has one.
        MismatchError: on every other rank; names ranks, subjects and both values.
    """
    digest = hashlib.sha256(json.dumps(list(facts.items())).encode()).digest()
    own = torch.tensor([error is not None, *digest], dtype=torch.uint8)
    with collective_errors("the comparison of the ranks"):
        every = own.new_empty(dist.get_world_size(group), own.numel())
        dist.all_gather(list(every.unbind()), own, group=group)
        if bool((every[:, 0] == 0).all() and (every == every[0]).all()):
            return
        complaints = _complaints(facts, group, error)
    if error is not None:
        raise error
    raise MismatchError("\n".join(complaints))


def broadcast_from_first(value: T, group: dist.ProcessGroup) -> T:
    """The ``value`` of the first rank of a group, on all of them.

    Args:
        value: can be pickled.
        group: a group of CPU tensors.
    """
    said = [value]
    with collective_errors("the agreement on what the first rank has decided"):
        dist.broadcast_object_list(said, group=group, group_src=0)
    return said[0]


@contextmanager
def collective_errors(*what: object) -> Iterator[None]:
    """Inside, a collective that a lost peer breaks raises ExchangeError: ``what`` failed."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SlipstreamError):
            raise
        raise lost(error, *what) from error


def lost(error: RuntimeError, *what: object) -> ExchangeError:
    """What to raise for a collective that failed with ``error``; puts ``what`` into words."""
    said = " ".join(map(str, what))
    return ExchangeError(
        f"{said} failed, most often because another rank has ended or failed: look at the "
        f"first error of all ranks ({error})"
    )


def _complaints(
    facts: Mapping[str, str], group: dist.ProcessGroup, error: Exception | None
) -> list[str]:
    """What each rank has to say, the same list on every rank."""
    # A rank with an error may have found out no facts: there is nothing to compare with it.
    first: list[Mapping[str, str] | None] = [None if error else facts]
    dist.broadcast_object_list(first, group=group, group_src=0)
    rank = dist.get_rank(group)
    own = ""
    if error is not None:
        own = f"rank {rank} cannot go on: {type(error).__name__}: {error}"
    elif first[0] is not None:
        own = _difference(rank, facts, first[0])
    said: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(said, own, group=group)
    complaints = [text for text in said if text]
    hidden = len(complaints) - _SHOWN
    return complaints[:_SHOWN] + ([f"... and {hidden} more ranks"] if hidden > 0 else [])


def _difference(rank: int, own: Mapping[str, str], first: Mapping[str, str]) -> str:
    """The first subject in which this rank differs from rank 0, in a sentence."""
    for subject in [*first, *own]:
        here, there = own.get(subject, "absent"), first.get(subject, "absent")
        if here != there:
            return (
                f"rank {rank} differs from rank 0 in {subject}: {here} on rank {rank}, {there} on "
                "rank 0; every rank must build the same model, optimizer and strategy"
            )
    if list(own) != list(first):
        return f"rank {rank} holds the same as rank 0 in another order"
    return ""
