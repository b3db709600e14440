"""Refusals of DdpCodec."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.errors import ModelError, NonFiniteError, UsageError
from slipstream.strategy import AdaptiveConfig, CodecConfig, Strategy, TransportConfig


def checked(
    ddp: nn.Module,
    codec: CodecConfig | str | Mapping[str, object],
    transport: TransportConfig | str | Mapping[str, object],
    nonfinite: str | None,
) -> tuple[CodecConfig | None, TransportConfig]:
    """Load codec and transport as a strategy does, and refuse what DDP cannot do with them."""
    if not isinstance(ddp, DistributedDataParallel):
        raise ModelError(
            f"DdpCodec takes a model wrapped in DistributedDataParallel, not a "
            f"{type(ddp).__name__}; without DDP, name the codec in the strategy of accelerate()"
        )
    if nonfinite not in ("raise", "allow", None):
        raise UsageError(
            f"nonfinite {nonfinite!r}; allowed: 'raise' and 'allow': DDP's own loop makes the "
            "update, so that a hook cannot skip it; with 'allow', compare DdpCodec.skipped before "
            "and after backward(), or use accelerate(), which skips"
        )
    config = Strategy.load({"gradients": {"codec": codec}}).gradients.codec
    if isinstance(config, AdaptiveConfig):
        raise ModelError(
            "DdpCodec has no segments, among which adaptive chooses; name the codec "
            f"itself, e.g. {config.codec.kind!r}, or use accelerate()"
        )
    way = Strategy.load({"gradients": {"transport": transport}}).gradients.transport
    if way.searches:
        raise ModelError(
            "DdpCodec cannot search for a transport: DDP does not say when an update is over; "
            "name one of the others ('flat', 'direct'), or use accelerate()"
        )
    if not way.whole_gradients:
        raise ModelError(
            f"the transport {way.kind} gives each rank a part of the averages, and DDP needs them "
            "whole; name one of the others ('flat', 'direct'), or use accelerate()"
        )
    return config, way


def other_parameters(difference: str) -> ModelError:
    """The error where DDP averages more or fewer parameters than before."""
    return ModelError(
        f"DDP averages other parameters than when DdpCodec was made: {difference}; make a new "
        "DdpCodec for each DistributedDataParallel (that of the same model can load this one's "
        "state_dict()), and register it there alone"
    )


def nonfinite_gradients(of_ranks: Mapping[int, str], first: str, update: int) -> NonFiniteError:
    """The error of gradients that are infinite or NaN: ``of_ranks`` has the ranks whose own are,
    with the first parameter; ``first`` is that of the exchange, where only the average is."""
    before = "; ".join(f"that of {name} on rank {rank}" for rank, name in of_ranks.items())
    return NonFiniteError(
        f"update {update}: gradients are infinite or NaN: "
        + (f"{before}, before the exchange" if before else f"the average of {first} and others")
        + ". No rank has made the update. Look at the loss and the batch there. Where a GradScaler "
        "is to skip it: DdpCodec(..., loss_scale=scaler.get_scale); nonfinite='allow' averages them"
    )
