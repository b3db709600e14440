"""The loader of a session: the user's, with what ``data`` asks for around it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from slipstream.calibration.rank_speed import rank_speeds
from slipstream.data.balance import SampleBalance, is_balanceable
from slipstream.data.cache import cached_loader
from slipstream.data.prefetch import is_prefetchable, prefetch
from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import ModelError, UsageError
from slipstream.session.given import Given
from slipstream.session.tracing import Tracer
from slipstream.transport.consistency import agree


def useful_loading(given: Given, loader: Iterable[Any] | None) -> dict[str, bool]:
    """Which settings of ``data`` the loader allows and does not have, for a trace."""
    data, dims = given.strategy.data, given.dims
    balanceable = is_balanceable(loader, dims.data_rank, dims.data_size)
    return {
        "prefetchable": data.prefetch is None and is_prefetchable(loader),
        "resizable": is_prefetchable(loader, streams=False),
        "balanceable": data.balance is None and balanceable,
    }


def install_balance(given: Given, loader: Iterable[Any] | None) -> SampleBalance | None:
    """Who deals the samples to the ranks, if that is asked for.

    Raises:
        UsageError: there is no loader.
    """
    config, dims, speeds = given.strategy.data.balance, given.dims, None
    if config is None:
        return None
    if loader is None:
        raise UsageError(
            "data.balance deals the samples of a loader; pass it: accelerate(model, optimizer, "
            "loader)"
        )
    where = {"rank": dims.data_rank, "ranks": dims.data_size}
    if config.speeds == "measured" and dims.control is not None:
        device = given.cluster.device
        speeds = rank_speeds(dims.control, device, dims.data_rank, dims.data_size)
    return given.handles.add(SampleBalance(loader, config, speeds=speeds, **where))


def dealt_by(loader: UnevenInputLoader | None) -> SampleBalance | None:
    """Find the balance that deals a session's batches out: its own, or that of the session whose
    loader it follows."""
    found = getattr(loader, "sample_balance", None)
    return found if isinstance(found, SampleBalance) else None


def install_loader(
    given: Given, loader: Iterable[Any] | None, balance: SampleBalance | None, tracer: Tracer
) -> UnevenInputLoader | None:
    """Install what the session iterates over: each technique reads from the one before it.
    Collective.

    Raises:
        UsageError: there is no loader for a setting that needs one.
        ModelError: the loader has no batch, or is none that a technique takes; on this rank.
        MismatchError: so it is on another rank, or only some ranks have a loader.
    """
    data, dims = given.strategy.data, given.dims
    made: UnevenInputLoader | None = None
    error: Exception | None = None
    try:
        idle = [name for name in ("cache", "prefetch") if getattr(data, name) is not None]
        if loader is None and idle:
            raise UsageError(
                f"data.{idle[0]} needs the loader; pass it: accelerate(model, optimizer, loader)"
            )
        if loader is not None:
            _check_has_batches(loader)
            made = _installed(given, loader, balance, tracer)
    except Exception as raised:  # which other ranks would wait for
        error = raised
    if dims.control is not None:
        agree({"the loader": "none" if loader is None else "given"}, dims.control, error)
    if error is not None:
        raise error
    return made


def _installed(
    given: Given, loader: Iterable[Any], balance: SampleBalance | None, tracer: Tracer
) -> UnevenInputLoader:
    data, cluster, handles = given.strategy.data, given.cluster, given.handles
    # First, as it says what a batch is.
    loader = loader if balance is None else balance.loader
    if data.cache is not None:
        loader, dataset = cached_loader(loader, data.cache)
        handles.add(dataset)
    reading: Callable[[], Mapping[str, int]] = dict
    skipping: Callable[[], AbstractContextManager[object]] = nullcontext
    if isinstance(readers := getattr(loader, "num_workers", None), int):
        reading = partial(dict, readers=readers)
    # After the cache, from which its workers read.
    if (config := data.prefetch) is not None:
        sharers = cluster.environment.local_world_size
        cores = max(len(os.sched_getaffinity(0)) // sharers, 1)
        ahead = handles.add(
            prefetch(loader, config, device=cluster.device, cores=cores, sharers=sharers)
        )
        loader, reading, skipping = ahead, ahead.reading, ahead.skipping
    loader = loader if balance is None else balance.over(loader)
    session_loader = UnevenInputLoader(
        loader,
        group=given.dims.data,
        recorder=given.recorder,
        on_start=tracer.iteration_begins,
        reading=reading,
        skipping=skipping,
        explaining=given.explaining,
        rates=tuple if given.strategy.local else partial(_rates, given.optimizer),
    )
    handles.callback(session_loader.detach)
    return session_loader


def _rates(optimizer: torch.optim.Optimizer) -> list[object]:
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [r.tolist() if isinstance(r, torch.Tensor) else r for r in rates]


def _check_has_batches(loader: Iterable[Any]) -> None:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    try:
        batches, samples = len(loader), len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:  # of a dataset or sampler without a length
        return
    if not batches:
        drops = ", drops the last batch unless it is full" * loader.drop_last
        raise ModelError(
            f"the loader has no batch on this rank: its dataset has {samples} samples, it takes "
            f"{loader.batch_size} at a time{drops}; give every rank at least one batch"
        )
