"""``compose()``: the only place where techniques are installed, in one fixed order.

Each step calls the room that implements the technique, and adds its handle to one stack, which
undoes everything in reverse: if a later step fails, else when the session ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn

from slipstream.checks.heartbeat import Heartbeat
from slipstream.checks.own_view import UpdateCount
from slipstream.cluster.connect import Cluster
from slipstream.fusion.checks import useful_settings
from slipstream.fusion.optimizer import FusedOptimizer
from slipstream.local.model import LocalModel
from slipstream.local.open_training import OpenTraining
from slipstream.local.training import LocalTraining
from slipstream.memory import offload, recompute
from slipstream.parallel.dims import ParallelDims
from slipstream.parallel.model import ModelParallel
from slipstream.parallel.whole_model import WholeModel
from slipstream.precision.masters import everything
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session.accumulation import AccumulationWindow
from slipstream.session.checks import ACCELERATED, SHARDED, check_local_loader
from slipstream.session.computing import install_compute
from slipstream.session.exchanging import (
    GradientExchange,
    exchange_groups,
    install_exchange,
    install_local,
    local_search,
    search_space,
    shards_at_start,
)
from slipstream.session.given import Given
from slipstream.session.handles import Handle, HandleStack
from slipstream.session.loading import (
    dealt_by,
    install_balance,
    install_loader,
    useful_loading,
)
from slipstream.session.loop import TrainingLoop
from slipstream.session.members import Members
from slipstream.session.own_memory import check_own_memory
from slipstream.session.proof import Proof
from slipstream.session.session import M, O, Session
from slipstream.session.state import SessionState, agree_on_optimizer
from slipstream.session.step_hooks import StepHooks
from slipstream.session.tracing import NoTracing, Search, SessionTracer, Tracer
from slipstream.session.wrappers import Wrappers
from slipstream.strategy import Strategy
from slipstream.trace.recorder import Recorder
from slipstream.transport import broadcast
from slipstream.transport.consistency import broadcast_from_first
from slipstream.tuner.local_search import LocalSearch
from slipstream.tuner.search_space import SearchSpace
from slipstream.tuner.turns import SETTLING


def compose(
    model: M,
    optimizer: O,
    loader: Iterable[Any] | None,
    strategy: Strategy,
    cluster: Cluster,
    control: dist.ProcessGroup | None,
) -> Session[M, O]:
    """Install what ``strategy`` asks for; each step builds on those before it.

    If a step raises, model and optimizer are restored, except for values broadcast from the first
    rank. A model that ranks share stays sharded: the other ranks may not be there to gather it.
    """
    check_local_loader(strategy, loader)
    with HandleStack() as handles:
        modules = [*model.modules()]  # as the user made them: some are replaced
        ACCELERATED.update(modules)
        handles.callback(ACCELERATED.difference_update, modules)
        # First, so that installing is watched, and closed last, when all that communicates is done.
        given = _given(model, optimizer, strategy, cluster, control, handles)
        recorder, dims = given.recorder, given.dims
        if control is not None:
            check_own_memory(model, control)
        # Changes the shapes of parameters: before all that looks at them.
        whole = _model_parallel(given)
        # Before all that exchanges parameters while the optimizer steps: it works outside.
        step_hooks = StepHooks(optimizer)
        handles.defer(step_hooks.close)
        # Before precision: ranks start from values that are not rounded yet.
        groups = exchange_groups(given)
        if groups:
            broadcast.broadcast(whole.local_tensors, groups[0])
        agree_on_optimizer(given)
        shards = shards_at_start(given)
        if recorder is not None and strategy.trace.steps is not None:  # before it is installed
            recorder.meta["useful_compute"] = useful_settings(model, optimizer)
            recorder.meta |= useful_loading(given, loader)
        # Before precision and recompute, which wrap what it makes.
        computing = install_compute(given)
        # Before all that exchanges parameters while the optimizer steps: it works inside.
        fused_optimizer = _fused_optimizer(given)
        # Changes the types of parameters: before the engine lays out their gradients.
        shard_of = everything if shards is None else shards.shard_of
        precision = handles.add(
            ModelPrecision(model, optimizer, strategy.precision, strategy.compute, shard_of)
        )
        # Wraps the layers, which have their final form by now.
        _recompute(given)
        # Wraps recomputed blocks, so that it offloads their inputs.
        _offload(given)
        # After all that changes the model: its hooks see final gradients.
        exchange = install_exchange(given, groups, whole, precision, shards)
        # After the engine, which it takes over once ranks have warmed up.
        local = install_local(given, exchange, whole, precision)
        if fused_optimizer is not None:
            # Inside the steps of precision and of the shards, whose hooks are there by now.
            fused_optimizer.attach()
            computing.append(fused_optimizer)
        # After the engine, whose segments it describes.
        # At most one searches: `local` refuses what the other would search for.
        search = exchange.search or local_search(given, local)
        tracer = _tracer(given, exchange, search, computing)
        # After the tracer: where an epoch starts, an iteration begins.
        balance = install_balance(given, loader)
        session_loader = install_loader(given, loader, balance, tracer)
        balance = dealt_by(session_loader)
        # After all that changes the model: what changes later is refused.
        members = Members(model, optimizer)
        handles.defer(members.close)
        loop = TrainingLoop(
            given,
            exchange,
            window=AccumulationWindow(
                strategy.gradients.accumulate, dims.data_size, session_loader, balance
            ),
            precision=precision,
            tracer=tracer,
            members=members,
            local=local,
            proof=_proof(given, exchange, local),
            step_hooks=step_hooks,
        )
        if control is not None:
            handles.defer(Wrappers(model).close)
        session = Session(
            model,
            optimizer,
            strategy,
            cluster=cluster,
            dims=dims,
            loader=session_loader,
            loop=loop,
            state=SessionState(given, exchange, precision, session_loader, balance, local),
            handles=handles,
        )
    if isinstance(local, OpenTraining):
        session.join_others(local)
    return session


def _given(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    cluster: Cluster,
    control: dist.ProcessGroup | None,
    handles: HandleStack,
) -> Given:
    """Begin the watch over a session, and find what all steps share."""
    progress = UpdateCount()
    name = None if control is None else broadcast_from_first(uuid4().hex, control)
    heartbeat = _heartbeat(strategy, cluster, name, progress, handles)
    space = search_space(model, optimizer, strategy, cluster, control)
    # Before the rest, which records its spans with it.
    recorder = _recorder(strategy, cluster, space)
    return Given(
        model,
        optimizer,
        strategy,
        cluster,
        ParallelDims.of(cluster, strategy.parallel, control, recorder),
        recorder,
        space,
        handles,
        nullcontext if heartbeat is None else heartbeat.explaining,
        name,
        progress,
    )


def _heartbeat(
    strategy: Strategy,
    cluster: Cluster,
    name: str | None,
    progress: UpdateCount,
    handles: HandleStack,
) -> Heartbeat | None:
    """Watch that no rank hangs, if there are others."""
    checks = strategy.checks
    if name is None or checks.timeout is None:
        return None
    heartbeat = Heartbeat(
        cluster, name, progress, timeout=checks.timeout, folder=Path(checks.folder)
    )
    handles.push(heartbeat.leave)
    return heartbeat


def _recorder(strategy: Strategy, cluster: Cluster, space: SearchSpace) -> Recorder | None:
    """Make the recorder of a search, if anything is left open, else of the user's trace; None: of
    neither."""
    trace = strategy.trace
    if cluster.world_size > 1 and space.is_open:
        return Recorder(cluster.rank, SETTLING, space.first_window)
    if cluster.world_size > 1 and strategy.local is not None and strategy.local.auto:
        return Recorder(cluster.rank, SETTLING, LocalSearch.steps)
    return Recorder(cluster.rank, trace.skip, trace.steps) if trace.steps is not None else None


def _model_parallel(given: Given) -> WholeModel:
    """Cut the model among the ranks that share it, if the strategy says so."""
    config, handles = given.strategy.parallel, given.handles
    if not config.active:
        kind = WholeModel if given.strategy.local is None else LocalModel
        return handles.add(kind(given.model, given.optimizer))
    modules = [*given.model.modules()]
    SHARDED.update(modules)
    forget = partial(SHARDED.difference_update, modules)
    handles.defer(forget, on_error=lambda: None)  # other ranks may not be there to gather it
    model_parallel = ModelParallel(given.model, given.optimizer, config, given.dims, given.recorder)
    return handles.add(model_parallel, on_error=model_parallel.abandon)


def _fused_optimizer(given: Given) -> FusedOptimizer | None:
    chosen = given.strategy.compute.fuse_optimizer
    if not chosen:
        return None
    return given.handles.add(FusedOptimizer(given.optimizer, elementwise=chosen == "elementwise"))


def _recompute(given: Given) -> None:
    config, control = given.strategy.memory.recompute, given.dims.control
    if config is not None:
        agree = partial(broadcast_from_first, group=control) if control is not None else None
        given.handles.add(recompute(given.model, config, agree=agree))


def _offload(given: Given) -> None:
    config, cluster = given.strategy.memory.offload, given.cluster
    if config is not None:
        local_ranks = cluster.environment.local_world_size
        given.handles.add(offload(given.model, config, local_ranks=local_ranks, rank=cluster.rank))


def _proof(given: Given, exchange: GradientExchange, local: LocalTraining | None) -> Proof | None:
    """Compare ranks now and then, if the strategy asks for it."""
    if given.strategy.checks.every is None:
        return None
    proof = Proof(given, exchange, local)
    given.handles.defer(proof.close)
    return proof


def _tracer(
    given: Given, exchange: GradientExchange, search: Search | None, computing: Sequence[Handle]
) -> Tracer:
    if given.recorder is None:
        return NoTracing()
    tracer = SessionTracer(
        given,
        exchange.engine,
        search,
        lambda: [row for handle in computing for row in handle.report_rows()],
    )
    given.handles.defer(tracer.write, on_error=tracer.abandon)
    return tracer
