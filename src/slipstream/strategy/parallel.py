"""Model parallelism: how many ranks share a layer or a chain of layers, and which layers how.

Never acts: the room ``parallel`` splits what these values name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from slipstream.strategy.setting import Exactness, Setting, Variant, from_kind


class Column(Variant):
    """A linear or convolutional layer is split along its outputs.

    Example:
        >>> Column(parts=3).gather
        False
    """

    kind: Literal["column"] = "column"
    exactness: ClassVar[Exactness] = "reordered"

    parts: int = Field(default=1, ge=1)
    """Blocks of outputs of which each is split, e.g. 3 where query, key and value are one layer."""

    block: int = Field(default=1, ge=1)
    """Outputs that stay together, e.g. those of a head."""

    uneven: bool = False
    """Allow shares that differ by one output, e.g. of a vocabulary."""

    gather: bool = False
    """Join the outputs on every rank again; else what follows works on a rank's own share."""

    sequence: bool = False
    """The input is split along the sequence (axis 1), and joined before the layer."""


class Row(Variant):
    """A linear or convolutional layer is split along its inputs, which are split already."""

    kind: Literal["row"] = "row"
    exactness: ClassVar[Exactness] = "reordered"

    sequence: bool = False
    """The output is split along the sequence (axis 1) instead of being whole on every rank."""


class Channels(Variant):
    """A layer between column and row works on its own channels: batch or group normalisation, a
    grouped or depthwise convolution.
    """

    kind: Literal["channels"] = "channels"
    exactness: ClassVar[Exactness] = "reordered"


class Vocabulary(Variant):
    """An embedding is split along its rows."""

    kind: Literal["vocabulary"] = "vocabulary"
    exactness: ClassVar[Exactness] = "reordered"


class Heads(Variant):
    """Numbers that a module keeps of its heads or widths are divided by the number of ranks.

    Example:
        >>> Heads(divide=("num_heads", "split_size")).divide
        ('num_heads', 'split_size')
    """

    kind: Literal["heads"] = "heads"
    exactness: ClassVar[Exactness] = "reordered"

    divide: tuple[str, ...] = Field(min_length=1, strict=False)
    """Attributes of the module."""


class Sequence(Variant):
    """A module works on its rank's part of the sequence, or of the batch: normalisation, dropout,
    layers that are data-parallel between layers that are split.
    """

    kind: Literal["sequence"] = "sequence"
    exactness: ClassVar[Exactness] = "reordered"

    axis: Literal[0, 1] = 1
    """1: the sequence; 0: the batch."""

    enter: bool = False
    """Its input is whole on every rank, and cut before the module."""

    leave: bool = False
    """Its output is joined on every rank."""


class Switch(Variant):
    """Tensors change between split along batch or sequence and split along features, at the entry
    or the exit of a module without parameters: an all-to-all, which moves less than a gather.

    Example:
        >>> Switch(before="features", after="part").axis
        1
    """

    kind: Literal["switch"] = "switch"
    exactness: ClassVar[Exactness] = "reordered"

    axis: Literal[0, 1] = 1
    """1: the sequence; 0: the batch."""

    before: Literal["features", "part"] | None = None
    """How its inputs are to be split: along their features, or along ``axis``."""

    after: Literal["features", "part"] | None = None
    """How its output is to be split."""


Style = Column | Row | Channels | Vocabulary | Heads | Sequence | Switch
_Kind = Literal["column", "row", "channels", "vocabulary", "heads", "sequence", "switch"]

_OneStyle = Annotated[
    Style,
    Field(discriminator="kind"),
    BeforeValidator(from_kind, json_schema_input_type=Style | _Kind),
]


class Place(Setting):
    """The style of the modules whose path matches a pattern.

    Example:
        >>> Place(match="*.mlp.c_fc", style="column").style.gather
        False
    """

    match: str = Field(min_length=1, examples=["*.mlp.c_fc"])
    """Pattern of module paths: ``*`` and ``?`` stand for anything."""

    style: _OneStyle
    """How they are split."""


def _places(value: object) -> object:
    """Reads ``{pattern: style}`` as a list of places; passes anything else on."""
    if isinstance(value, Mapping):
        return [{"match": match, "style": style} for match, style in value.items()]
    return value


class TensorParallel(Setting):
    """Ranks that share each layer, and how: a plan of module paths.

    Example:
        >>> plan = {"*.c_fc": "column", "*.mlp.c_proj": "row"}
        >>> TensorParallel(ranks=2, plan=plan).plan[1]
        Place(match='*.mlp.c_proj', style=Row(kind='row', sequence=False))
    """

    ranks: int = Field(ge=2)
    """How many ranks share a layer; neighbours, best on one host."""

    plan: Annotated[
        tuple[Place, ...] | None,
        Field(strict=False),
        BeforeValidator(_places, json_schema_input_type=list[Place] | dict[str, _OneStyle] | None),
    ] = None
    """First match wins, a module without one stays whole on every rank; null: the plan known for
    this kind of model."""

    sequence: bool = False
    """With a known plan: also split the sequence between the split layers."""


class PipelineParallel(Setting):
    """Ranks that each compute some layers of the model, one batch in several micro-batches.

    Example:
        >>> PipelineParallel(ranks=2, cut=("transformer.h.6",)).schedule
        '1f1b'
    """

    ranks: int = Field(ge=2)
    """How many ranks share a chain of layers."""

    cut: tuple[str, ...] = Field(min_length=1, strict=False)
    """Paths of the modules at which stages begin, but for the first."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """In which order micro-batches go forward and backward; the last two take several stages a
    rank."""

    micro_batches: int = Field(default=4, ge=1)
    """Equal parts of a batch that are under way at a time; more of them: less waiting."""


class Parallel(Setting):
    """Ranks that share one model; what is left of the world trains data-parallel.

    Example:
        >>> Parallel().active, Parallel(tensor=TensorParallel(ranks=2)).active
        (False, True)
    """

    tensor: TensorParallel | None = None
    """Ranks that share each layer."""

    pipeline: PipelineParallel | None = None
    """Ranks that share a chain of layers."""

    @property
    def active(self) -> bool:
        """True where ranks share a model."""
        return self.tensor is not None or self.pipeline is not None
