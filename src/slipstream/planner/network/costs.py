"""Costs of codecs, 16-bit weights and contention, beside the curves of exchanges."""

from __future__ import annotations

from pydantic import Field

from slipstream.planner.network.curve import Seconds
from slipstream.strategy.setting import FrozenModel


class CodecCost(FrozenModel):
    """The cost of a codec, measured on the thread that computes.

    ``ratio`` is the share of the bytes that is still sent; ``encode`` and ``decode`` are seconds
    for each byte of the gradients, ``startup`` seconds for each segment, once each way.
    """

    ratio: float = Field(gt=0)
    encode: Seconds = 0.0
    decode: Seconds = 0.0
    startup: Seconds = 0.0


class HalfSpeed(FrozenModel):
    """Times as fast as in fp32 that blocks compute under ``half_weights`` in bf16.

    Example:
        >>> HalfSpeed(dense=2.0, convolutional=1.5).of(convolutions=0.0)
        2.0
    """

    dense: float = Field(gt=0)
    convolutional: float = Field(gt=0)

    def of(self, convolutions: float) -> float:
        """Give the speed of a model, ``convolutions`` of whose layers are such."""
        return 1 / (convolutions / self.convolutional + (1 - convolutions) / self.dense)


class Contention(FrozenModel):
    """Slowdown of computing and exchanging by each other; 0 where there is none.

    Computing takes ``1 + compute_slowdown`` times as long while an exchange runs. Beside computing
    the latency of an exchange is ``1 + latency_slowdown`` times as long (processes wait for a core
    at every hop), and its transfer ``1 + exchange_slowdown`` times. While another exchange
    transfers its bytes, the latency of an exchange is at least ``queue_share`` of that transfer,
    but at most ``queue_seconds`` (messages queue behind each other). Many exchanges in flight
    together take ``1 + crowd_slowdown`` times as long as their bytes at the rate of the link: each
    rank sends to all others at once, and the last message is late (measured of direct sends).
    ``noise`` is the standard deviation of the logarithm of such a factor from one measurement to
    the next; None: it was not measured.
    """

    compute_slowdown: float = Field(ge=0)
    exchange_slowdown: float = Field(ge=0)
    latency_slowdown: float = Field(ge=0)
    queue_share: float = Field(ge=0, le=1)
    queue_seconds: float = Field(ge=0)
    crowd_slowdown: float = Field(ge=0, default=0.0)
    noise: float | None = Field(ge=0, default=None)
