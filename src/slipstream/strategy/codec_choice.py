"""Settings that choose among codecs, and questions to a codec that may be none."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Self, TypeVar, cast

from pydantic import Field, field_validator

from slipstream.strategy.codec import (
    CodecVariant,
    HalfConfig,
    OneCodecConfig,
    PlainCodecConfig,
)
from slipstream.strategy.setting import OneOf, Setting


class CodecRuleConfig(Setting):
    """The codec of parameters whose path matches a pattern.

    Example:
        >>> CodecRuleConfig(match="*.bias", codec=None).match
        '*.bias'
    """

    match: str = Field(min_length=1, examples=["*.bias"])
    """Pattern of parameter paths with ``*`` and ``?`` as wildcards."""

    codec: OneCodecConfig | None = None
    """Their codec; null: none."""


class ByNameConfig(CodecVariant, kind="by_name", exactness="lossy"):
    """Each parameter gets the codec of the first rule that matches its path, else none.

    ``accelerate()`` warns about a rule that matches no trainable parameter.

    Example:
        >>> rules = CodecRuleConfig(match="*.bias"), CodecRuleConfig(match="*", codec=HalfConfig())
        >>> by_name = ByNameConfig(rules=rules)
        >>> by_name.of("head.bias"), by_name.of("head.weight").dtype
        (None, 'bf16')
    """

    rules: tuple[CodecRuleConfig, ...] = Field(min_length=1, strict=False)
    """First match wins."""

    def of(self, name: str) -> PlainCodecConfig | None:
        """The codec of a parameter, by its path."""
        return next((r.codec for r in self.rules if fnmatchcase(name, r.match)), None)

    @property
    def late_by(self) -> int:
        """Updates until the latest codec begins."""
        return max(late_by(rule.codec) for rule in self.rules)

    def at_once(self) -> Self:
        """The codecs, each from its first update on."""
        rules = [rule.model_copy(update={"codec": at_once(rule.codec)}) for rule in self.rules]
        return self.model_copy(update={"rules": tuple(rules)})

    def copies(self, ranks: int) -> float:
        """At most."""
        return max(rule.codec.copies(ranks) if rule.codec else 0.0 for rule in self.rules)


class AdaptiveConfig(CodecVariant, kind="adaptive", exactness="lossy"):
    """A codec, used only for segments where it saves more time on the wire than it costs.

    Both times are measured on the live ranks before the first update.

    Example:
        >>> AdaptiveConfig(codec="int8").codec.kind
        'int8'
    """

    codec: OneCodecConfig = HalfConfig()
    """The codec for segments where it pays."""

    @field_validator("codec")
    @classmethod
    def _applies_no_momentum(cls, codec: PlainCodecConfig) -> PlainCodecConfig:
        if codec.takes_momentum:
            raise ValueError(
                "dgc takes over the momentum of all parameters, even where it does not pay; "
                "allowed: half, int8, onebit, powersgd, or dgc without adaptive"
            )
        return codec

    @property
    def late_by(self) -> int:
        """Updates until the codec begins."""
        return late_by(self.codec)

    def at_once(self) -> Self:
        """The codec, from its first update on."""
        return self.model_copy(update={"codec": at_once(self.codec)})

    def copies(self, ranks: int) -> float:
        """At most, where it pays everywhere."""
        return self.codec.copies(ranks)

    def of(self, name: str) -> PlainCodecConfig | None:
        """The codec used where it pays."""
        return self.codec


CodecConfig = Annotated[
    PlainCodecConfig | ByNameConfig | AdaptiveConfig, OneOf(family=CodecVariant)
]
"""A codec, or only its kind where the defaults do: ``half`` for ``{kind: half}``."""


def phase_of(codec: PlainCodecConfig | None, step: int) -> PlainCodecConfig | None:
    """The codec at work after ``step`` updates.

    Example:
        >>> from slipstream.strategy import PowerSgdConfig
        >>> phase_of(PowerSgdConfig(), 999), phase_of(PowerSgdConfig(), 1000).kind
        (None, 'powersgd')
    """
    at_work = None
    for first, phase in () if codec is None else codec.phases:
        at_work = phase if first <= step else at_work
    return cast(PlainCodecConfig | None, at_work)


def late_by(codec: CodecVariant | None) -> int:
    """Updates until a codec, if there is one, sends as little as it ever will.

    Example:
        >>> from slipstream.strategy import DgcConfig, Int8Config
        >>> late_by(Int8Config()), late_by(DgcConfig(start_step=5)), late_by(None)
        (0, 1005, 0)
    """
    return 0 if codec is None else codec.late_by


C = TypeVar("C", bound=CodecVariant | None)


def at_once(codec: C) -> C:
    """A codec, if there is one, as it is in the end, from the first update on.

    Example:
        >>> from slipstream.strategy import OneBitConfig
        >>> at_once(OneBitConfig(block=64)) == OneBitConfig(block=64, start_step=0)
        True
    """
    return codec if codec is None else codec.at_once()


def codec_of(codec: CodecVariant | None, name: str) -> PlainCodecConfig | None:
    """The codec of a parameter's gradient; for ``adaptive``, the codec used where it pays.

    Example:
        >>> codec_of(AdaptiveConfig(codec="int8"), "head.weight").kind
        'int8'
    """
    return None if codec is None else cast(PlainCodecConfig | None, codec.of(name))


def takes_momentum(codec: CodecVariant | None) -> bool:
    """Whether a codec, if there is one, or one of its rules applies the momentum of the optimizer.

    Example:
        >>> from slipstream.strategy import DgcConfig
        >>> by_name = ByNameConfig(rules=(CodecRuleConfig(match="*", codec=DgcConfig()),))
        >>> takes_momentum(by_name), takes_momentum(HalfConfig()), takes_momentum(None)
        (True, False, False)
    """
    rules = codec.rules if isinstance(codec, ByNameConfig) else ()
    return any(one is not None and one.takes_momentum for one in (codec, *(r.codec for r in rules)))


def keeps_state(codec: CodecVariant | None) -> bool:
    """Whether a codec, if there is one, keeps state between updates.

    Example:
        >>> from slipstream.strategy import Int8Config, OneBitConfig
        >>> keeps_state(HalfConfig()), keeps_state(Int8Config()), keeps_state(OneBitConfig())
        (False, False, True)
    """
    return codec is not None and codec.copies(ranks=2) > 0
