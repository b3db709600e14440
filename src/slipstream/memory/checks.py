"""Refusals of recomputation and offload, found before anything is installed."""

from __future__ import annotations

from torch import nn

from slipstream.errors import StrategyError
from slipstream.memory.offload.offload import check_offload
from slipstream.memory.recompute.recompute import check_recompute
from slipstream.strategy import CheckpointsConfig, EveryConfig, Strategy


def check_memory(model: nn.Module, strategy: Strategy, *, local_ranks: int, rank: int) -> None:
    """Refuse what does not fit the model, this host, or a pipeline.

    Raises:
        StrategyError, UsageError, OffloadError: as of ``recompute`` and ``offload``.
    """
    recompute, offload = strategy.memory.recompute, strategy.memory.offload
    if recompute is not None:
        check_recompute(model, recompute)
        one_by_one = isinstance(recompute, CheckpointsConfig) or (
            isinstance(recompute, EveryConfig) and recompute.every == 1
        )
        if strategy.parallel.pipeline is not None and not one_by_one:
            raise StrategyError(
                f"memory.recompute {recompute.kind} with parallel.pipeline: a region of several "
                "blocks may extend across two stages; allowed: {every: 1} and checkpoints"
            )
    if offload is not None:
        check_offload(model, offload, local_ranks, rank)
