"""Transports: how a segment travels between ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from slipstream.strategy.setting import OneOf, Variant


class Flat(Variant, exactness="reordered"):
    """The backend's own all-reduce over all ranks."""

    kind: Literal["flat"] = "flat"  # written out for type checkers: the planner looks it up


class Direct(Variant, exactness="reordered"):
    """Each rank sums a share of every segment, and sends the sum to all others. On CPUs only.

    Receives are posted before backward begins, so messages wait neither for their receiver nor, hop
    by hop, for a core. Sums are taken in rank order: the same bits on all ranks and in every run.
    """

    kind: Literal["direct"] = "direct"


class Hierarchical(Variant, exactness="reordered"):
    """Sums inside each host first, then exchanges the sums between the hosts. On CPUs only.

    Of the ranks of a host each exchanges another share, all at the same time: a host sends as much
    as one rank of `Direct` would, however many ranks it has and however they are numbered. Sums are
    taken in a fixed order: the same bits on all ranks and in every run.
    """

    kind: Literal["hierarchical"] = "hierarchical"

    between: Annotated[Flat | Direct, OneOf()] = Direct()
    """How shares travel between hosts: ``direct``, or ``flat``, the backend's ring, which is faster
    while cores are free and needs as many ranks on each host."""


class SharedMemory(Variant, exactness="reordered"):
    """Ranks of one host sum in memory that they share, in rank order. On CPUs only."""

    kind: Literal["shared_memory"] = "shared_memory"


Transport = Annotated[Flat | Direct | Hierarchical | SharedMemory, OneOf()]
"""A transport, or only its kind: ``flat`` for ``{kind: flat}``."""
