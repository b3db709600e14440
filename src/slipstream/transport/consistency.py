"""Ranks compare what they have before data moves: all go on, or all raise.

``agree`` costs one collective of 33 bytes a rank when all is well.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from slipstream.errors import ExchangeError, MismatchError, SlipstreamError

_SHOWN = 5
"""Ranks that an error quotes."""

_MEETING = struct.Struct("40sd")
ROW_BYTES = _MEETING.size
"""What each rank sends in `meet`. A collective of another length ends the process of its peer, by
gloo, so others that ranks may take for it in the same group send as much."""

T = TypeVar("T")


def agree(
    fingerprint: Mapping[str, str], group: dist.ProcessGroup, error: Exception | None = None
) -> None:
    """Return if all ranks have the same ``fingerprint`` and none has an ``error``.

    Args:
        fingerprint: what must be equal, subject to value: ``{"parameter a": "float32 (2,)", ...}``.
        group: a group of CPU tensors.
        error: what went wrong on this rank before it came here.

    Raises:
        Exception: ``error`` itself, on the rank that has one.
        MismatchError: on every other rank; names ranks, subjects and both values.
    """
    digest = hashlib.sha256(json.dumps(list(fingerprint.items())).encode()).digest()
    row = torch.tensor([error is not None, *digest], dtype=torch.uint8)
    with collective_errors("the comparison of the ranks"):
        rows = row.new_empty(dist.get_world_size(group), row.numel())
        dist.all_gather(list(rows.unbind()), row, group=group)
        if bool((rows[:, 0] == 0).all() and (rows == rows[0]).all()):
            return
        complaints = _complaints(fingerprint, group, error)
    if error is not None:
        raise error
    raise MismatchError("\n".join(complaints))


def check_groups(group: dist.ProcessGroup, before: str) -> None:
    """Refuse ranks that cannot make a group by themselves: torch names one by how many each of its
    ranks has, and ranks with another name would wait for one another. Collective.

    Args:
        group: of the ranks; of CPU tensors.
        before: the use of the new group, for the message.

    Raises:
        MismatchError: ranks have different numbers of groups.
    """
    made = len(dist.distributed_c10d._world.pg_names)  # torch tells it nowhere else (2.13)
    agree({f"the number of process groups before {before}": str(made)}, group)


def broadcast_from_first(value: T, group: dist.ProcessGroup) -> T:
    """The ``value`` of the first rank of a group, on all of them.

    Args:
        value: can be pickled.
        group: a group of CPU tensors.
    """
    box = [value]
    with collective_errors("the broadcast of what the first rank decided"):
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def maximum(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The largest of each value on any rank; overwrites ``values``."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def maximum_later(values: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Begin `maximum`; ``values`` are the largest once the returned work has been waited for."""
    work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=True)
    return work if isinstance(work, dist.Work) else None  # None: outside the group


def any_of(flag: bool, group: dist.ProcessGroup) -> bool:
    """Whether ``flag`` is set on any rank of a group of CPU tensors."""
    with collective_errors("the comparison of the ranks"):
        return bool(maximum(torch.tensor([flag], dtype=torch.uint8), group))


def meet(verb: str, value: float, group: dist.ProcessGroup) -> float:
    """The sum over ranks of ``value``, the same on all, once all ranks are at the same ``verb``.

    Before a collective whose messages would be taken for those of another one. Costs one collective
    of 48 bytes a rank.

    Args:
        verb: what the user has called, of at most 40 letters.
        value: of this rank.
        group: a group of CPU tensors.

    Raises:
        ExchangeError: another rank has ended, or does not come in time.
        MismatchError: another rank has called something else; on every rank alike.
    """
    packed = bytearray(_MEETING.pack(verb.encode(), value))
    row = torch.frombuffer(packed, dtype=torch.uint8)
    with collective_errors(f"{verb}(), which all ranks must call,"):
        rows = row.new_empty(dist.get_world_size(group), row.numel())
        dist.all_gather(list(rows.unbind()), row, group=group)
    sent = [bytes(row.tolist()) for row in rows]
    verbs = [verb_in(row) for row in sent]
    if set(verbs) != {verb}:
        raise different_verbs(verbs)
    return float(sum(_MEETING.unpack(row)[1] for row in sent))


def verb_in(row: bytes) -> str | None:
    """Find the verb of the session in a row of `meet`; None: it is that of another collective.

    Example:
        >>> verb_in(_MEETING.pack(b"session.checkpoint", 0.0)), verb_in(bytes(ROW_BYTES))
        ('session.checkpoint', None)
    """
    text = row[: ROW_BYTES - 8].rstrip(b"\0")
    return text.decode() if text.startswith(b"session.") and text.isascii() else None


def different_verbs(verbs: Sequence[str | None]) -> MismatchError:
    """Ranks are at different verbs of the session, by rank; None: at a batch of its loader."""
    called = [verb for verb in verbs if verb is not None]
    words = ["the next batch of session.loader" if verb is None else f"{verb}()" for verb in verbs]
    each = ", ".join(f"rank {rank} {word}" for rank, word in enumerate(words[:_SHOWN]))
    remedy = "call one on all"
    if len(called) < len(verbs):
        remedy = (
            f"call {called[0]}() on all ranks, and leave only what one of them does with the "
            "result, as writing it, to `if session.rank == 0:`"
        )
    return MismatchError(f"ranks have called different collectives: {each}; {remedy}")


def of_first(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The ``values`` of the group's first rank; overwrites ``values``."""
    dist.broadcast(values, group=group, group_src=0)
    return values


@contextmanager
def collective_errors(*what: object) -> Iterator[None]:
    """Turn the RuntimeError of a broken collective into an ExchangeError: ``what`` failed."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SlipstreamError):
            raise
        raise lost(error, *what) from error


def lost(error: RuntimeError, *what: object) -> ExchangeError:
    """The ExchangeError for a collective that failed with ``error``; ``what`` names it."""
    name = " ".join(map(str, what))
    return ExchangeError(
        f"{name} failed, most often because another rank has ended or failed: look at the "
        f"first error of all ranks ({error})"
    )


def _complaints(
    fingerprint: Mapping[str, str], group: dist.ProcessGroup, error: Exception | None
) -> list[str]:
    """List the complaints of each rank, alike on every rank."""
    # A rank with an error may not have got as far as a fingerprint: do not compare with it.
    first: list[Mapping[str, str] | None] = [None if error else fingerprint]
    dist.broadcast_object_list(first, group=group, group_src=0)
    rank = dist.get_rank(group)
    complaint = ""
    if error is not None:
        complaint = f"rank {rank} cannot go on: {type(error).__name__}: {error}"
    elif first[0] is not None:
        complaint = _difference(rank, fingerprint, first[0])
    gathered: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(gathered, complaint, group=group)
    complaints = [text for text in gathered if text]
    hidden = len(complaints) - _SHOWN
    return complaints[:_SHOWN] + ([f"... and {hidden} more ranks"] if hidden > 0 else [])


def _difference(rank: int, mine: Mapping[str, str], first: Mapping[str, str]) -> str:
    """The first subject in which this rank differs from rank 0, in a sentence."""
    for subject in [*first, *mine]:
        here, there = mine.get(subject, "absent"), first.get(subject, "absent")
        if here != there:
            return (
                f"rank {rank} differs from rank 0 in {subject}: {here} on rank {rank}, {there} on "
                "rank 0; every rank must build the same model, optimizer and strategy"
            )
    if list(mine) != list(first):
        return f"rank {rank} has the same as rank 0 in another order"
    return ""
