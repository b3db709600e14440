"""Predict and rank strategies, on the measured network or on one of another size or speed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import harmonic_mean
from typing import NamedTuple

from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.planner.iteration.local_cost import local_seconds
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import predict
from slipstream.planner.iteration.transport_cost import num_replicated, updated_part
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.candidates import TOLERANCE
from slipstream.strategy import (
    ByIndexConfig,
    ShardedConfig,
    Strategy,
    late_by,
)

NODES = tuple(2**power for power in range(13))
MARGIN = 0.03
"""Minimum predicted gain: what a prediction may be off. By so much ``sharded`` must be predicted
faster than what asks nothing of the user's code: under it no rank has whole gradients between
``backward()`` and ``step()``. Likewise a computed split: a search finds where predictions are too
fast."""
RATES = (100e6, 300e6, 1e9, 3e9, 10e9, 25e9, 40e9, 100e9)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's prediction for one strategy.

    ``seconds`` is one iteration, which is one update: the mean over the updates of a training, if
    their number was given, else of those after the codec's warm-up. ``efficiency`` is the speed of
    all ranks divided by the sum of the speeds that they would have without any exchange.
    ``memory_bytes`` is the memory of gradients, their used flags, what a codec keeps and, where the
    trace tells it, the optimizer's state on a rank. ``samples_per_second`` is 0 where the trace
    does not record the number of samples.
    """

    strategy: Strategy
    seconds: float
    samples_per_second: float
    efficiency: float
    memory_bytes: int
    segments: int
    exactness: str

    @property
    def per_batch(self) -> float:
        """Seconds for one batch of each rank; comparable between numbers of accumulated batches."""
        return self.seconds / self.strategy.gradients.accumulate


class ScaleOutPoint(NamedTuple):
    """A prediction for a number of nodes and ranks, with links of ``rate`` bits/s.

    ``rate`` None: that of the measured network.
    """

    nodes: int
    ranks: int
    rate: float | None
    prediction: Prediction


def rank(
    strategies: Iterable[Strategy],
    workload: Workload,
    network: NetworkProfile,
    base: Strategy = Strategy(),  # noqa: B008 - frozen
    updates: int | None = None,
) -> list[Prediction]:
    """Predict all strategies; the one to prefer comes first.

    That is the fastest, but for what a prediction cannot promise: among strategies that differ by
    less than TOLERANCE, counted from the fastest, the one with the fewest segments comes first;
    ``sharded`` and a computed split count as slower by MARGIN each, unless they are those of
    ``base``; a codec that begins late comes last where nothing says how many updates follow.

    Args:
        strategies: to predict.
        workload, network: of the training.
        base: what ``exactness`` compares batches with.
        updates: of the whole training, some of which may be over before a codec begins.
    """
    predictions = [
        _prediction(strategy, workload, network, base, updates) for strategy in strategies
    ]

    def counted(one: Prediction) -> float:
        gradients = one.strategy.gradients
        sharded = _differs(gradients.transport, base.gradients.transport, ShardedConfig)
        computed = _differs(gradients.split, base.gradients.split, ByIndexConfig)
        return one.per_batch * (1 + MARGIN * (sharded + computed))

    fastest = min(map(counted, predictions), default=0.0)

    def order(one: Prediction) -> tuple[bool, int, int, float]:
        late = updates is None and late_by(one.strategy.gradients.codec) > 0
        steps = int((counted(one) / fastest - 1) / TOLERANCE)
        return late, steps, one.segments, counted(one)

    return sorted(predictions, key=order)


def _differs(setting: object, base: object, kind: type) -> bool:
    """Whether a setting is of a kind, and not that of the base."""
    of_base = isinstance(base, kind) if kind is ShardedConfig else setting == base
    return isinstance(setting, kind) and not of_base


def what_if(
    strategy: Strategy,
    workload: Workload,
    network: NetworkProfile,
    *,
    nodes: Sequence[int] = NODES,
    ranks_per_node: int = 1,
    rates: Sequence[float | None] = (None,),
) -> list[ScaleOutPoint]:
    """One strategy on other networks: every number of nodes at every rate."""
    points = []
    for count, rate in product(nodes, rates):
        larger = workload.for_ranks(count * ranks_per_node)
        other = network.scaled(count, ranks_per_node, rate)
        prediction = _prediction(strategy, larger, other, strategy)
        points.append(ScaleOutPoint(count, larger.num_ranks, rate, prediction))
    return points


def exactness(strategy: Strategy, base: Strategy) -> str:
    """Say how exact a strategy's gradients are, and how its batch differs from that of ``base``.

    Example:
        >>> exactness(Strategy.load({"gradients": {"accumulate": 4}}), Strategy())
        'reordered, batch x4'
    """
    times = strategy.gradients.accumulate / base.gradients.accumulate
    return strategy.exactness if times == 1 else f"{strategy.exactness}, batch x{times:g}"


def late_share(strategy: Strategy, updates: int | None) -> float:
    """The part of a training that is over before the codec sends as little as it will.

    Example:
        >>> onebit = Strategy.load({"gradients": {"codec": {"kind": "onebit", "start_step": 400}}})
        >>> late_share(onebit, 1600), late_share(onebit, None)
        (0.25, 0.0)
    """
    return min(late_by(strategy.gradients.codec) / updates, 1.0) if updates else 0.0


def _prediction(
    strategy: Strategy,
    workload: Workload,
    network: NetworkProfile,
    base: Strategy,
    updates: int | None = None,
) -> Prediction:
    plan = CommPlan.of(strategy, workload.gradients, network.codecs)
    seconds = seconds_of(strategy, workload, network)
    if late := late_share(strategy, updates):  # DGC's warm-up counts as dense, which it nearly is
        dense = CommPlan.of(strategy.with_gradients(codec=None), workload.gradients)
        seconds = (1 - late) * seconds + late * predict(workload, dense, network)
    accumulate = strategy.gradients.accumulate
    workload = workload.computed(plan.half, network.half_speed)
    return Prediction(
        strategy=strategy,
        seconds=seconds,
        samples_per_second=float(workload.samples.sum()) * accumulate / seconds,
        efficiency=harmonic_mean(workload.alone(accumulate).tolist()) / seconds,
        memory_bytes=_memory(strategy, workload),
        segments=len(plan_segments(workload.gradients, strategy.gradients.split)),
        exactness=exactness(strategy, base),
    )


def seconds_of(strategy: Strategy, workload: Workload, network: NetworkProfile) -> float:
    """Predict an update in the long run.

    Raises:
        StrategyError: the strategy does not fit the gradients, or its codec was not measured.
        ClusterError: the transport needs a network that was not measured.
    """
    if strategy.local is not None:
        return local_seconds(strategy, workload, network)
    plan = CommPlan.of(strategy, workload.gradients, network.codecs)
    return predict(workload, plan, network)


def _memory(strategy: Strategy, workload: Workload) -> int:
    """Bytes of gradients, of what a codec keeps and of the optimizer's state; ``sharded`` keeps its
    averages apart, ``local`` outer parameters, their momentum and a fragment on its way, twice.

    ``half_weights`` changes nothing: half the gradients and weights, and fp32 masters.
    """
    gradients, config = workload.gradients, strategy.gradients.transport
    exchanged = sum(map(_with_flag, gradients)) + _codec_memory(strategy, workload)
    if (local := strategy.local) is not None:
        exchanged += round((2 + 2 / local.fragments) * sum(g.num_bytes for g in gradients))
    if not isinstance(config, ShardedConfig):
        return exchanged + workload.optimizer_bytes
    replicated = num_replicated(gradients, config)
    part = updated_part(gradients, replicated, workload.num_ranks)
    whole = sum(gradient.num_bytes for gradient in gradients[:replicated])
    averages = part * sum(gradient.num_bytes for gradient in gradients) - whole
    return exchanged + round(averages + part * workload.optimizer_bytes)


def _codec_memory(strategy: Strategy, workload: Workload) -> int:
    """Bytes that a codec keeps from update to update, twice: before and after the last one.

    Vectors, of which PowerSGD keeps nothing, are counted; so is the optimizer's momentum beside
    DGC's, which takes its place.
    """
    codec = strategy.gradients.codec if strategy.local is None else strategy.local.codec
    copies = 0.0 if codec is None else codec.copies(workload.num_ranks)
    return round(2 * copies * sum(gradient.num_bytes for gradient in workload.gradients))


def _with_flag(gradient: Gradient) -> int:
    """Bytes of a gradient and of its used flag, which is one element of the same dtype."""
    bits = re.search(r"\d+", gradient.dtype)
    return gradient.num_bytes + (int(bits[0]) // 8 if bits and gradient.num_bytes else 0)
