"""Who updates what: every rank everything, or each a shard; changed between two updates.

[Note: A change while training runs]
The optimizer's state is cut to this rank's shards, without communication, and gathered when that
ends. Both leave every value as it is, so that a run goes on, bit for bit, as one that was always as
it is now. They happen where a backward pass begins: there parameters are whole, no exchange is in
flight, and the optimizer is not inside a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from slipstream.codecs import Ranks
from slipstream.gradients.engine import Engine
from slipstream.gradients.segments import NamedParameter
from slipstream.gradients.shards import Shards, cut_first
from slipstream.parallel.dims import ParallelDims
from slipstream.parallel.whole_model import WholeModel
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session.given import Given
from slipstream.sharding.gather import ParameterGather
from slipstream.sharding.model import ShardedModel
from slipstream.sharding.watch import GradientWatch
from slipstream.strategy import ByIndexConfig, Row, ShardedConfig, SplitConfig
from slipstream.transport.consistency import any_of, meet
from slipstream.transport.transport import Transport


def shards_of(model: nn.Module, dims: ParallelDims, config: ShardedConfig) -> Shards:
    """Cut what ``config`` does not replicate among the data-parallel ranks."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names = cut_first(trainable, 1 - config.replicated)
    return Shards(Ranks(dims.data_rank, dims.data_size), names)


class AnyRank:
    """Whether a flag is up on any rank that holds a part of the gradients.

    An object of its own, as the engine has it, too: a group of gloo must end with the session, and
    would wait for the garbage collector in a circle of references.
    """

    def __init__(self, dims: ParallelDims) -> None:
        self._dims = dims
        self.sharded = False

    def __call__(self, flag: bool) -> bool:
        if self.sharded and self._dims.control is not None:
            return any_of(flag, self._dims.control)
        return self._dims.any_rank(flag)


class UpdateSharding:
    """Begins and ends the sharded update of one model.

    Args:
        given: the user's model and optimizer, and the ranks.
        whole: the model where every rank updates everything.
        trainables: the parameters that are trained.
        precision: keeps fp32 copies of half weights.

    Attributes:
        model: verbs of the model as it is updated now.
        watch: notices what `sharded` would refuse.
        any_rank: whether a flag is up on any rank that holds a part of the gradients.
    """

    def __init__(
        self,
        given: Given,
        whole: WholeModel,
        trainables: Sequence[NamedParameter],
        precision: ModelPrecision,
    ) -> None:
        self._at, self._explaining = f"rank {given.cluster.rank}", given.explaining
        self._module, self._optimizer, self._whole = given.model, given.optimizer, whole
        self._trainables, self._precision, self._dims = trainables, precision, given.dims
        self._config: ShardedConfig | None = None
        self.model = whole
        self.watch = GradientWatch(given.optimizer)
        self.any_rank = AnyRank(given.dims)

    @property
    def waited(self) -> float:
        """Seconds that forwards have waited for parameters since the sharding last changed."""
        return self.model.waited if isinstance(self.model, ShardedModel) else 0.0

    @property
    def is_sharded(self) -> bool:
        """Whether each rank updates a shard, now."""
        return self._config is not None

    def use(
        self, config: ShardedConfig | None, transport: Transport | None, engine: Engine
    ) -> None:
        """Begin, change or end a sharded update; None: every rank updates everything.

        A collective, where a backward pass begins.

        Args:
            config: what ranks share from now on.
            transport: carries parameters; used by nothing else while a forward runs.
            engine: lays out the gradients that it exchanges for the shards of an update.
        """
        if config == self._config:
            return
        if self._config is not None:
            self.model.close()  # gives every rank the whole state
            engine.use_shards(None)
            self._config, self.model, self.any_rank.sharded = None, self._whole, False
        if config is not None:
            assert transport is not None
            shards = shards_of(self._module, self._dims, config)
            engine.use_shards(shards)
            self.begin(config, transport, shards, engine, _gather(config, shards))

    def begin(
        self,
        config: ShardedConfig,
        transport: Transport,
        shards: Shards,
        engine: Engine,
        gather: SplitConfig | None = None,
    ) -> None:
        """Let each rank update its shard; the engine delivers averages to ``shards``."""
        control = self._dims.control
        assert control is not None
        self._config, self.any_rank.sharded = config, True
        self.model = ShardedModel(
            self._module,
            self._optimizer,
            shards=shards,
            transport=transport,
            gather=ParameterGather(
                shards, transport, gather or config.gather, self._at, self._explaining
            ),
            order=partial(_forward_order, self._trainables, engine),
            meet=partial(meet, group=control),
            half_weights=self._precision.masters,
        )

    def close(self) -> None:
        """Complete the parameters, and give every rank the whole state; collective if sharded."""
        self.watch.end()
        if self._config is not None:
            self.model.close()

    def abandon(self) -> None:
        """Gather nothing after an error: the other ranks may not be there."""
        self.watch.end()
        if isinstance(self.model, ShardedModel):
            self.model.abandon()

    def report_rows(self) -> list[Row]:
        """Report what this rank updates, where that is a shard."""
        return [] if self._config is None else self.model.report_rows()


def _gather(config: ShardedConfig, shards: Shards) -> SplitConfig:
    """The all-gathers of a predicted config; those by default where it counts other parameters.

    A prediction knows the bytes that travel, which parameters of several types do not have in
    proportion to their own: then the border of the replicated part may be one parameter away.
    """
    gather = config.gather
    fits = not isinstance(gather, ByIndexConfig) or gather.last[-1] == len(shards.names) - 1
    return gather if fits else ShardedConfig().gather


def _forward_order(trainables: Sequence[NamedParameter], engine: Engine) -> list[NamedParameter]:
    order = engine.order
    if order is None:  # an update of gradients of the script's own, before the first exchange
        return [*trainables]
    return [trainables[index] for index in reversed(order.order)]
