"""``checks``: what a run is watched for, so that it neither hangs nor trains on wrong numbers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipstream.strategy.duration import Duration
from slipstream.strategy.setting import Setting


class ChecksConfig(Setting):
    """Settings of what a run is watched for.

    Example:
        >>> ChecksConfig(timeout="30s").timeout
        30.0
    """

    timeout: Duration | None = Field(default=60.0, examples=["30s"])
    """Duration within which a run that hangs ends with an error; null: the process groups' timeout.

    A run hangs where a rank is silent, or where ranks wait and none of the others computes, reads,
    writes or moves on in its script. Before the second update ten times as long is allowed.
    """

    folder: str = Field(default="slipstream-autopsy", min_length=1)
    """Where the autopsy of a run that hung is written."""

    nonfinite: Literal["raise", "skip", "allow"] = "raise"
    """Whether gradients that are infinite or NaN end the run, skip the update, or update.

    Where a loss scale is at work, such updates are skipped.
    """

    every: int | None = Field(default=None, ge=1, examples=[100])
    """Updates after which ranks prove that they have not drifted apart; null: never.

    They compare digests of parameters, buffers and optimizer, and compute the average of a sampled
    segment a second way.
    """

    replay: bool = False
    """Compute the gradients of the updates of ``every`` twice, and compare their bits."""
