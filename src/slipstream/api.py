"""``accelerate()``: the only place where techniques are composed, in one fixed order.

Never implements one: each line calls the room that does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from slipstream.adaptive import measure
from slipstream.axes import Axes, mesh_of
from slipstream.checks import check, device_of, facts, warn_of_idle_rules, warn_of_slow_types
from slipstream.cluster.connect import Cluster, connect, from_environ
from slipstream.codecs import Ranks
from slipstream.comm import flat, fused
from slipstream.comm.agreement import agree, of_first
from slipstream.comm.channel import STAGES, Channel
from slipstream.data.even import EvenLoader
from slipstream.errors import UsageError
from slipstream.gradients.coded import Coding
from slipstream.gradients.engine import Engine
from slipstream.gradients.shipment import as_wide_as_gradients, parameters_of
from slipstream.lent import Lent
from slipstream.live_split import SETTLING, LiveSplit
from slipstream.memory import check_offload, offload, recompute
from slipstream.precision.model_precision import ModelPrecision
from slipstream.recording import Recording
from slipstream.session import Installed, Session
from slipstream.shared_model import SharedModel
from slipstream.strategy import Adaptive, ByBytes, Optimal, Strategy, codec_of
from slipstream.trace.recorder import Recorder

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741 - the field's letter for it

_accelerated: WeakSet[nn.Module] = WeakSet()
_partial: WeakSet[nn.Module] = WeakSet()
"""Models that ranks shared, and that were not made whole again."""


def accelerate(
    model: M,
    optimizer: O,
    loader: Iterable[Any] | None = None,
    strategy: Strategy | str | Path | Mapping[str, Any] | None = None,
) -> Session[M, O]:
    """Train ``model`` on all ranks of this run as ``strategy`` says.

    Works the same on one process (nothing is exchanged), under ``slipstream launch``, ``torchrun``,
    Slurm and Open MPI, and in a script that has made its process group itself. All ranks start from
    the first rank's parameters and buffers.

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
    if any(module in _accelerated for module in model.modules()):
        raise UsageError(
            "this model is accelerated already; close() its session before a second accelerate()"
        )
    if any(module in _partial for module in model.modules()):
        raise UsageError(
            "this model was shared between ranks by a session that ended with an error, so this "
            "rank has a part of it only; build it anew, and load a checkpoint"
        )
    cluster = connect(from_environ(), device)
    try:
        control = cluster.new_group(backend="gloo") if cluster.world_size > 1 else None
        agreed = _agree_on_strategy(model, optimizer, loader, strategy, cluster, control)
        session = _compose(model, optimizer, loader, agreed, cluster, control)
    except BaseException:
        cluster.close()
        raise
    return session


def _release(modules: list[nn.Module], *, whole: bool) -> None:
    """A session is over; the model is ``whole`` on this rank, or was shared and is not."""
    _accelerated.difference_update(modules)
    if whole:
        _partial.difference_update(modules)


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
        common = facts(model, optimizer, strategy) | {
            "the loader": "none" if loader is None else "given"
        }
    except Exception as caught:  # whatever it is, the other ranks wait to hear of it
        error = caught
    if control is not None:
        agree(common, control, error)
    elif error is not None:
        raise error
    return strategy


def _compose(
    model: M,
    optimizer: O,
    loader: Iterable[Any] | None,
    strategy: Strategy,
    cluster: Cluster,
    control: dist.ProcessGroup | None,
) -> Session[M, O]:
    """Install the rooms: what comes first is what later ones build on."""
    modules = list(model.modules())  # the user's, some of which are replaced
    search = strategy.gradients.split if control is not None else None
    recorder = None  # first, since every room gets it
    if isinstance(search, Optimal):
        recorder = Recorder(cluster.rank, SETTLING, search.steps)
    elif strategy.trace.steps is not None:
        recorder = Recorder(cluster.rank, strategy.trace.skip, strategy.trace.steps)

    axes = Axes.of(cluster, strategy.parallel, control, recorder)
    shared = None  # before the engine, as it changes the shapes of parameters
    if strategy.parallel.active:
        _partial.update(modules)
        shared = SharedModel(model, optimizer, strategy.parallel, axes, recorder)

    channel = engine = live_split = verdict = None
    codec = strategy.gradients.codec if axes.data is not None else None
    stages = STAGES.get(cluster.device.type, 1) if codec is not None else 1
    groups = [group for _ in range(1 + stages) if (group := axes.new_data_group()) is not None]
    if groups:  # one start for all, in full width
        held = shared.held if shared is not None else [*model.parameters(), *model.buffers()]
        fused.broadcast(held, groups[0])
    # before the engine, as it changes the types of parameters
    precision = ModelPrecision(model, optimizer, strategy.precision, strategy.compute)
    recomputed = None  # around layers as they are by now
    if strategy.memory.recompute is not None:
        same = partial(of_first, group=control) if control is not None else None
        recomputed = recompute(model, strategy.memory.recompute, agree=same)

    offloader = None  # around what is computed again, whose inputs leave then
    if strategy.memory.offload is not None:
        neighbours = cluster.environment.local_world_size
        offloader = offload(
            model, strategy.memory.offload, local_ranks=neighbours, rank=cluster.rank
        )

    trainables = parameters_of(model, trainable=True, shares=shared.shares if shared else None)
    if shared is not None:
        trainables = [t for t in trainables if shared.holds(t.name)]
    if precision.exchanges_wide:
        trainables = as_wide_as_gradients(trainables)
    lent = Lent(optimizer, trainables, codec, axes.data_size)
    if axes.data is not None:
        direct, *staged = groups
        channel = Channel(direct, staged, cluster.device, recorder)
        if isinstance(codec, Adaptive):
            verdict = measure(codec, cluster)
        coding = Coding(
            partial(codec_of, codec),
            Ranks(axes.data_rank, axes.data_size),
            lent.momenta,
            verdict.pays if verdict else lambda num_bytes: True,
            narrow=not precision.exchanges_wide,
        )
        engine = Engine(  # its hooks are the last on the parameters
            trainables,
            parameters_of(model, trainable=False),
            model.buffers,
            split=ByBytes() if isinstance(search, Optimal) else strategy.gradients.split,
            # in a pipeline the last micro-batch's backward is not over before the sums of what
            # stages share
            overlap=strategy.gradients.overlap and strategy.parallel.pipeline is None,
            transport=flat.start_all_reduce,
            coding=coding,
            channel=channel,
            control=axes.data,
            anywhere=axes.anywhere,
            recorder=recorder,
        )
        engine.load_codec_state(lent.buffers)

        if isinstance(search, Optimal):
            live_split = LiveSplit(engine, cluster, axes.data, strategy, search.steps)

    recording = even = None
    if recorder is not None:
        wish, device, share = strategy.trace, cluster.device, axes.mesh.share
        recording = Recording(recorder, model, wish, device, control, live_split, share)
    if loader is not None:  # after the engine: a filler batch is one that the engine does not count
        on_start = recording.iteration_begins if recording is not None else None
        even = EvenLoader(loader, group=axes.data, recorder=recorder, on_start=on_start)
    _accelerated.update(modules)
    return Session(
        model,
        optimizer,
        Installed(
            cluster=cluster,
            strategy=strategy,
            trainable_names=tuple(t.name for t in trainables),
            engine=engine,
            channel=channel,
            axes=axes,
            shared=shared,
            precision=precision,
            recomputed=recomputed,
            loader=even,
            live_split=live_split,
            lent=lent,
            verdict=verdict,
            recording=recording,
            offloader=offloader,
            on_close=partial(_release, modules),
        ),
    )
