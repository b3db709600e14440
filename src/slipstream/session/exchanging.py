"""Install the exchange of gradients: transports, engine, search, and who updates what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from slipstream.calibration.adaptive_codec import measure
from slipstream.cluster.connect import Cluster
from slipstream.codecs import Ranks
from slipstream.errors import ModelError, StrategyError
from slipstream.fusion.memory_in_common import MemoryInCommon
from slipstream.gradients.compressed import CompressionPlan
from slipstream.gradients.engine import Engine
from slipstream.gradients.interface import GradientEngine
from slipstream.gradients.momentum import MomentumCorrection
from slipstream.gradients.segments import NamedParameter, as_wide_as_gradients, parameters_of
from slipstream.gradients.shards import Shards
from slipstream.gradients.single import SingleReplicaEngine
from slipstream.local.carrier import Carrier, FixedCarrier
from slipstream.local.engine import LocalEngine
from slipstream.local.island import between, find_island
from slipstream.local.model import LocalModel
from slipstream.local.open_carrier import OpenCarrier
from slipstream.local.open_training import OpenTraining
from slipstream.local.rendezvous import Rendezvous
from slipstream.local.training import LocalTraining
from slipstream.parallel.whole_model import WholeModel
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session.given import Given
from slipstream.session.report import adaptive_rows, hosts_rows
from slipstream.session.update_sharding import UpdateSharding, shards_of
from slipstream.sharding.checks import why_not_sharded
from slipstream.strategy import (
    AdaptiveConfig,
    ByBytesConfig,
    CodecConfig,
    FlatConfig,
    OptimalConfig,
    ShardedConfig,
    SharedMemoryConfig,
    Strategy,
    codec_of,
)
from slipstream.transport.channel import STAGES, Channel
from slipstream.transport.hierarchical import HierarchicalTransport
from slipstream.transport.hosts import Rails
from slipstream.transport.place import Place, find_place
from slipstream.transport.switch import Switch
from slipstream.transport.transport import Transport, make_transport
from slipstream.tuner.local_search import LocalSearch
from slipstream.tuner.online_search import OnlineSearch
from slipstream.tuner.search_space import SearchSpace


@dataclass(frozen=True, slots=True)
class GradientExchange:
    """An installed exchange.

    Attributes:
        engine: averages the gradients.
        names: of the parameters whose gradients this rank exchanges.
        codec: of the gradients; None where nothing travels.
        momentum: what the codec took over from the optimizer.
        sharding: who updates what.
        search: for the fastest exchange; None: nothing is left open.
    """

    engine: GradientEngine
    names: Sequence[str]
    codec: CodecConfig | None
    momentum: MomentumCorrection
    sharding: UpdateSharding
    search: OnlineSearch | None


def search_space(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    cluster: Cluster,
    control: dist.ProcessGroup | None,
) -> SearchSpace:
    """Find what the strategy leaves open; ``auto`` asks which ranks share a host, a collective."""
    place = Place.apart(cluster.device, cluster.world_size)
    searches = strategy.gradients.transport.searches and not strategy.parallel.active
    if searches and control is not None and cluster.device.type == "cpu":
        place = find_place(cluster.device, control)
    reason = why_not_sharded(model, optimizer, strategy) if searches else None
    return SearchSpace.of(strategy, place, not_sharded=reason)


def exchange_groups(given: Given) -> list[dist.ProcessGroup]:
    """Groups for gradients: one for single collectives, and one for each thread that encodes."""
    stages = STAGES.get(given.cluster.device.type, 1) if given.codec is not None else 1
    made = [given.dims.new_data_group() for _ in range(1 + stages)]
    return [group for group in made if group is not None]


def shards_at_start(given: Given) -> Shards | None:
    """Who updates what, where the strategy lets every rank update a shard of the parameters."""
    config = given.strategy.gradients.transport
    if given.dims.data is None or not isinstance(config, ShardedConfig):
        return None
    return shards_of(given.model, given.dims, config)


def install_exchange(
    given: Given,
    groups: Sequence[dist.ProcessGroup],
    whole: WholeModel,
    precision: ModelPrecision,
    shards: Shards | None,
) -> GradientExchange:
    """Install codec, engine, search and sharded update, in this order.

    Args:
        given: the model as later steps see it: its hooks see final gradients.
        groups: as from `exchange_groups`.
        whole: the model where no rank updates a shard.
        precision: says in which type gradients travel.
        shards: as from `shards_at_start`.
    """
    trainables = _trainables(given, whole, precision)
    local = given.strategy.local
    averages = given.dims.data is not None and (local is None or local.averages_first)
    # Before the codecs, which compress between hosts alone where a transport knows these.
    transports = _transports(given, groups) if averages else []
    rails = _rails(transports)
    codec = given.codec if rails is None or rails.num_hosts > 1 else None
    # Before the codecs, which apply the momentum that they take over from the optimizer.
    momentum = MomentumCorrection(given.optimizer, trainables, codec, given.dims.data_size)
    given.handles.callback(momentum.give_back)
    sharding = UpdateSharding(given, whole, trainables, precision)
    names = [t.name for t in trainables]
    if not averages:
        own = _local_engine(given, None, trainables) if local is not None else _alone(given)
        return GradientExchange(given.handles.add(own), names, codec, momentum, sharding, None)
    engine = _engine(given, transports, trainables, codec, momentum, precision, sharding, shards)
    # After the engine, which knows the order of the parameters.
    given.handles.add(sharding, on_error=sharding.abandon)
    config = given.strategy.gradients.transport
    if isinstance(config, ShardedConfig) and shards is not None:
        sharding.begin(config, transports[0], shards, engine)
    search = _search(given, transports, engine, sharding)
    given.handles.add_rows(given.space.report_rows)
    given.handles.add_rows(partial(hosts_rows, rails, given.codec))
    used: GradientEngine = engine
    if local is not None:
        used = given.handles.add(_local_engine(given, engine, trainables))
    return GradientExchange(used, names, codec, momentum, sharding, search)


def install_local(
    given: Given, exchange: GradientExchange, whole: WholeModel, precision: ModelPrecision
) -> LocalTraining | None:
    """Install the meetings of ranks that train on their own; None: they average gradients."""
    config, dims = given.strategy.local, given.dims
    if config is None:
        return None
    assert isinstance(whole, LocalModel)
    assert isinstance(exchange.engine, LocalEngine)
    trained = parameters_of(given.model, trainable=True)
    shared = MemoryInCommon().of([t.parameter for t in trained])
    if names := [t.name for t in trained if id(t.parameter) in shared]:
        raise ModelError(
            f"local: the parameters {names[0]} and {names[1]} have memory in common, and meetings "
            f"would change it twice; tie the parameter itself: {names[1]} = {names[0]}"
        )
    carrier: Carrier | None = None
    if config.rendezvous is not None:
        if dims.data_size > 1:
            raise StrategyError(
                f"local.rendezvous in a job of {dims.data_size} ranks; allowed: jobs of one rank, "
                "each started by itself (slipstream launch --islands 4 on one machine)"
            )
        carrier = OpenCarrier(Rendezvous(config.rendezvous))
        given.handles.callback(carrier.leave)
    elif (leaders := exchange.engine.island.leaders) is not None:
        transport = make_transport(between(given.strategy.gradients.transport), leaders)
        # one meeting at a time is on its way: one transport, and the thread that drives it
        channel = Channel(transport, [transport], given.cluster.device)
        given.handles.enter_context(closing(channel))
        carrier = FixedCarrier(channel)
    kind = LocalTraining if config.rendezvous is None else OpenTraining
    training = whole.training = kind(
        given.model,
        given.optimizer,
        trained,
        config,
        Ranks(dims.data_rank, dims.data_size),
        exchange.engine,
        carrier,
        precision,
        given.recorder,
        f"rank {given.cluster.rank}",
        norms=given.strategy.trace.norms,
    )
    return given.handles.add(training, on_error=training.abandon)


def _alone(given: Given) -> SingleReplicaEngine:
    """The engine of a rank that averages with no other."""
    # Layers that are split sum gradients, and meetings average parameters: of those found trainable
    # at the start.
    shares = given.dims.tensor.size > 1 or given.strategy.local is not None
    return SingleReplicaEngine(
        dict(given.model.named_parameters()),
        given.strategy.gradients.split,
        looks=given.looks,
        any_rank=given.dims.any_rank,
        frozen=parameters_of(given.model, trainable=False) if shares else (),
    )


def _local_engine(
    given: Given, shared: Engine | None, trainables: Sequence[NamedParameter]
) -> LocalEngine:
    """The engine of ranks that meet rarely. Collective.

    Args:
        given: the model as later steps see it.
        shared: averages over all ranks, at first; None: there is no warm-up.
        trainables: the parameters that are trained.
    """
    config = given.strategy.gradients
    island = find_island(given.cluster, given.dims, config.transport)
    if not island.groups:
        return LocalEngine(shared, _alone(given), island)
    single, staged, control = island.groups
    channel = Channel(
        make_transport(SharedMemoryConfig(), single),
        [make_transport(FlatConfig(), staged)],
        given.cluster.device,
        given.recorder,
    )
    given.handles.enter_context(closing(channel))
    engine = Engine(
        given.model,
        trainables,
        split=config.split,
        overlap=config.overlap,
        compression_plan=CompressionPlan(
            partial(codec_of, None),
            Ranks(island.ranks.index(given.dims.data_rank), len(island.ranks)),
        ),
        channel=channel,
        control=control,
        looks=given.looks,
    )
    return LocalEngine(shared, given.handles.add(engine), island)


def local_search(given: Given, local: LocalTraining | None) -> LocalSearch | None:
    """The search for how rarely ranks meet; None: the strategy says it, or there is one rank."""
    control = given.dims.data
    if local is None or control is None or not local.undecided:
        return None
    return LocalSearch(given.strategy, given.cluster, control, local)


def _trainables(given: Given, whole: WholeModel, precision: ModelPrecision) -> list[NamedParameter]:
    """The parameters whose gradients this rank exchanges, in the type in which these travel."""
    named = parameters_of(given.model, trainable=True, shards=whole.largest_shapes)
    trainables = [t for t in named if whole.is_local(t.name)]
    return as_wide_as_gradients(trainables) if precision.exchanges_wide else trainables


def _transports(given: Given, groups: Sequence[dist.ProcessGroup]) -> list[Transport]:
    """Make one on each group: what the strategy names, or what it lets a search choose among."""
    first, *others = given.space.transports
    make: Callable[..., Transport] = Switch if others else make_transport
    return [make(first, group) for group in groups]


def _rails(transports: Sequence[Transport]) -> Rails | None:
    """Find the hosts as a hierarchical transport found them; None under any other."""
    first = transports[0] if transports else None
    return first.rails if isinstance(first, HierarchicalTransport) else None


def _engine(
    given: Given,
    transports: Sequence[Transport],
    trainables: Sequence[NamedParameter],
    codec: CodecConfig | None,
    momentum: MomentumCorrection,
    precision: ModelPrecision,
    sharding: UpdateSharding,
    shards: Shards | None,
) -> Engine:
    """The engine on its channel."""
    dims, config = given.dims, given.strategy.gradients
    assert dims.data is not None
    channel = Channel(transports[0], transports[1:], given.cluster.device, given.recorder)
    given.handles.enter_context(closing(channel))  # closed after the engine that uses it
    verdict = measure(codec, given.cluster) if isinstance(codec, AdaptiveConfig) else None
    plan = CompressionPlan(
        partial(codec_of, codec),
        Ranks(dims.data_rank, dims.data_size),
        momentum.momenta,
        verdict.pays if verdict else lambda num_bytes: True,
        shards,
        _rails(transports),
        # those of half weights; a script that asks for wider ones (`grad_dtype`) wants them exact
        narrow=precision.masters is not None and not precision.exchanges_wide,
    )
    engine = Engine(
        given.model,
        trainables,
        split=ByBytesConfig() if isinstance(config.split, OptimalConfig) else config.split,
        # in a pipeline the last micro-batch's backward is not over before the sums of what
        # stages share
        overlap=config.overlap and given.strategy.parallel.pipeline is None,
        compression_plan=plan,
        channel=channel,
        control=dims.data,
        looks=given.looks,
        any_rank=sharding.any_rank,
    )
    given.handles.add(engine)
    engine.load_codec_state(momentum.buffers)
    if verdict is not None:
        given.handles.add_rows(partial(adaptive_rows, verdict, engine))
    return engine


def _search(
    given: Given, transports: Sequence[Transport], engine: Engine, sharding: UpdateSharding
) -> OnlineSearch | None:
    """The search for what the strategy leaves open; None: nothing."""
    space, control = given.space, given.dims.data
    if not space.is_open:
        return None
    assert control is not None
    switches = [transport for transport in transports if isinstance(transport, Switch)]
    search = OnlineSearch(engine, sharding, switches, given.cluster, control, given.strategy, space)
    given.handles.add_rows(search.report_rows)
    return search
