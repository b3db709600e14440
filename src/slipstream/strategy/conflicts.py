"""Settings of two groups that do not go together, each with the way out."""

from __future__ import annotations

from slipstream.strategy.checks import ChecksConfig
from slipstream.strategy.codec_choice import takes_momentum
from slipstream.strategy.compute import ComputeConfig
from slipstream.strategy.data import DataConfig
from slipstream.strategy.gradients import GradientsConfig
from slipstream.strategy.local import LocalConfig
from slipstream.strategy.memory import MemoryConfig
from slipstream.strategy.parallel import ParallelConfig
from slipstream.strategy.precision import HalfWeightsConfig, PrecisionConfig
from slipstream.strategy.split import OptimalConfig
from slipstream.strategy.transport import ShardedConfig

ALLOWED = ("flat", "direct", "shared_memory", "hierarchical")
"""Transports of what ranks change that train on their own."""


def beside_local(
    local: LocalConfig,
    gradients: GradientsConfig,
    checks: ChecksConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig | None,
    data: DataConfig,
) -> str | None:
    """Find what ranks cannot do that train on their own."""
    transport = gradients.transport
    if transport.kind not in ALLOWED:
        return (
            f"gradients.transport {transport.kind}: it would share updates that differ "
            f"from rank to rank, or search for an exchange that is rare; allowed: "
            f"{', '.join(ALLOWED)}"
        )
    if transport.between_hosts and local.auto:
        return (
            f"gradients.transport {transport.kind} and auto, which knows the cost of "
            "ranks that are alone; write local: {steps: ...}"
        )
    if transport.between_hosts and local.stretch:
        return (
            f"gradients.transport {transport.kind} and stretch: ranks of a host keep "
            "step with each other; leave out one"
        )
    if isinstance(gradients.split, OptimalConfig):
        return "gradients.split optimal, which is found while gradients are exchanged; leave out"
    if gradients.codec is not None:
        return "gradients.codec: gradients do not travel; write local: {codec: ...}"
    if local.rendezvous is not None and checks.every is not None and not checks.replay:
        return (
            f"rendezvous and checks.every {checks.every}, which would compare nothing: jobs that "
            "come and go are not compared; leave it out, or add checks.replay true"
        )
    if parallel.active:
        return "parallel: ranks that share a model exchange at every update; leave out one"
    if isinstance(precision, HalfWeightsConfig):
        return (
            "precision half_weights, which updates fp32 copies of its own; write "
            "precision: {kind: autocast}"
        )
    if data.balance is not None:
        return (
            "data.balance, whose weights are those of batches that are averaged together; leave "
            "out one"
        )
    return None


def beside_sharded(gradients: GradientsConfig) -> str | None:
    """Find a codec that needs whole gradients, beside ``gradients.transport sharded``."""
    if not (isinstance(gradients.transport, ShardedConfig) and takes_momentum(gradients.codec)):
        return None
    return (
        "gradients.transport sharded with the codec dgc, which applies momentum to whole "
        "gradients; use gradients: {transport: direct}, or another codec"
    )


def beside_replay(checks: ChecksConfig, compute: ComputeConfig, memory: MemoryConfig) -> str | None:
    """Find graphs that support one backward alone, beside ``checks.replay``."""
    if not checks.replay or checks.every is None:
        return None
    once = {
        "compute.compile": compute.compile,
        "memory.recompute keep": getattr(memory.recompute, "keep", ()),
    }
    for setting, used in once.items():
        if used:
            return (
                f"checks.replay with {setting}: a replay goes through a graph three times, and "
                "that one frees in its backward what it has used; leave one of the two out"
            )
    return None
