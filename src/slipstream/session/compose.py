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

from slipstream.calibration.adaptive_codec import Verdict, measure
from slipstream.cluster.connect import Cluster
from slipstream.codecs import Ranks
from slipstream.data.uneven_inputs import EvenLoader
from slipstream.errors import UsageError
from slipstream.gradients.compressed import Coding
from slipstream.gradients.engine import Engine
from slipstream.gradients.momentum import Lent
from slipstream.gradients.segments import Trainable, as_wide_as_gradients, parameters_of
from slipstream.memory import Offloader, Recomputed, offload, recompute
from slipstream.parallel.dims import Axes
from slipstream.parallel.model import SharedModel
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session.session import Installed, M, O, Session
from slipstream.session.tracing import Recording
from slipstream.strategy import Adaptive, ByBytes, Codec, Optimal, Strategy, codec_of
from slipstream.trace.recorder import Recorder
from slipstream.transport import all_reduce, broadcast
from slipstream.transport.channel import STAGES, Channel
from slipstream.transport.consistency import of_first
from slipstream.tuner.online_split import SETTLING, LiveSplit

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
        axes = Axes.of(cluster, strategy.parallel, control, recorder)
        given = _Given(model, optimizer, strategy, cluster, axes, recorder, undo)
        # before the engine, as it changes the shapes of parameters
        shared = undo.enter_context(_shared(given))
        groups = _start_alike(given, shared)  # in full width
        precision = _precision(given)  # before the engine, as it changes the types of parameters
        recomputed = _recomputed(given)  # around layers as they are by now
        offloader = _offloader(given)  # around what is computed again, whose inputs leave then
        trainables = _trainables(given, shared, precision)
        lent = _lent(given, trainables)  # before the codecs, which apply it
        exchange = _exchange(given, groups, trainables, lent, precision)  # its hooks are the last
        recording = _recording(given, exchange.live_split)
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
                axes=axes,
                shared=shared,
                precision=precision,
                recomputed=recomputed,
                loader=even,
                live_split=exchange.live_split,
                lent=lent,
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
    axes: Axes
    recorder: Recorder | None
    undo: ExitStack

    @property
    def codec(self) -> Codec | None:
        """Of gradients, where there is somebody to exchange them with."""
        return self.strategy.gradients.codec if self.axes.data is not None else None


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What averages gradients; nothing, where a rank is alone."""

    engine: Engine | None = None
    channel: Channel | None = None
    verdict: Verdict | None = None
    live_split: LiveSplit | None = None


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
def _shared(given: _Given) -> Iterator[SharedModel | None]:
    """The model is whole again behind it, but not behind an error: that takes all ranks."""
    wish = given.strategy.parallel
    if not wish.active:
        yield None
        return
    modules = [*given.model.modules()]
    _partial.update(modules)
    shared = SharedModel(given.model, given.optimizer, wish, given.axes, given.recorder)
    yield shared
    shared.close()
    _partial.difference_update(modules)


def _start_alike(given: _Given, shared: SharedModel | None) -> list[dist.ProcessGroup]:
    """Values of the first rank on all; over the first of the groups for gradients: one for single
    collectives, and one for each thread that codes."""
    stages = STAGES.get(given.cluster.device.type, 1) if given.codec is not None else 1
    made = [given.axes.new_data_group() for _ in range(1 + stages)]
    groups = [group for group in made if group is not None]
    if groups:
        model = given.model
        held = shared.held if shared is not None else [*model.parameters(), *model.buffers()]
        broadcast.broadcast(held, groups[0])
    return groups


def _precision(given: _Given) -> ModelPrecision:
    wish, compute = given.strategy.precision, given.strategy.compute
    precision = ModelPrecision(given.model, given.optimizer, wish, compute)
    return given.undo.enter_context(closing(precision))


def _recomputed(given: _Given) -> Recomputed | None:
    wish, control = given.strategy.memory.recompute, given.axes.control
    if wish is None:
        return None
    same = partial(of_first, group=control) if control is not None else None
    return given.undo.enter_context(closing(recompute(given.model, wish, agree=same)))


def _offloader(given: _Given) -> Offloader | None:
    wish, cluster = given.strategy.memory.offload, given.cluster
    if wish is None:
        return None
    neighbours = cluster.environment.local_world_size
    offloader = offload(given.model, wish, local_ranks=neighbours, rank=cluster.rank)
    return given.undo.enter_context(offloader)


def _trainables(
    given: _Given, shared: SharedModel | None, precision: ModelPrecision
) -> list[Trainable]:
    """The parameters whose gradients this rank exchanges, as wide as these travel."""
    shares = shared.shares if shared is not None else None
    found = parameters_of(given.model, trainable=True, shares=shares)
    if shared is not None:
        found = [t for t in found if shared.holds(t.name)]
    return as_wide_as_gradients(found) if precision.exchanges_wide else found


def _lent(given: _Given, trainables: Sequence[Trainable]) -> Lent:
    lent = Lent(given.optimizer, trainables, given.codec, given.axes.data_size)
    given.undo.callback(lent.give_back)
    return lent


def _exchange(
    given: _Given,
    groups: Sequence[dist.ProcessGroup],
    trainables: Sequence[Trainable],
    lent: Lent,
    precision: ModelPrecision,
) -> _Exchange:
    """The channel, then the engine on it: gradients come to rest before the threads end."""
    axes, codec, wish = given.axes, given.codec, given.strategy.gradients
    if axes.data is None:
        return _Exchange()
    direct, *staged = groups
    channel = Channel(direct, staged, given.cluster.device, given.recorder)
    given.undo.enter_context(closing(channel))
    verdict = measure(codec, given.cluster) if isinstance(codec, Adaptive) else None
    coding = Coding(
        partial(codec_of, codec),
        Ranks(axes.data_rank, axes.data_size),
        lent.momenta,
        verdict.pays if verdict else lambda num_bytes: True,
        narrow=not precision.exchanges_wide,
    )
    searched = isinstance(wish.split, Optimal)
    engine = Engine(
        trainables,
        parameters_of(given.model, trainable=False),
        given.model.buffers,
        split=ByBytes() if searched else wish.split,
        # in a pipeline the last micro-batch's backward is not over before the sums of what
        # stages share
        overlap=wish.overlap and given.strategy.parallel.pipeline is None,
        transport=all_reduce.start_all_reduce,
        coding=coding,
        channel=channel,
        control=axes.data,
        anywhere=axes.anywhere,
        recorder=given.recorder,
    )
    given.undo.enter_context(closing(engine))
    engine.load_codec_state(lent.buffers)
    live_split = None
    if isinstance(wish.split, Optimal):
        live_split = LiveSplit(engine, given.cluster, axes.data, given.strategy, wish.split.steps)
    return _Exchange(engine, channel, verdict, live_split)


def _recording(given: _Given, live_split: LiveSplit | None) -> Recording | None:
    if given.recorder is None:
        return None
    axes, wish, device = given.axes, given.strategy.trace, given.cluster.device
    share = axes.mesh.share
    recording = Recording(
        given.recorder, given.model, wish, device, axes.control, live_split, share
    )
    given.undo.callback(recording.drop)
    return recording


def _even(
    given: _Given, loader: Iterable[Any] | None, recording: Recording | None
) -> EvenLoader | None:
    if loader is None:
        return None
    on_start = recording.iteration_begins if recording is not None else None
    even = EvenLoader(loader, group=given.axes.data, recorder=given.recorder, on_start=on_start)
    given.undo.callback(even.detach)
    return even
