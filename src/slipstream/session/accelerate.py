"""``accelerate()``: join the ranks, validate the strategy on all of them, and compose a session."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slipstream.cluster.connect import connect, from_environ
from slipstream.errors import warn
from slipstream.parallel.dims import mesh_of
from slipstream.session.checks import check_unused, device_of
from slipstream.session.compose import compose
from slipstream.session.session import M, O, Session
from slipstream.session.validation import Validation, validate
from slipstream.strategy import Strategy
from slipstream.transport.consistency import agree

StrategySource = Strategy | str | Path | Mapping[str, Any] | None
"""A strategy, a file, the name of a preset or a mapping; None: what the environment names."""


def accelerate(
    model: M, optimizer: O, loader: Iterable[Any] | None = None, strategy: StrategySource = None
) -> Session[M, O]:
    """Train ``model`` on all ranks of this run as ``strategy`` says.

    Works the same on one process (nothing is exchanged), under ``slipstream launch``, ``torchrun``,
    Slurm and Open MPI, and in a script that has made its own process group. All ranks start from
    the first rank's parameters and buffers. An error restores model and optimizer, except for these
    values; a model that ranks share may stay sharded, and is refused from then on.

    Args:
        model: a plain module, not wrapped in DistributedDataParallel; names and classes stay.
        optimizer: holds parameters of ``model`` only.
        loader: any iterable of batches of this rank's share of the data; see ``Session.loader``.
        strategy: a Strategy, a file, the name of a preset or a mapping; None: the one that the
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
        agreed, validation = Strategy(), Validation({}, ())
        error: Exception | None = None
        try:
            agreed = strategy_of(strategy)
            validation = validate(model, optimizer, loader, agreed, cluster)
            for text in validation.warnings if cluster.rank == 0 else ():
                warn(text)
        except Exception as caught:  # of any kind: the other ranks wait for this one's answer
            error = caught
        if control is not None:
            agree(validation.fingerprint, control, error)
        elif error is not None:
            raise error
        return compose(model, optimizer, loader, agreed, cluster, control)
    except BaseException:
        cluster.close()
        raise


def data_share(strategy: StrategySource = None) -> tuple[int, int]:
    """Which share of the data this rank trains on, and the number of shares: the rank and the world
    size, unless ranks share a model. For what is built before ``accelerate()``, such as a sampler;
    a session has the same numbers as ``data_rank`` and ``data_size``.

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
        environment = from_environ()
        rank, world_size = environment.rank, environment.world_size
    mesh = mesh_of(strategy_of(strategy).parallel, world_size)
    return mesh.coordinates(rank)["data"], mesh.data


def strategy_of(source: StrategySource) -> Strategy:
    """The strategy of ``source``, or what SLIPSTREAM_STRATEGY names, else the defaults."""
    named = os.environ.get("SLIPSTREAM_STRATEGY") or None
    return Strategy.load(named if source is None else source)
