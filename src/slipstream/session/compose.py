"""``compose()``: the only place where techniques are composed, in one fixed order.

Never implements one: each step calls the room that does. How a thing comes off again is told to one
stack as soon as it is there; that undoes all in reverse when a later step fails, and else when the
session ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from slipstream.calibration.adaptive_codec import CodecDecision, measure
from slipstream.cluster.connect import Cluster
from slipstream.codecs import Ranks
from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import UsageError
from slipstream.gradients.compressed import CompressionPlan
from slipstream.gradients.engine import Engine
from slipstream.gradients.momentum import MomentumCorrection
from slipstream.gradients.segments import NamedParameter, as_wide_as_gradients, parameters_of
from slipstream.memory import Offloader, Recomputed, offload, recompute
from slipstream.parallel.dims import ParallelDims
from slipstream.parallel.model import ModelParallel
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session.session import Installed, M, O, Session
from slipstream.session.tracing import Recording
from slipstream.strategy import Adaptive, ByBytes, Codec, Optimal, Strategy, codec_of
from slipstream.trace.recorder import Recorder
from slipstream.transport import all_reduce, broadcast
from slipstream.transport.channel import STAGES, Channel
from slipstream.transport.consistency import broadcast_from_first
from slipstream.tuner.online_split import SETTLING, OnlineSplit

_accelerated: WeakSet[nn.Module] = WeakSet()
_partial: WeakSet[nn.Module] = WeakSet()
"""Models that ranks shared, and that were not made whole again."""


def check_unused(model: nn.Module) -> None:
    """Refuse a model that a session has, or has left in parts.

    Raises:
        UsageError: says which.
    """
    if any(module in _accelerated for module in model.modules()):
        raise UsageError(
            "this model is accelerated already; close() its session before a second accelerate()"
        )
    if any(module in _partial for module in model.modules()):
        raise UsageError(
            "this model was shared between ranks by a session that ended with an error, so this "
            "rank has a part of it only; build it anew, and load a checkpoint"
        )


def compose(
    model: M,
    optimizer: O,
    loader: Iterable[Any] | None,
    strategy: Strategy,
    cluster: Cluster,
    control: dist.ProcessGroup | None,
) -> Session[M, O]:
    """Install the rooms: what comes first is what later ones build on.

    Whatever is raised on the way, model and optimizer are as they were, but for values taken over
    from the first rank. A model that ranks share stays in parts: they may not all be there to make
    it whole.
    """
    with ExitStack() as undo:
        _mark(model, undo)
        recorder = _recorder(strategy, cluster)  # first, since every room gets it
        dims = ParallelDims.of(cluster, strategy.parallel, control, recorder)
        given = _Given(model, optimizer, strategy, cluster, dims, recorder, undo)
        # before the engine, as it changes the shapes of parameters
        shared = undo.enter_context(_shared(given))
        groups = _start_alike(given, shared)  # in full width
        precision = _precision(given)  # before the engine, as it changes the types of parameters
        recomputed = _recomputed(given)  # around layers as they are by now
        offloader = _offloader(given)  # around what is computed again, whose inputs leave then
        trainables = _trainables(given, shared, precision)
        momentum_correction = _momentum_correction(
            given, trainables
        )  # before the codecs, which apply it
        exchange = _exchange(
            given, groups, trainables, momentum_correction, precision
        )  # its hooks are the last
        recording = _recording(given, exchange.online_split)
        even = _even(given, loader, recording)  # whose fillers the engine does not count
        return Session(
            model,
            optimizer,
            Installed(
                cluster=cluster,
                strategy=strategy,
                trainable_names=tuple(t.name for t in trainables),
                engine=exchange.engine,
                channel=exchange.channel,
                dims=dims,
                shared=shared,
                precision=precision,
                recomputed=recomputed,
                loader=even,
                online_split=exchange.online_split,
                momentum_correction=momentum_correction,
                verdict=exchange.verdict,
                recording=recording,
                offloader=offloader,
                undo=undo,
            ),
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
    undo: ExitStack

    @property
    def codec(self) -> Codec | None:
        """Of gradients, where there is somebody to exchange them with."""
        return self.strategy.gradients.codec if self.dims.data is not None else None


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What averages gradients; nothing, where a rank is alone."""

    engine: Engine | None = None
    channel: Channel | None = None
    verdict: CodecDecision | None = None
    online_split: OnlineSplit | None = None


def _mark(model: nn.Module, undo: ExitStack) -> None:
    """As in use, with its modules as the user made them: some are replaced."""
    modules = [*model.modules()]
    _accelerated.update(modules)
    undo.callback(_accelerated.difference_update, modules)


def _recorder(strategy: Strategy, cluster: Cluster) -> Recorder | None:
    """For the search of the split, else for the user."""
    split, trace = strategy.gradients.split, strategy.trace
    if isinstance(split, Optimal) and cluster.world_size > 1:
        return Recorder(cluster.rank, SETTLING, split.steps)
    return Recorder(cluster.rank, trace.skip, trace.steps) if trace.steps is not None else None


@contextmanager
def _shared(given: _Given) -> Iterator[ModelParallel | None]:
    """The model is whole again behind it, but not behind an error: that takes all ranks."""
    config = given.strategy.parallel
    if not config.active:
        yield None
        return
    modules = [*given.model.modules()]
    _partial.update(modules)
    shared = ModelParallel(given.model, given.optimizer, config, given.dims, given.recorder)
    yield shared
    shared.close()
    _partial.difference_update(modules)


def _start_alike(given: _Given, shared: ModelParallel | None) -> list[dist.ProcessGroup]:
    """Values of the first rank on all; over the first of the groups for gradients: one for single
    collectives, and one for each thread that codes."""
    stages = STAGES.get(given.cluster.device.type, 1) if given.codec is not None else 1
    made = [given.dims.new_data_group() for _ in range(1 + stages)]
    groups = [group for group in made if group is not None]
    if groups:
        model = given.model
        held = (
            shared.local_tensors if shared is not None else [*model.parameters(), *model.buffers()]
        )
        broadcast.broadcast(held, groups[0])
    return groups


def _precision(given: _Given) -> ModelPrecision:
    config, compute = given.strategy.precision, given.strategy.compute
    precision = ModelPrecision(given.model, given.optimizer, config, compute)
    return given.undo.enter_context(closing(precision))


def _recomputed(given: _Given) -> Recomputed | None:
    config, control = given.strategy.memory.recompute, given.dims.control
    if config is None:
        return None
    same = partial(broadcast_from_first, group=control) if control is not None else None
    return given.undo.enter_context(closing(recompute(given.model, config, agree=same)))


def _offloader(given: _Given) -> Offloader | None:
    config, cluster = given.strategy.memory.offload, given.cluster
    if config is None:
        return None
    neighbours = cluster.environment.local_world_size
    offloader = offload(given.model, config, local_ranks=neighbours, rank=cluster.rank)
    return given.undo.enter_context(offloader)


def _trainables(
    given: _Given, shared: ModelParallel | None, precision: ModelPrecision
) -> list[NamedParameter]:
    """The parameters whose gradients this rank exchanges, as wide as these travel."""
    shares = shared.largest_shapes if shared is not None else None
    found = parameters_of(given.model, trainable=True, shares=shares)
    if shared is not None:
        found = [t for t in found if shared.is_local(t.name)]
    return as_wide_as_gradients(found) if precision.exchanges_wide else found


def _momentum_correction(given: _Given, trainables: Sequence[NamedParameter]) -> MomentumCorrection:
    momentum_correction = MomentumCorrection(
        given.optimizer, trainables, given.codec, given.dims.data_size
    )
    given.undo.callback(momentum_correction.give_back)
    return momentum_correction


def _exchange(
    given: _Given,
    groups: Sequence[dist.ProcessGroup],
    trainables: Sequence[NamedParameter],
    momentum_correction: MomentumCorrection,
    precision: ModelPrecision,
) -> _Exchange:
    """The channel, then the engine on it: gradients come to rest before the threads end."""
    dims, codec, config = given.dims, given.codec, given.strategy.gradients
    if dims.data is None:
        return _Exchange()
    direct, *staged = groups
    channel = Channel(direct, staged, given.cluster.device, given.recorder)
    given.undo.enter_context(closing(channel))
    verdict = measure(codec, given.cluster) if isinstance(codec, Adaptive) else None
    coding = CompressionPlan(
        partial(codec_of, codec),
        Ranks(dims.data_rank, dims.data_size),
        momentum_correction.momenta,
        verdict.pays if verdict else lambda num_bytes: True,
        narrow=not precision.exchanges_wide,
    )
    searched = isinstance(config.split, Optimal)
    engine = Engine(
        trainables,
        parameters_of(given.model, trainable=False),
        given.model.buffers,
        split=ByBytes() if searched else config.split,
        # in a pipeline the last micro-batch's backward is not over before the sums of what
        # stages share
        overlap=config.overlap and given.strategy.parallel.pipeline is None,
        transport=all_reduce.start_all_reduce,
        coding=coding,
        channel=channel,
        control=dims.data,
        any_rank=dims.any_rank,
        recorder=given.recorder,
    )
    given.undo.enter_context(closing(engine))
    engine.load_codec_state(momentum_correction.buffers)
    online_split = None
    if isinstance(config.split, Optimal):
        online_split = OnlineSplit(
            engine, given.cluster, dims.data, given.strategy, config.split.steps
        )
    return _Exchange(engine, channel, verdict, online_split)


def _recording(given: _Given, online_split: OnlineSplit | None) -> Recording | None:
    if given.recorder is None:
        return None
    dims, config, device = given.dims, given.strategy.trace, given.cluster.device
    share = dims.mesh.model_parallel
    recording = Recording(
        given.recorder, given.model, config, device, dims.control, online_split, share
    )
    given.undo.callback(recording.drop)
    return recording


def _even(
    given: _Given, loader: Iterable[Any] | None, recording: Recording | None
) -> UnevenInputLoader | None:
    if loader is None:
        return None
    on_start = recording.iteration_begins if recording is not None else None
    even = UnevenInputLoader(
        loader, group=given.dims.data, recorder=given.recorder, on_start=on_start
    )
    given.undo.callback(even.detach)
    return even
