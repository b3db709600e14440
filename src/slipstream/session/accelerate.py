"""``accelerate()``: joins the ranks, agrees with them on the strategy, and has it composed.

Never installs anything itself: ``composition`` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.cluster.connect import Cluster, connect, from_environ
from slipstream.memory import check_offload
from slipstream.parallel.dims import mesh_of
from slipstream.session.checks import (
    check,
    device_of,
    fingerprint,
    warn_of_idle_rules,
    warn_of_slow_types,
)
from slipstream.session.compose import check_unused, compose
from slipstream.session.session import M, O, Session
from slipstream.strategy import Strategy
from slipstream.transport.consistency import agree


def accelerate(
    model: M,
    optimizer: O,
    loader: Iterable[Any] | None = None,
    strategy: Strategy | str | Path | Mapping[str, Any] | None = None,
) -> Session[M, O]:
    """Train ``model`` on all ranks of this run as ``strategy`` says.

    Works the same on one process (nothing is exchanged), under ``slipstream launch``, ``torchrun``,
    Slurm and Open MPI, and in a script that has made its process group itself. All ranks start from
    the first rank's parameters and buffers. An error leaves model and optimizer as they were, but
    for these values; only a model that ranks share may stay in parts, and is then refused.

    Args:
        model: a plain module, not wrapped in DistributedDataParallel; its names and classes stay.
        optimizer: holds parameters of ``model`` only.
        loader: any iterable of batches of this rank's share of the data; see ``Session.loader``.
        strategy: a Strategy, a file, the name of a preset or a mapping; None means what the
            environment variable SLIPSTREAM_STRATEGY names, else the defaults.

    Raises:
        StrategyError: the strategy is wrong, or does not fit this model.
        ModelError: the model or the optimizer cannot be accelerated.
        UsageError: the model is accelerated already.
        ClusterError: the environment describes no usable set of ranks.
        MismatchError: ranks disagree about the model or the strategy, or another rank failed here.

    Example:
        >>> import torch, slipstream
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batches = [torch.ones(4, 2)] * 3
        >>> with slipstream.accelerate(model, optimizer, batches) as session:
        ...     for batch in session.loader:
        ...         session.backward(session.model(batch).square().mean())
        ...         updated = session.step()
        >>> updated
        True
    """
    device = device_of(model)
    check_unused(model)
    cluster = connect(from_environ(), device)
    try:
        control = cluster.new_group(backend="gloo") if cluster.world_size > 1 else None
        agreed = _agree_on_strategy(model, optimizer, loader, strategy, cluster, control)
        session = compose(model, optimizer, loader, agreed, cluster, control)
    except BaseException:
        cluster.close()
        raise
    return session


def data_share(
    strategy: Strategy | str | Path | Mapping[str, Any] | None = None,
) -> tuple[int, int]:
    """Which share of the data is this rank's, and of how many: the rank and the world size, unless
    ranks share a model. For what comes before ``accelerate()``, such as a sampler; a session says
    the same as ``data_rank`` and ``data_size``.

    Args:
        strategy: as of ``accelerate()``.

    Raises:
        StrategyError: the strategy is wrong, or does not fit the number of ranks.
        ClusterError: the environment describes no usable set of ranks.

    Example:
        >>> import slipstream
        >>> slipstream.data_share()
        (0, 1)
    """
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        here = from_environ()
        rank, world_size = here.rank, here.world_size
    mesh = mesh_of(_strategy_of(strategy).parallel, world_size)
    return mesh.coordinates(rank)["data"], mesh.data


def _strategy_of(source: Strategy | str | Path | Mapping[str, Any] | None) -> Strategy:
    """``source``, or what the environment names."""
    named = os.environ.get("SLIPSTREAM_STRATEGY") or None
    return Strategy.load(named if source is None else source)


def _agree_on_strategy(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any] | None,
    source: Strategy | str | Path | Mapping[str, Any] | None,
    cluster: Cluster,
    control: dist.ProcessGroup | None,
) -> Strategy:
    """The strategy, fit for this model and the same on all ranks; else an error on all of them."""
    error: Exception | None = None
    common: dict[str, str] = {}
    strategy = Strategy()
    try:
        strategy = _strategy_of(source)
        mesh_of(strategy.parallel, 1 if control is None else dist.get_world_size(control))
        check(model, optimizer, strategy)
        if strategy.memory.offload is not None:
            neighbours = cluster.environment.local_world_size
            check_offload(model, strategy.memory.offload, neighbours, cluster.rank)
        if control is None or dist.get_rank(control) == 0:
            warn_of_idle_rules(model, strategy.gradients.codec)
            warn_of_slow_types(model, strategy.precision)
        common = fingerprint(model, optimizer, strategy) | {
            "the loader": "none" if loader is None else "given"
        }
    except Exception as caught:  # whatever it is, the other ranks wait to hear of it
        error = caught
    if control is not None:
        agree(common, control, error)
    elif error is not None:
        raise error
    return strategy
