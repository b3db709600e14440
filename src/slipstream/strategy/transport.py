"""Transports: how a segment travels between ranks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from slipstream.strategy.setting import Exactness, Variant, from_kind


class Flat(Variant):
    """The backend's own all-reduce over all ranks."""

    kind: Literal["flat"] = "flat"
    exactness: ClassVar[Exactness] = "reordered"


class Direct(Variant):
    """Each rank sums a share of every segment, and sends the sum to all others. On CPUs only.

    Receives are posted before backward begins, so messages wait neither for their receiver nor, hop
    by hop, for a core. Sums are taken in rank order: the same bits on all ranks and in every run.
    """

    kind: Literal["direct"] = "direct"
    exactness: ClassVar[Exactness] = "reordered"


_Kind = Literal["flat", "direct"]

Transport = Annotated[
    Flat | Direct,
    Field(discriminator="kind"),
    BeforeValidator(from_kind, json_schema_input_type=Flat | Direct | _Kind),
]
"""A transport, or only its kind: ``flat`` for ``{kind: flat}``."""
