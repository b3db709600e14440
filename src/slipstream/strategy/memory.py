"""Memory settings: which activations are recomputed or offloaded. ``memory`` implements them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from slipstream.strategy.setting import OneOf, Setting, Variant, from_kind

KeptOperation = Literal["matmul", "convolution", "attention"]

Kept = Annotated[
    tuple[KeptOperation, ...], Field(default=(), strict=False, examples=[["matmul", "attention"]])
]
"""Operations whose results are kept (selective recomputation). `OffloadConfig` does not move these
results, nothing may change them in place, and backward runs once (no ``retain_graph``)."""


def _whole(value: object) -> object:
    """Reads 2e9, a float in YAML, as an integer; passes anything else on."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class EveryConfig(Variant, kind="every", exactness="bitwise"):
    """Checkpoint every N blocks: keep only the group's input, recompute the rest in backward.

    Blocks are the repeated modules found in the model, such as the layers of a transformer.

    Example:
        >>> EveryConfig(every=2, keep=("matmul",)).keep
        ('matmul',)
    """

    every: PositiveInt = 1
    """Blocks per group. A larger group keeps fewer inputs, but holds the activations of all its
    blocks while it is recomputed."""

    keep: Kept = ()
    """Operations whose results are kept; backward runs once (no ``retain_graph``)."""


class CheckpointsConfig(Variant, kind="checkpoints", exactness="bitwise"):
    """Keep only the input of the named modules; recompute the rest in backward.

    Example:
        >>> CheckpointsConfig(checkpoints=("encoder.layer.*",)).kind
        'checkpoints'
    """

    checkpoints: tuple[str, ...] = Field(min_length=1, strict=False, examples=[["encoder.layer.*"]])
    """Module paths with ``*`` and ``?`` as wildcards."""

    keep: Kept = ()
    """Operations whose results are kept; backward runs once (no ``retain_graph``)."""


class BudgetConfig(Variant, kind="budget", exactness="bitwise"):
    """Recompute the blocks that cost least time, so that activations fit a share of their bytes.

    Blocks are measured in the first forward: forward pre-hooks on modules inside them run four more
    times, forward hooks only where a block needs what they make of an output.

    Example:
        >>> BudgetConfig(budget=0.5).budget
        0.5
    """

    budget: float = Field(gt=0, le=1, examples=[0.5])
    """Share of the bytes that the blocks keep without recomputation."""


class BudgetBytesConfig(Variant, kind="budget_bytes", exactness="bitwise"):
    """Recompute the blocks that cost least time, so that activations fit a number of bytes.

    Measured as for `BudgetConfig`.

    Example:
        >>> BudgetBytesConfig(budget_bytes=2**30).kind
        'budget_bytes'
    """

    budget_bytes: Annotated[PositiveInt, BeforeValidator(_whole)] = Field(examples=[2**30])
    """Bytes for the activations of all blocks at any time, per rank."""


_KINDS = ("every", "checkpoints", "budget", "budget_bytes")


def _kind_of(value: object) -> object:
    """Reads ``{every: 2}`` as ``{kind: every, every: 2}``; passes anything else on."""
    if isinstance(value, Mapping) and "kind" not in value:
        named = [kind for kind in _KINDS if kind in value]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} exclude each other; allowed: one of them")
        return {"kind": named[0], **value} if len(named) == 1 else value
    return from_kind(value)


RecomputeConfig = Annotated[
    EveryConfig | CheckpointsConfig | BudgetConfig | BudgetBytesConfig, OneOf(_kind_of)
]
"""What to recompute. ``kind`` may be left out: ``{every: 2}`` means ``{kind: every, every: 2}``."""


class OffloadConfig(Setting):
    """Move the activations of blocks out of device memory in forward; prefetch them for backward.

    With recomputation, these are the inputs of the recomputed blocks. Bitwise exact.

    Example:
        >>> OffloadConfig(to="disk").prefetch
        1
    """

    to: Literal["host", "disk"] = "host"
    """``host``: pinned host memory, for models on a GPU; ``disk``: a spool file."""

    keep_last: NonNegativeInt = 1
    """Last blocks whose activations stay, because backward needs them first."""

    prefetch: NonNegativeInt = 1
    """Blocks that are fetched ahead of backward."""

    min_bytes: Annotated[NonNegativeInt, BeforeValidator(_whole)] = 2**20
    """Smaller tensors stay on the device."""

    modules: tuple[str, ...] | None = Field(
        default=None, min_length=1, strict=False, examples=[["encoder.layer.*"]]
    )
    """Paths of the blocks with ``*`` and ``?`` as wildcards; null: the repeated blocks."""

    folder: str | None = Field(default=None, min_length=1)
    """Folder of the spool file; null: the system's temporary folder."""

    @model_validator(mode="after")
    def _folder_of_disk(self) -> OffloadConfig:
        if self.folder is not None and self.to != "disk":
            raise ValueError(f"folder with to {self.to}: only {{to: disk}} writes a file")
        return self


class MemoryConfig(Setting):
    """Settings of where activations are kept between forward and backward.

    Example:
        >>> MemoryConfig(recompute={"every": 2}).recompute
        EveryConfig(kind='every', every=2, keep=())
    """

    recompute: RecomputeConfig | None = None
    """Activations to recompute in backward."""

    offload: OffloadConfig | None = None
    """Activations to move out of device memory until backward."""

    @property
    def active(self) -> bool:
        """Whether anything is recomputed or offloaded."""
        return self.recompute is not None or self.offload is not None
