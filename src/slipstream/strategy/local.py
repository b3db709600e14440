"""Settings of training that meets rarely. ``local`` implements them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, model_validator

from slipstream.strategy.codec import CodecVariant, PlainCodecConfig
from slipstream.strategy.setting import OneOf, Setting


def _by_address(value: Any) -> Any:
    return {"store": value} if isinstance(value, str) else value


CHOSEN = ("steps", "fragments", "delay", "codec")
"""Settings that ``auto`` chooses."""
ENOUGH = 0.95
"""Part of the speed without any exchange at which ``auto`` does not look for more: to meet more
rarely, or with a longer delay, is not worth its loss."""
FRAGMENTS = 4
"""Those of ``auto`` where it delays a merge, by ``steps / FRAGMENTS`` at most."""


class RendezvousConfig(Setting):
    """The place at which jobs meet that come and go; each is an island, and is started by itself.

    Example:
        >>> RendezvousConfig(store="node0:29400").at_least
        2
    """

    store: str = Field(examples=["node0:29400"], pattern=r"^.+:\d+$")
    """HOST:PORT of ``slipstream store``, which outlives all jobs."""

    at_least: int = Field(default=2, ge=1)
    """Jobs that begin together; others may come later."""

    timeout: float = Field(default=60.0, gt=0)
    """Seconds after which the others go on without a job that is silent. A meeting is waited for,
    and takes, at most half of it."""


class LocalConfig(Setting):
    """Ranks train on their own, and meet rarely: every ``steps`` updates the mean of what they
    changed is one step of an outer optimizer (DiLoCo, https://arxiv.org/abs/2311.08105).

    Example:
        >>> LocalConfig(steps=32, fragments=4, delay=2).momentum
        0.8
    """

    auto: bool = False
    """Measure the first updates and the network, and choose ``steps``, ``fragments``, ``delay`` and
    ``codec``, or go on exchanging gradients; ``local: auto`` says the same."""

    updates: int | None = Field(default=None, ge=1, examples=[10000])
    """Updates of the whole run, if known, for ``auto``: too few meetings do not pay."""

    steps: int = Field(default=16, ge=1)
    """Updates of a rank from one meeting of a parameter to its next."""

    fragments: int = Field(default=1, ge=1)
    """Parts of the model that meet in turn, each of about as many bytes."""

    stretch: NonNegativeInt = 0
    """Updates beyond ``steps`` that a faster rank makes, instead of waiting for slower ones: its
    change counts by its updates. Let the loop end by ``session.all_updates``, as ranks make
    different numbers of updates."""

    delay: NonNegativeInt = 0
    """Updates that a rank goes on with while a fragment travels; none: it waits."""

    mix: float = Field(default=0.0, ge=0, lt=1)
    """Part of a rank's distance from the outer parameters that it keeps after a meeting. What it
    learned during the delay it keeps in any case."""

    lr: float = Field(default=0.7, gt=0)
    """Learning rate of the outer optimizer; 1 without momentum takes the mean of all ranks."""

    momentum: float = Field(default=0.8, ge=0, lt=1)
    """Nesterov momentum of the outer optimizer; papers have 0.9, for more ranks and longer runs."""

    warm_up: NonNegativeInt = 0
    """Updates of plain data parallelism first."""

    codec: Annotated[PlainCodecConfig, OneOf(family=CodecVariant)] | None = None
    """How changes are compressed before they are sent; null: not at all."""

    inner_state: Literal["kept", "averaged", "reset"] = "kept"
    """What becomes of the state of the user's optimizer at a meeting."""

    average_every: int = Field(default=1, ge=1)
    """Meetings of a fragment from one average of its optimizer state to the next."""

    rendezvous: Annotated[RendezvousConfig, BeforeValidator(_by_address)] | None = None
    """Where jobs meet that come and go; null: the ranks of one job meet, to its end."""

    offload: bool = False
    """Keep the outer parameters and their momentum in the memory of the host."""

    @property
    def averages_first(self) -> bool:
        """Whether gradients are averaged at the first updates."""
        return self.auto or self.warm_up > 0

    @model_validator(mode="after")
    def _open_or_given(self) -> LocalConfig:
        fields = type(self).model_fields
        given = [name for name in CHOSEN if getattr(self, name) != fields[name].default]
        if self.auto and given:
            raise ValueError(
                f"auto with {', '.join(given)}: auto chooses {', '.join(CHOSEN)}; leave them out, "
                "or leave auto out"
            )
        if self.updates is not None and not self.auto:
            raise ValueError("updates is only for auto, which asks if so many pay; leave it out")
        return self

    @model_validator(mode="after")
    def _comes_and_goes(self) -> LocalConfig:
        if self.rendezvous is not None and self.averages_first:
            raise ValueError(
                "rendezvous with " + ("auto" if self.auto else "warm_up") + ": jobs that come and "
                "go never average gradients; train the warm-up as one job without rendezvous, and "
                "go on from its checkpoint"
            )
        return self

    @model_validator(mode="after")
    def _in_turn(self) -> LocalConfig:
        if self.fragments > self.steps:
            raise ValueError(
                f"fragments {self.fragments} are more than steps {self.steps}; allowed: at most "
                "one fragment an update"
            )
        gap = self.steps // self.fragments
        if self.delay > gap:
            raise ValueError(
                f"delay {self.delay} is longer than the {gap} updates from one fragment to the "
                f"next (steps // fragments); allowed: 0 to {gap}"
            )
        if self.codec is not None and self.codec.takes_momentum:
            raise ValueError(
                f"codec {self.codec.kind} takes over the momentum of the optimizer, which here "
                "steps on its own; allowed: half, int8, int4, onebit, topk, powersgd"
            )
        return self


def _by_name(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


MeetingsConfig = Annotated[
    LocalConfig, BeforeValidator(_by_name, json_schema_input_type=LocalConfig | Literal["auto"])
]
"""Settings, or ``auto``."""
