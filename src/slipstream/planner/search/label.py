"""Short names of strategies."""

from __future__ import annotations

from slipstream.strategy import (
    ByBytesConfig,
    ByIndexConfig,
    ByLayersConfig,
    ByPercentConfig,
    CodecConfig,
    FlatConfig,
    HalfWeightsConfig,
    ShardedConfig,
    SplitConfig,
    Strategy,
    TransportConfig,
    late_by,
)


def label(strategy: Strategy) -> str:
    """A strategy's way to exchange gradients in few words, and what else they depend on.

    Example:
        >>> label(Strategy()), label(Strategy.load("sequential")), label(Strategy.load("ddp"))
        ('by_bytes 4 (first 1, last 1)', 'single, no overlap', 'by_bytes 25 (first 1)')
    """
    gradients = strategy.gradients
    if (local := strategy.local) is not None:
        words = [f"local, {local.steps} steps"]
        words += [f"{local.fragments} fragments"] if local.fragments > 1 else []
        words += [f"delay {local.delay}"] if local.delay else []
        words += [local.codec.kind] if local.codec else []
        return ", ".join(words)
    words = [_split_label(gradients.split)]
    words += [_transport_label(gradients.transport)] if gradients.transport != FlatConfig() else []
    words += [] if gradients.overlap else ["no overlap"]
    words += [_codec_label(gradients.codec)] if gradients.codec else []
    words += [f"accumulate {gradients.accumulate}"] if gradients.accumulate > 1 else []
    words += [strategy.precision.kind] if isinstance(strategy.precision, HalfWeightsConfig) else []
    words += [name for name, value in strategy.compute if value]
    words += [name for name, value in strategy.data if value]
    return ", ".join(words)


def _transport_label(transport: TransportConfig) -> str:
    replicated = transport.replicated if isinstance(transport, ShardedConfig) else 0.0
    return transport.kind + (f" ({replicated:.0%} replicated)" if replicated else "")


def _codec_label(codec: CodecConfig) -> str:
    late = late_by(codec)
    return codec.kind + (f" from update {late}" if late else "")


def _split_label(split: SplitConfig) -> str:
    match split:
        case ByBytesConfig():
            ends = {"first": split.first_megabytes, "last": split.last_megabytes}
            special = ", ".join(f"{name} {size:g}" for name, size in ends.items() if size)
            return f"by_bytes {split.megabytes:g}" + (f" ({special})" if special else "")
        case ByPercentConfig():
            return "by_percent " + "/".join(f"{percent:g}" for percent in split.percents)
        case ByIndexConfig():
            few = "/".join(map(str, split.last[:6]))
            return f"by_index {few}" + (f"/... ({len(split.last)})" if split.last[6:] else "")
        case ByLayersConfig():
            return f"by_layers {split.layers}"
    return split.kind
