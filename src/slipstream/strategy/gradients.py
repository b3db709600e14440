"""Settings of how ranks exchange gradients. ``gradients`` and ``codecs`` implement them."""

from __future__ import annotations

from pydantic import Field

from slipstream.strategy.codec_choice import CodecConfig
from slipstream.strategy.setting import Setting
from slipstream.strategy.split import ByBytesConfig, SplitConfig
from slipstream.strategy.transport import DEFAULT_TRANSPORT, TransportConfig


class GradientsConfig(Setting):
    """Settings of how gradients are averaged over ranks.

    Example:
        >>> GradientsConfig(split="per_layer", overlap=False).accumulate
        1
    """

    split: SplitConfig = ByBytesConfig()
    """Which gradients share one exchange."""

    overlap: bool = True
    """Exchange during backward, not after it."""

    transport: TransportConfig = DEFAULT_TRANSPORT
    """How a segment travels between ranks."""

    codec: CodecConfig | None = None
    """How gradients are compressed before they are sent; null: not at all."""

    accumulate: int = Field(default=1, ge=1)
    """Backward passes per update.

    Only the last of them exchanges gradients.
    """
