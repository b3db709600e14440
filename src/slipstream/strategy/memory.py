"""Memory: which activations are not kept until backward, and where they come from then.

Never acts: the room ``memory`` does what these values ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from slipstream.strategy.setting import Exactness, Setting, Variant, from_kind

Operation = Literal["matmul", "convolution", "attention"]

Kept = Annotated[
    tuple[Operation, ...], Field(default=(), strict=False, examples=[["matmul", "attention"]])
]
"""Operations whose results are kept all the same (selective recomputation). They do not leave with
`Offload`, nothing may change them in place, and backward goes once.
"""


def _whole(value: object) -> object:
    """Reads 2e9, which is a float in YAML, as a whole one; passes anything else on."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Every(Variant):
    """Of so many blocks at a time only the input is kept, the rest is computed again.

    Blocks are the repeated ones that are found in the model, such as the layers of a transformer.

    Example:
        >>> Every(every=2, keep=("matmul",)).keep
        ('matmul',)
    """

    kind: Literal["every"] = "every"
    exactness: ClassVar[Exactness] = "bitwise"

    every: PositiveInt = 1
    """Blocks that are computed again together; more of them: fewer inputs to keep, but the
    activations of all of them at a time."""

    keep: Kept = ()
    """Operations whose results are kept all the same; backward goes once (no ``retain_graph``)."""


class Checkpoints(Variant):
    """Of the named modules only the input is kept, the rest is computed again.

    Example:
        >>> Checkpoints(checkpoints=("encoder.layer.*",)).kind
        'checkpoints'
    """

    kind: Literal["checkpoints"] = "checkpoints"
    exactness: ClassVar[Exactness] = "bitwise"

    checkpoints: tuple[str, ...] = Field(min_length=1, strict=False, examples=[["encoder.layer.*"]])
    """Paths of modules; ``*`` and ``?`` stand for anything."""

    keep: Kept = ()
    """Operations whose results are kept all the same; backward goes once (no ``retain_graph``)."""


class Budget(Variant):
    """The fastest choice of blocks whose activations fit a share of their bytes.

    Blocks are measured in the first forward: hooks on modules inside of them run four times more.

    Example:
        >>> Budget(budget=0.5).budget
        0.5
    """

    kind: Literal["budget"] = "budget"
    exactness: ClassVar[Exactness] = "bitwise"

    budget: float = Field(gt=0, le=1, examples=[0.5])
    """Share of the bytes that they take where nothing is computed again."""


class BudgetBytes(Variant):
    """The fastest choice of blocks whose activations fit a number of bytes.

    Measured as for `Budget`.

    Example:
        >>> BudgetBytes(budget_bytes=2**30).kind
        'budget_bytes'
    """

    kind: Literal["budget_bytes"] = "budget_bytes"
    exactness: ClassVar[Exactness] = "bitwise"

    budget_bytes: Annotated[PositiveInt, BeforeValidator(_whole)] = Field(examples=[2**30])
    """Bytes for activations of blocks at any time, on each rank."""


_KINDS = ("every", "checkpoints", "budget", "budget_bytes")


def _kind_of(value: object) -> object:
    """Reads ``{every: 2}`` as ``{kind: every, every: 2}``; passes anything else on."""
    if isinstance(value, Mapping) and "kind" not in value:
        named = [kind for kind in _KINDS if kind in value]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are ways of their own; allowed: one of them")
        return {"kind": named[0], **value} if len(named) == 1 else value
    return from_kind(value)


Recompute = Annotated[
    Every | Checkpoints | Budget | BudgetBytes,
    Field(discriminator="kind"),
    BeforeValidator(
        _kind_of,
        json_schema_input_type=Every | Checkpoints | Budget | BudgetBytes | Literal["every"],
    ),
]
"""What is computed again; its kind may be left out, as its first setting has the same name."""


class Offload(Setting):
    """What blocks keep for backward leaves the device's memory in forward, and is back in time.

    Together with recomputation that is the inputs of what is computed again. The bits stay the
    same.

    Example:
        >>> Offload(to="disk").prefetch
        1
    """

    to: Literal["host", "disk"] = "host"
    """Pinned host memory, for models on a GPU; or a spool file."""

    keep_last: NonNegativeInt = 1
    """Blocks at the end whose activations stay, as backward begins with them."""

    prefetch: NonNegativeInt = 1
    """Blocks ahead of backward that are brought back."""

    min_bytes: Annotated[NonNegativeInt, BeforeValidator(_whole)] = 2**20
    """Smaller tensors stay."""

    modules: tuple[str, ...] | None = Field(
        default=None, min_length=1, strict=False, examples=[["encoder.layer.*"]]
    )
    """Paths of the blocks, ``*`` and ``?`` stand for anything; null: those that repeat."""

    folder: str | None = Field(default=None, min_length=1)
    """Where the spool file lies; null: the system's folder for temporary files."""

    @model_validator(mode="after")
    def _folder_of_disk(self) -> Offload:
        if self.folder is not None and self.to != "disk":
            raise ValueError(f"folder with to {self.to}: only {{to: disk}} writes a file")
        return self


class Memory(Setting):
    """What becomes of activations between forward and backward.

    Example:
        >>> Memory(recompute={"every": 2}).recompute
        Every(kind='every', every=2, keep=())
    """

    recompute: Recompute | None = None
    """Activations that are computed again instead of kept."""

    offload: Offload | None = None
    """Activations that leave the device's memory until backward needs them."""

    @property
    def active(self) -> bool:
        """True where something is not kept."""
        return self.recompute is not None or self.offload is not None
