"""Refusals of loaders for training that meets rarely, found before anything is installed."""

from __future__ import annotations

from slipstream.errors import StrategyError
from slipstream.strategy import Strategy


def check_loader(strategy: Strategy, loader: object) -> None:
    """Refuse a loader of which all ranks must take a batch at the same time.

    Raises:
        StrategyError: says what to do with it.
    """
    local = strategy.local
    if local is None or loader is None:
        return
    if local.stretch:
        raise StrategyError(
            "local.stretch with a loader: ranks of different speed take different numbers of "
            "batches, and session.loader keeps them in step; leave it out of accelerate(), and "
            "iterate over it by yourself while session.all_updates is below what you want"
        )
    if local.rendezvous is not None:
        raise StrategyError(
            "local.rendezvous with a loader: which share of the data a job has is known after "
            "accelerate(); make the loader then, by session.data_rank and session.data_size"
        )
