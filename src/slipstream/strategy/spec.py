"""``Strategy``: every setting, its meaning, its default and its allowed values.

The variants of a group are in files of their own: ``split``, ``checks``, ``codec``, ``compute``,
``data``, ``local``, ``memory``, ``parallel``, ``precision``, ``transport``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import Field, NonNegativeInt, model_validator

from slipstream.errors import StrategyError
from slipstream.strategy.checks import ChecksConfig
from slipstream.strategy.compute import ComputeConfig
from slipstream.strategy.conflicts import beside_local, beside_replay, beside_sharded
from slipstream.strategy.data import DataConfig
from slipstream.strategy.gradients import GradientsConfig
from slipstream.strategy.local import MeetingsConfig
from slipstream.strategy.memory import MemoryConfig
from slipstream.strategy.overview import overview, plain_text
from slipstream.strategy.parallel import ParallelConfig
from slipstream.strategy.precision import PrecisionConfig
from slipstream.strategy.presets import preset
from slipstream.strategy.setting import Exactness, Setting
from slipstream.strategy.transport import ShardedConfig
from slipstream.strategy.validate import shown
from slipstream.strategy.yaml import SUFFIXES, format_yaml, parse_json, parse_yaml, read


class TraceConfig(Setting):
    """Record where time goes.

    Example:
        >>> TraceConfig(steps=100).active, TraceConfig().active
        (True, False)
    """

    steps: int | None = Field(default=None, ge=1, examples=[100])
    """Updates to record; null: off."""

    skip: NonNegativeInt = 2
    """Warm-up updates left out."""

    folder: str = Field(default="slipstream-trace", min_length=1)
    """Where the trace is written."""

    norms: bool = False
    """Record norms of gradients, each rank's and the average's, which tell how much a larger batch
    brings; takes a look at each gradient. Under ``local`` the norms of what ranks change between
    meetings, which tell how far ranks agree."""

    @property
    def active(self) -> bool:
        """Whether anything is recorded."""
        return self.steps is not None


class Strategy(Setting):
    """The whole configuration; a setting that is left out takes its default.

    ``print(strategy)`` draws the overview table.

    Raises:
        StrategyError: an unknown setting or a wrong value; one line per problem with its path, the
            value seen, the values allowed and an example.

    Example:
        >>> strategy = Strategy.from_yaml("gradients: {split: per_layer, accumulate: 4}")
        >>> strategy.gradients.split
        PerLayerConfig(kind='per_layer')
        >>> gradients = GradientsConfig(split=strategy.gradients.split, accumulate=4)
        >>> strategy == Strategy(gradients=gradients)
        True
        >>> print(strategy.to_yaml(), end="")
        gradients: {split: per_layer, accumulate: 4}
    """

    gradients: GradientsConfig = GradientsConfig()
    """How gradients are averaged over ranks."""

    local: MeetingsConfig | None = None
    """How rarely ranks meet that train on their own; null: they exchange gradients."""

    parallel: ParallelConfig = ParallelConfig()
    """Which ranks share one model."""

    precision: PrecisionConfig | None = None
    """Which values are computed and kept in 16 bits."""

    memory: MemoryConfig = MemoryConfig()
    """Where activations are kept between forward and backward."""

    compute: ComputeConfig = ComputeConfig()
    """How the device computes."""

    data: DataConfig = DataConfig()
    """How batches come to the training."""

    checks: ChecksConfig = ChecksConfig()
    """What the run is watched for."""

    trace: TraceConfig = TraceConfig()
    """What is recorded, and where."""

    @model_validator(mode="after")
    def _goes_together(self) -> Strategy:
        others = self.checks, self.parallel, self.precision, self.data
        if self.local is not None and (found := beside_local(self.local, self.gradients, *others)):
            raise ValueError(f"local with {found}")
        if found := (
            beside_sharded(self.gradients) or beside_replay(self.checks, self.compute, self.memory)
        ):
            raise ValueError(found)
        return self

    @model_validator(mode="after")
    def _norms_of_whole_averages(self) -> Strategy:
        found = [] if self.local is not None else list(self.without_whole_averages)
        found += ["trace.steps null"] * (self.trace.steps is None)
        if self.trace.norms and found:
            raise ValueError(
                f"trace.norms with {', '.join(found)}: norms are recorded where each rank has "
                "whole exact averages, and at the meetings of local; record them under plain data "
                "parallelism, or leave norms out"
            )
        return self

    @property
    def without_whole_averages(self) -> tuple[str, ...]:
        """Settings under which ranks do not have whole exact averages of gradients.

        Example:
            >>> Strategy.load({"gradients": {"codec": "int8"}}).without_whole_averages
            ('gradients.codec',)
        """
        settings = {
            "local": self.local is not None,
            "parallel": self.parallel.active,
            "precision": self.precision is not None,
            "gradients.transport sharded": isinstance(self.gradients.transport, ShardedConfig),
            "gradients.codec": self.gradients.codec is not None,
        }
        return tuple(name for name, there in settings.items() if there)

    @property
    def exactness(self) -> Exactness:
        """The weakest exactness of the chosen variants."""
        if self.local is not None:
            return "lossy"
        config = self.gradients
        variants = (config.split, config.transport, config.codec, self.precision)
        chosen = [v.exactness for v in variants if v is not None]
        return max([*chosen, self.compute.exactness], key=get_args(Exactness).index)

    def with_gradients(self, **settings: Any) -> Strategy:
        """Copy it with other settings under ``gradients``.

        Example:
            >>> Strategy().with_gradients(accumulate=2).gradients.accumulate
            2
        """
        gradients = self.gradients.model_copy(update=settings)
        return self.model_copy(update={"gradients": gradients})

    @classmethod
    def load(cls, source: Strategy | Mapping[str, object] | Path | str | None) -> Strategy:
        """Load a strategy from a file (``.yaml``, ``.yml``, ``.json``), a preset name, a mapping,
        a strategy, or None for the defaults.

        Example:
            >>> Strategy.load({"gradients": {"overlap": False}}).gradients.overlap
            False
            >>> Strategy.load("exact").gradients.split.kind
            'optimal'
        """
        if isinstance(source, str) and Path(source).suffix.lower() in SUFFIXES:
            source = Path(source)
        match source:
            case Strategy():
                return source
            case Path():
                document = read(source)
                try:
                    return cls.model_validate(document)
                except StrategyError as error:
                    raise StrategyError(f"{source}: {error}") from None
            case str():
                return cls.model_validate(preset(source).settings)
            case Mapping() | None:
                return cls.model_validate(dict(source or {}))
        raise StrategyError(
            f"cannot make a strategy from {shown(source)}; allowed: a path, a preset name, "
            "a mapping, a Strategy or None"
        )

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read YAML text; the inverse of ``to_yaml``."""
        return cls.model_validate(parse_yaml(text))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read JSON text; the inverse of ``to_json``."""
        return cls.model_validate(parse_json(text))

    def to_yaml(self, *, full: bool = False) -> str:
        """YAML text of what differs from the defaults, or of everything."""
        return format_yaml(self.document(full=full))

    def to_json(self, *, full: bool = False) -> str:
        """JSON text of what differs from the defaults, or of everything."""
        return json.dumps(self.document(full=full), indent=2) + "\n"

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema (draft 2020-12) of a strategy file, e.g. for an editor."""
        dialect = "https://json-schema.org/draft/2020-12/schema"
        return {"$schema": dialect, **cls.model_json_schema()}

    def __str__(self) -> str:
        return plain_text(overview(self))
