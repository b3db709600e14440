"""Model parallelism settings: tensor parallel plans and pipelines. ``parallel`` implements them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from slipstream.strategy.setting import OneOf, Setting, Variant


class ColumnConfig(Variant, kind="column", exactness="reordered"):
    """A linear or convolutional layer is split along its outputs.

    Example:
        >>> ColumnConfig(parts=3).gather
        False
    """

    parts: int = Field(default=1, ge=1)
    """Blocks of outputs that are split one by one, e.g. 3 for a fused query-key-value layer."""

    block: int = Field(default=1, ge=1)
    """Outputs that stay together, e.g. the width of a head."""

    uneven: bool = False
    """Allow shares that differ by one block, e.g. for a vocabulary."""

    gather: bool = False
    """All-gather the outputs on every rank; otherwise the next layer works on this rank's share."""

    sequence: bool = False
    """The input is split along the sequence (axis 1); all-gather it before the layer."""


class RowConfig(Variant, kind="row", exactness="reordered"):
    """A linear or convolutional layer is split along its inputs, which arrive split."""

    sequence: bool = False
    """Reduce-scatter the output along the sequence (axis 1) instead of all-reducing it."""


class ChannelsConfig(Variant, kind="channels", exactness="reordered"):
    """A layer between column and row works on this rank's channels: batch or group normalisation, a
    grouped or depthwise convolution."""


class VocabularyConfig(Variant, kind="vocabulary", exactness="reordered"):
    """An embedding is split along its rows."""


class HeadsConfig(Variant, kind="heads", exactness="reordered"):
    """Attributes of a module, such as its number of heads, are divided by the number of ranks.

    Example:
        >>> HeadsConfig(divide=("num_heads", "split_size")).divide
        ('num_heads', 'split_size')
    """

    divide: tuple[str, ...] = Field(min_length=1, strict=False)
    """Names of the attributes."""


class SequenceConfig(Variant, kind="sequence", exactness="reordered"):
    """A module works on this rank's part of the sequence or of the batch: normalisation, dropout,
    data-parallel layers between split layers."""

    axis: Literal[0, 1] = 1
    """1: the sequence; 0: the batch."""

    enter: bool = False
    """The input is whole on every rank; split it before the module."""

    leave: bool = False
    """All-gather the output on every rank."""


class SwitchConfig(Variant, kind="switch", exactness="reordered"):
    """Switch tensors between a split along batch or sequence and a split along features, before or
    after a module without parameters. An all-to-all, which moves fewer bytes than a gather.

    Example:
        >>> SwitchConfig(before="features", after="part").axis
        1
    """

    axis: Literal[0, 1] = 1
    """1: the sequence; 0: the batch."""

    before: Literal["features", "part"] | None = None
    """Split of its inputs: along features, or along ``axis``."""

    after: Literal["features", "part"] | None = None
    """Split of its output."""


StyleConfig = (
    ColumnConfig
    | RowConfig
    | ChannelsConfig
    | VocabularyConfig
    | HeadsConfig
    | SequenceConfig
    | SwitchConfig
)
_OneStyle = Annotated[StyleConfig, OneOf()]


class LayerRuleConfig(Setting):
    """The style of the modules whose path matches a pattern.

    Example:
        >>> LayerRuleConfig(match="*.mlp.c_fc", style="column").style.gather
        False
    """

    match: str = Field(min_length=1, examples=["*.mlp.c_fc"])
    """Pattern of module paths with ``*`` and ``?`` as wildcards."""

    style: _OneStyle
    """How the modules are split."""


def _places(value: object) -> object:
    """Reads ``{pattern: style}`` as a list of `LayerRuleConfig`; passes anything else on."""
    if isinstance(value, Mapping):
        return [{"match": match, "style": style} for match, style in value.items()]
    return value


class TensorParallelConfig(Setting):
    """Split layers over ranks by a plan of module paths.

    Example:
        >>> plan = {"*.c_fc": "column", "*.mlp.c_proj": "row"}
        >>> TensorParallelConfig(ranks=2, plan=plan).plan[1]
        LayerRuleConfig(match='*.mlp.c_proj', style=RowConfig(kind='row', sequence=False))
    """

    ranks: int = Field(ge=2)
    """Ranks that split a layer; consecutive ranks, best on one host."""

    plan: Annotated[
        tuple[LayerRuleConfig, ...] | None,
        Field(strict=False),
        BeforeValidator(
            _places, json_schema_input_type=list[LayerRuleConfig] | dict[str, _OneStyle] | None
        ),
    ] = None
    """First match wins; a module without a match stays whole on every rank. null: the built-in plan
    for this model class."""

    sequence: bool = False
    """With a built-in plan: also split the sequence between the split layers."""


class PipelineParallelConfig(Setting):
    """Each rank computes some layers; a batch runs in several micro-batches.

    Example:
        >>> PipelineParallelConfig(ranks=2, cut=("transformer.h.6",)).schedule
        '1f1b'
    """

    ranks: int = Field(ge=2)
    """Ranks of the pipeline."""

    cut: tuple[str, ...] | None = Field(
        default=None, min_length=1, strict=False, examples=[["transformer.h.6"]]
    )
    """Paths of the modules at which the second, third ... stage begins; null: such that stages
    have about equal numbers of parameters."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """Order of forward and backward of the micro-batches; the last two allow several stages per
    rank."""

    micro_batches: int = Field(default=4, ge=1)
    """Equal parts of a batch; more of them means a smaller bubble."""


class ParallelConfig(Setting):
    """Ranks that split one model; the remaining factor of the world size is data-parallel.

    Example:
        >>> ParallelConfig().active, ParallelConfig(tensor=TensorParallelConfig(ranks=2)).active
        (False, True)
    """

    tensor: TensorParallelConfig | None = None
    """Tensor parallelism: ranks that split each layer."""

    pipeline: PipelineParallelConfig | None = None
    """Pipeline parallelism: ranks that each hold some layers."""

    @property
    def active(self) -> bool:
        """Whether ranks split a model."""
        return self.tensor is not None or self.pipeline is not None
