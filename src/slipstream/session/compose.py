"""``compose()``: the only place where techniques are installed, in one fixed order.

Each step calls the room that implements the technique, and adds its handle to one stack, which
undoes everything in reverse: if a later step fails, else when the session ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from slipstream.calibration.adaptive_codec import measure
from slipstream.cluster.connect import Cluster
from slipstream.codecs import Ranks
from slipstream.errors import UsageError
from slipstream.fusion.checks import useful_settings
from slipstream.fusion.optimizer import FusedOptimizer
from slipstream.gradients.compressed import CompressionPlan
from slipstream.gradients.engine import Engine
from slipstream.gradients.interface import GradientEngine
from slipstream.gradients.momentum import MomentumCorrection
from slipstream.gradients.segments import NamedParameter, as_wide_as_gradients, parameters_of
from slipstream.gradients.shares import Shares, cut_first
from slipstream.gradients.single import SingleReplicaEngine
from slipstream.memory import offload, recompute
from slipstream.parallel.dims import ParallelDims
from slipstream.parallel.full_state import FullState
from slipstream.parallel.model import ModelParallel
from slipstream.precision.masters import everything
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session.accumulation import AccumulationWindow
from slipstream.session.computing import install_compute
from slipstream.session.handles import Handle, HandleStack
from slipstream.session.loading import install_balance, install_loader, useful_loading
from slipstream.session.loop import TrainingLoop
from slipstream.session.members import Members
from slipstream.session.report import adaptive_rows, hosts_rows
from slipstream.session.session import M, O, Session
from slipstream.session.state import SessionState
from slipstream.session.step_hooks import StepHooks
from slipstream.session.tracing import NoTracing, SessionTracer, Tracer
from slipstream.session.wrappers import Wrappers
from slipstream.sharding.gather import ParameterGather
from slipstream.sharding.model import ShardedModel
from slipstream.strategy import (
    Adaptive,
    Auto,
    ByBytes,
    Codec,
    Optimal,
    Sharded,
    Strategy,
    codec_of,
)
from slipstream.trace.recorder import Recorder
from slipstream.transport import broadcast
from slipstream.transport.channel import STAGES, Channel
from slipstream.transport.consistency import any_of, broadcast_from_first, meet
from slipstream.transport.hierarchical import HierarchicalTransport
from slipstream.transport.hosts import Rails
from slipstream.transport.place import Place, find_place
from slipstream.transport.switch import Switch
from slipstream.transport.transport import Transport, make_transport
from slipstream.tuner.online_search import OnlineSearch
from slipstream.tuner.search_space import SETTLING, SearchSpace

_accelerated: WeakSet[nn.Module] = WeakSet()
_sharded: WeakSet[nn.Module] = WeakSet()
"""Models left sharded by a session that ended with an error."""


def check_unused(model: nn.Module) -> None:
    """Refuse a model that a session uses, or has left sharded.

    Raises:
        UsageError: says which.
    """
    if any(module in _accelerated for module in model.modules()):
        raise UsageError(
            "this model is accelerated already; close() its session before a second accelerate()"
        )
    if any(module in _sharded for module in model.modules()):
        raise UsageError(
            "a session that ended with an error has left this model sharded: this rank has only a "
            "part of it; build it anew, and load a checkpoint"
        )


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
    with HandleStack() as handles:
        modules = [*model.modules()]  # as the user made them: some are replaced
        _accelerated.update(modules)
        handles.callback(_accelerated.difference_update, modules)
        # First, because later steps record their spans with it.
        space = _search_space(strategy, cluster, control)
        recorder = _recorder(strategy, cluster, space)
        dims = ParallelDims.of(cluster, strategy.parallel, control, recorder)
        given = _Given(model, optimizer, strategy, cluster, dims, recorder, space, handles)
        # Changes the shapes of parameters: before all that looks at them.
        full_state = _model_parallel(given)
        # Before all that exchanges parameters while the optimizer steps: it works outside.
        step_hooks = handles.add(StepHooks(optimizer))
        # Before precision: ranks start from values that are not rounded yet.
        groups = _same_start(given, full_state)
        shares = _shares(given)
        if recorder is not None and strategy.trace.steps is not None:  # before it is installed
            recorder.meta["useful_compute"] = useful_settings(model, optimizer)
            recorder.meta |= useful_loading(loader, strategy.data, dims)
        # Before precision and recompute, which wrap what it makes.
        computing = install_compute(model, optimizer, strategy.compute, handles)
        # Before all that exchanges parameters while the optimizer steps: it works inside.
        fused_optimizer = _fused_optimizer(given)
        # Changes the types of parameters: before the engine lays out their gradients.
        share_of = everything if shares is None else shares.share_of
        precision = handles.add(
            ModelPrecision(model, optimizer, strategy.precision, strategy.compute, share_of)
        )
        # Wraps the layers, which have their final form by now.
        _recompute(given)
        # Wraps recomputed blocks, so that it offloads their inputs.
        _offload(given)
        trainables = _trainables(given, full_state, precision)
        # Before the codecs, which compress between hosts alone where a transport knows these.
        transports = _transports(given, groups)
        codec = _codec(given, transports)
        # Before the codecs, which apply the momentum that they take over from the optimizer.
        momentum_correction = MomentumCorrection(optimizer, trainables, codec, dims.data_size)
        handles.callback(momentum_correction.give_back)
        any_rank = dims.any_rank
        if shares is not None and control is not None:
            any_rank = partial(any_of, group=control)
        # After all that changes the model: its hooks see final gradients.
        engine, search = _exchange(
            given, transports, trainables, momentum_correction, precision, shares, any_rank
        )
        # After the engine, which knows the order of the parameters.
        if shares is not None:
            full_state = _sharded_model(given, transports[0], trainables, shares, engine, precision)
        # Inside the steps of precision and of the shares, whose hooks are there by now.
        if fused_optimizer is not None:
            fused_optimizer.attach()
        # After the engine, whose segments it describes.
        if fused_optimizer is not None:
            computing.append(fused_optimizer)
        tracer = _tracer(given, engine, search, computing)
        # After the tracer: where an epoch starts, an iteration begins.
        balance = install_balance(loader, strategy.data, cluster, dims, handles)
        session_loader = install_loader(
            loader, balance, strategy.data, cluster, dims, recorder, tracer, handles
        )
        window = AccumulationWindow(
            strategy.gradients.accumulate, dims.data_size, session_loader, balance
        )
        loop = TrainingLoop(
            model,
            optimizer,
            window,
            engine,
            precision,
            momentum_correction,
            dims,
            full_state,
            any_rank,
            tracer,
            # After all that changes the model: what changes later is refused.
            handles.add(Members(model, optimizer)),
            cluster.device,
        )
        loop.attach(step_hooks)
        if control is not None:
            handles.add(Wrappers(model))
        names = [t.name for t in trainables]
        state = SessionState(model, names, engine, dims, search, precision, codec, balance)
        return Session(
            model,
            optimizer,
            strategy,
            cluster=cluster,
            dims=dims,
            loader=session_loader,
            loop=loop,
            state=state,
            full_state=full_state,
            handles=handles,
        )


@dataclass(frozen=True, slots=True)
class _Given:
    """What every step is given."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    cluster: Cluster
    dims: ParallelDims
    recorder: Recorder | None
    space: SearchSpace
    handles: HandleStack

    @property
    def codec(self) -> Codec | None:
        """Of the gradients; None also where there are no other ranks to exchange them with."""
        return self.strategy.gradients.codec if self.dims.data is not None else None


def _search_space(
    strategy: Strategy, cluster: Cluster, control: dist.ProcessGroup | None
) -> SearchSpace:
    """What the strategy leaves open; ``auto`` asks which ranks share a host, a collective."""
    place = Place.apart(cluster.device, cluster.world_size)
    searches = isinstance(strategy.gradients.transport, Auto) and not strategy.parallel.active
    if searches and control is not None and cluster.device.type == "cpu":
        place = find_place(cluster.device, control)
    return SearchSpace.of(strategy, place)


def _recorder(strategy: Strategy, cluster: Cluster, space: SearchSpace) -> Recorder | None:
    """For the search for the fastest exchange, else for the user's trace."""
    trace = strategy.trace
    if space.is_open and cluster.world_size > 1:
        return Recorder(cluster.rank, SETTLING, space.first_window)
    return Recorder(cluster.rank, trace.skip, trace.steps) if trace.steps is not None else None


def _model_parallel(given: _Given) -> FullState:
    config, handles = given.strategy.parallel, given.handles
    if not config.active:
        return handles.add(FullState(given.model, given.optimizer))
    modules = [*given.model.modules()]
    _sharded.update(modules)
    handles.defer(partial(_sharded.difference_update, modules), on_error=_leave_sharded)
    model_parallel = ModelParallel(given.model, given.optimizer, config, given.dims, given.recorder)
    return handles.add(model_parallel, on_error=model_parallel.abandon)


def _leave_sharded() -> None:
    """After an error the other ranks may not be there to gather the model."""


def _same_start(given: _Given, full_state: FullState) -> list[dist.ProcessGroup]:
    """Broadcast the first rank's values. Returns the groups for gradients: one for single
    collectives, and one for each thread that encodes."""
    stages = STAGES.get(given.cluster.device.type, 1) if given.codec is not None else 1
    made = [given.dims.new_data_group() for _ in range(1 + stages)]
    groups = [group for group in made if group is not None]
    if groups:
        broadcast.broadcast(full_state.local_tensors, groups[0])
    return groups


def _fused_optimizer(given: _Given) -> FusedOptimizer | None:
    chosen = given.strategy.compute.fuse_optimizer
    if not chosen:
        return None
    return given.handles.add(FusedOptimizer(given.optimizer, elementwise=chosen == "elementwise"))


def _recompute(given: _Given) -> None:
    config, control = given.strategy.memory.recompute, given.dims.control
    if config is not None:
        agree = partial(broadcast_from_first, group=control) if control is not None else None
        given.handles.add(recompute(given.model, config, agree=agree))


def _offload(given: _Given) -> None:
    config, cluster = given.strategy.memory.offload, given.cluster
    if config is not None:
        local_ranks = cluster.environment.local_world_size
        given.handles.add(offload(given.model, config, local_ranks=local_ranks, rank=cluster.rank))


def _trainables(
    given: _Given, full_state: FullState, precision: ModelPrecision
) -> list[NamedParameter]:
    """The parameters whose gradients this rank exchanges, in the type in which these travel."""
    whole = parameters_of(given.model, trainable=True, shares=full_state.largest_shapes)
    trainables = [t for t in whole if full_state.is_local(t.name)]
    return as_wide_as_gradients(trainables) if precision.exchanges_wide else trainables


def _transports(given: _Given, groups: Sequence[dist.ProcessGroup]) -> list[Transport]:
    """One on each group: what the strategy names, or what it lets a search choose among."""
    first, *others = given.space.transports
    make: Callable[..., Transport] = Switch if others else make_transport
    return [make(first, group) for group in groups]


def _rails(transports: Sequence[Transport]) -> Rails | None:
    """Between hosts, where the transport exchanges between these apart."""
    first = transports[0] if transports else None
    return first.rails if isinstance(first, HierarchicalTransport) else None


def _codec(given: _Given, transports: Sequence[Transport]) -> Codec | None:
    """Of the gradients; None where nothing travels: there is no other rank, or no other host."""
    rails = _rails(transports)
    return given.codec if rails is None or rails.num_hosts > 1 else None


def _exchange(
    given: _Given,
    transports: Sequence[Transport],
    trainables: Sequence[NamedParameter],
    momentum_correction: MomentumCorrection,
    precision: ModelPrecision,
    shares: Shares | None,
    any_rank: Callable[[bool], bool],
) -> tuple[GradientEngine, OnlineSearch | None]:
    """The engine on its channel, and the search for what the strategy leaves open, if anything."""
    dims, codec, config = given.dims, _codec(given, transports), given.strategy.gradients
    if dims.data is None:
        alone = SingleReplicaEngine(given.model.parameters(), config.split)
        return given.handles.add(alone), None
    space = given.space
    channel = Channel(transports[0], transports[1:], given.cluster.device, given.recorder)
    given.handles.enter_context(closing(channel))  # closed after the engine that uses it
    verdict = measure(codec, given.cluster) if isinstance(codec, Adaptive) else None
    compression_plan = CompressionPlan(
        partial(codec_of, codec),
        Ranks(dims.data_rank, dims.data_size),
        momentum_correction.momenta,
        verdict.pays if verdict else lambda num_bytes: True,
        shares,
        _rails(transports),
        narrow=not precision.exchanges_wide,
    )
    engine = Engine(
        given.model,
        trainables,
        split=ByBytes() if isinstance(config.split, Optimal) else config.split,
        # in a pipeline the last micro-batch's backward is not over before the sums of what
        # stages share
        overlap=config.overlap and given.strategy.parallel.pipeline is None,
        compression_plan=compression_plan,
        channel=channel,
        control=dims.data,
        any_rank=any_rank,
    )
    given.handles.add(engine)
    engine.load_codec_state(momentum_correction.buffers)
    search = None
    if space.is_open:
        switches = [transport for transport in transports if isinstance(transport, Switch)]
        search = OnlineSearch(engine, switches, given.cluster, dims.data, given.strategy, space)
        given.handles.add_rows(search.report_rows)
    given.handles.add_rows(space.report_rows)
    given.handles.add_rows(partial(hosts_rows, _rails(transports), given.codec))
    if verdict is not None:
        given.handles.add_rows(partial(adaptive_rows, verdict, engine))
    return engine, search


def _shares(given: _Given) -> Shares | None:
    """Who updates what, where every rank updates a share; None: all update everything."""
    dims, config = given.dims, given.strategy.gradients.transport
    if dims.data is None or not isinstance(config, Sharded):
        return None
    trainable = [(name, p) for name, p in given.model.named_parameters() if p.requires_grad]
    names = cut_first(trainable, 1 - config.replicated)
    return Shares(Ranks(dims.data_rank, dims.data_size), names)


def _sharded_model(
    given: _Given,
    transport: Transport,
    trainables: Sequence[NamedParameter],
    shares: Shares,
    engine: GradientEngine,
    precision: ModelPrecision,
) -> ShardedModel:
    config, rank = given.strategy.gradients.transport, given.cluster.rank
    control = given.dims.control
    assert isinstance(config, Sharded)
    assert control is not None

    def forward_order() -> list[NamedParameter]:
        assert engine.order is not None
        return [trainables[index] for index in reversed(engine.order.order)]

    sharded = ShardedModel(
        given.model,
        given.optimizer,
        shares=shares,
        transport=transport,
        gather=ParameterGather(shares, transport, config.gather, f"rank {rank}"),
        order=forward_order,
        meet=partial(meet, group=control),
        half_weights=precision.masters,
    )
    return given.handles.add(sharded, on_error=sharded.abandon)


def _tracer(
    given: _Given,
    engine: GradientEngine,
    search: OnlineSearch | None,
    computing: Sequence[Handle],
) -> Tracer:
    if given.recorder is None:
        return NoTracing()
    tracer = SessionTracer(
        given.recorder,
        given.model,
        given.optimizer,
        given.strategy,
        engine,
        given.dims,
        search,
        given.cluster.device,
        lambda: [row for handle in computing for row in handle.report_rows()],
    )
    given.handles.defer(tracer.write, on_error=tracer.drop)
    return tracer
