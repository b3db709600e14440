"""What each strategy would bring, on the cluster that was measured or on one that was not.

Never measures: a trace and a cluster go in, predictions come out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import harmonic_mean

from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.planner.candidates import TOLERANCE
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.exchange import Plan, cuts_of
from slipstream.planner.replay import calibrated
from slipstream.planner.simulate import predict
from slipstream.planner.workload import Workload
from slipstream.strategy import ByIndex, Optimal, Strategy
from slipstream.strategy import Trace as TraceSettings
from slipstream.trace import Trace

NODES = tuple(2**power for power in range(13))
RATES = (100e6, 300e6, 1e9, 3e9, 10e9, 25e9, 40e9, 100e9)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of one strategy.

    ``seconds`` is one iteration, which is one update. ``efficiency`` is the speed of all ranks over
    the sum of the speeds that they would have alone, without any exchange. ``memory_bytes`` is what
    gradients and their flags of use take on a rank. ``samples_per_second`` is 0 where the trace
    does not tell how many samples there were.
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
        """Seconds for one batch of each rank: strategies that accumulate compare by this."""
        return self.seconds / self.strategy.gradients.accumulate


@dataclass(frozen=True, slots=True)
class Point:
    """A prediction for another cluster: so many nodes and ranks, links of so many bits a second.

    ``rate`` None is that of the cluster that was measured.
    """

    nodes: int
    ranks: int
    rate: float | None
    prediction: Prediction


def traced_strategy(trace: Trace) -> Strategy:
    """The strategy that a trace was recorded under, without its trace settings.

    A split that was found while the training ran is the one that the trace shows; on one process it
    shows a single segment.

    Raises:
        StrategyError: it has settings that this version does not know.
    """
    strategy = Strategy.load(trace.meta.get("strategy") or {})
    gradients = strategy.gradients
    if isinstance(gradients.split, Optimal):
        split = ByIndex(last=tuple(cut - 1 for cut in cuts_of(trace)))
        gradients = gradients.model_copy(update={"split": split})
    return strategy.model_copy(update={"gradients": gradients, "trace": TraceSettings()})


def prepare(trace: Trace, cluster: NetworkProfile) -> tuple[Workload, NetworkProfile]:
    """What the trace asks for, and the cluster with the contention that explains the trace.

    The trace of a single process tells nothing of exchanges: every rank is taken to be like it.

    Raises:
        ClusterError: the cluster was measured on another number of ranks.
        TraceError: the trace lacks what a prediction needs.
    """
    workload = Workload.from_trace(trace, cluster)
    if workload.num_ranks == 1:
        return workload.for_ranks(cluster.world_size), cluster
    return workload, calibrated(workload, trace, cluster)


def rank(
    strategies: Iterable[Strategy],
    workload: Workload,
    cluster: NetworkProfile,
    base: Strategy = Strategy(),  # noqa: B008 - frozen
) -> list[Prediction]:
    """Predictions of all strategies, the fastest first; ``base`` is what exactness refers to.

    Of those that differ by less than TOLERANCE, counted from the fastest, the one with the fewest
    segments comes first.
    """
    found = [_prediction(strategy, workload, cluster, base) for strategy in strategies]
    fastest = min((one.per_batch for one in found), default=0.0)

    def order(one: Prediction) -> tuple[int, int, float]:
        return int((one.per_batch / fastest - 1) / TOLERANCE), one.segments, one.per_batch

    return sorted(found, key=order)


def what_if(
    strategy: Strategy,
    workload: Workload,
    cluster: NetworkProfile,
    *,
    nodes: Sequence[int] = NODES,
    ranks_per_node: int = 1,
    rates: Sequence[float | None] = (None,),
) -> list[Point]:
    """One strategy on other clusters: every number of nodes at every rate."""
    points = []
    for count in nodes:
        ranks = count * ranks_per_node
        larger = workload.for_ranks(ranks)
        for rate in rates:
            other = cluster.scaled(count, ranks_per_node, rate)
            points.append(Point(count, ranks, rate, _prediction(strategy, larger, other, strategy)))
    return points


def exactness(strategy: Strategy, base: Strategy) -> str:
    """How a strategy's gradients differ from the plain mean, and its batch from that of ``base``.

    Example:
        >>> exactness(Strategy.load({"gradients": {"accumulate": 4}}), Strategy())
        'reordered, batch x4'
    """
    times = strategy.gradients.accumulate / base.gradients.accumulate
    return strategy.exactness if times == 1 else f"{strategy.exactness}, batch x{times:g}"


def _prediction(
    strategy: Strategy, workload: Workload, cluster: NetworkProfile, base: Strategy
) -> Prediction:
    seconds = predict(workload, Plan.of(strategy, workload.gradients, cluster.codecs), cluster)
    accumulate = strategy.gradients.accumulate
    batch = workload.data_wait + workload.forward + workload.backward
    alone = accumulate * batch + workload.optimizer + workload.other
    return Prediction(
        strategy=strategy,
        seconds=seconds,
        samples_per_second=float(workload.samples.sum()) * accumulate / seconds,
        efficiency=harmonic_mean(alone.tolist()) / seconds,
        memory_bytes=sum(map(_memory, workload.gradients)),
        segments=len(plan_segments(workload.gradients, strategy.gradients.split)),
        exactness=exactness(strategy, base),
    )


def _memory(gradient: Gradient) -> int:
    """Bytes of a gradient and of the flag beside it, which is an element of the same dtype."""
    bits = re.search(r"\d+", gradient.dtype)
    return gradient.num_bytes + (int(bits[0]) // 8 if bits and gradient.num_bytes else 0)
