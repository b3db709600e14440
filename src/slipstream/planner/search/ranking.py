"""Predict and rank strategies, on the measured network or on one of another size or speed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import exp, log, log2, sqrt
from statistics import fmean, harmonic_mean
from typing import NamedTuple

from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.planner.iteration.ensemble import EXTRAPOLATED, Ensemble
from slipstream.planner.iteration.model import seconds_of
from slipstream.planner.iteration.transport_cost import (
    ExchangeCurve,
    num_replicated,
    transport_kind,
    updated_part,
)
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.candidates import TOLERANCE
from slipstream.strategy import (
    ByIndexConfig,
    HalfWeightsConfig,
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

SAME_WAY, OTHER_WAY = 0.025, 0.055
"""The simulator's own error of a ratio, between strategies that differ in their split, overlap or
accumulation alone, and between others: the standard deviation of its logarithm. On the testbeds of
`benchmarks/results/prediction.json` four fifths of 42 ratios each are within 3.1 % and 7.9 %."""
REPLAY = 0.014
"""Its own error of an iteration that it replays from the iteration's trace, likewise."""
DEVIATIONS = 1.2816
"""Standard deviations on either side of the mean that hold 80 % of a normal distribution."""

Bounds = tuple[float, float]
"""The low and the high end of an interval."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's prediction for one strategy.

    ``seconds`` is one iteration, which is one update: the mean over the updates of a training, if
    their number was given, else of those after the codec's warm-up. ``efficiency`` is the speed of
    all ranks divided by the sum of the speeds that they would have without any exchange.
    ``memory_bytes`` is the memory of gradients, their used flags, what a codec keeps and, where the
    trace tells it, the optimizer's state on a rank. ``samples_per_second`` is 0 where the trace
    does not record the number of samples.

    ``interval`` holds the seconds of a run as long as the trace with a probability of 80 %.
    ``ratio`` is the time for a batch over that of the baseline, and ``ratio_interval`` holds it as
    often: errors that both share cancel, so it is the narrower one. Where no trace stands behind
    the prediction, both hold the simulator's own error alone.
    """

    strategy: Strategy
    seconds: float
    samples_per_second: float
    efficiency: float
    memory_bytes: int
    segments: int
    exactness: str
    interval: Bounds
    ratio: float
    ratio_interval: Bounds

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than the baseline for all that its ratio may be."""
        return self.ratio_interval[1] < 1

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
    ensemble: Ensemble | None = None,
) -> list[Prediction]:
    """Predict all strategies; the most promising one, to measure first, comes first.

    That is the fastest, but for what a prediction cannot promise: among strategies that differ by
    less than TOLERANCE, counted from the fastest, the one with the fewest segments comes first;
    ``sharded`` and a computed split count as slower by MARGIN each, unless they are those of
    ``base``; a codec that begins late comes last where nothing says how many updates follow.

    Args:
        strategies: to predict.
        workload, network: of the training.
        base: the baseline: of ratios, and what ``exactness`` compares batches with.
        updates: of the whole training, some of which may be over before a codec begins.
        ensemble: what else the workload and the network may be; for intervals.
    """
    situation = _Situation.of(workload, network, base, updates, ensemble)
    predictions = [situation.predict(strategy) for strategy in strategies]

    def counted(one: Prediction) -> float:
        return one.per_batch * _handicap(one.strategy, base)

    fastest = min(map(counted, predictions), default=0.0)

    def order(one: Prediction) -> tuple[bool, int, int, float]:
        late = updates is None and late_by(one.strategy.gradients.codec) > 0
        steps = int((counted(one) / fastest - 1) / TOLERANCE)
        return late, steps, one.segments, counted(one)

    return sorted(predictions, key=order)


def recommended(ranked: Sequence[Prediction], base: Strategy) -> Prediction:
    """The prediction to act on without a measurement: the first whose ratio is below 1 with its
    whole interval, or the baseline.

    ``sharded`` and a computed split must be below 1 by MARGIN each, as they count in `rank`.

    Args:
        ranked: as `rank` returns them, the baseline among them.
        base: the baseline.
    """
    [baseline] = (one for one in ranked if one.strategy == base)

    def is_sure(one: Prediction) -> bool:
        return one.ratio_interval[1] * _handicap(one.strategy, base) < 1

    return next((one for one in ranked if one is baseline or is_sure(one)), baseline)


def _handicap(strategy: Strategy, base: Strategy) -> float:
    """Count up a strategy that a prediction cannot promise: a factor of its time; see MARGIN."""
    ours, theirs = strategy.gradients, base.gradients
    sharded = _differs(ours.transport, theirs.transport, ShardedConfig)
    computed = _differs(ours.split, theirs.split, ByIndexConfig)
    return 1 + MARGIN * (sharded + computed)


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
        [prediction] = rank([strategy], larger, other, strategy)
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


@dataclass(frozen=True, slots=True)
class _Situation:
    """Common ground of predictions: the first world is what was read and measured, the others are
    what it may be besides."""

    worlds: Sequence[tuple[Workload, NetworkProfile]]
    base: Strategy
    updates: int | None
    ensemble: Ensemble | None
    of_base: Sequence[float]
    """Seconds of the baseline in each world, for a batch."""

    @classmethod
    def of(
        cls,
        workload: Workload,
        network: NetworkProfile,
        base: Strategy,
        updates: int | None,
        ensemble: Ensemble | None,
    ) -> _Situation:
        worlds = [(workload, network), *(ensemble.members(network) if ensemble else ())]
        seconds = [_mean_seconds(base, work, net, updates) for work, net in worlds]
        per_batch = [one / base.gradients.accumulate for one in seconds]
        return cls(worlds, base, updates, ensemble, per_batch)

    def predict(self, strategy: Strategy) -> Prediction:
        workload, network = self.worlds[0]
        seconds = [_mean_seconds(strategy, work, net, self.updates) for work, net in self.worlds]
        accumulate = strategy.gradients.accumulate
        pairs = zip(seconds, self.of_base, strict=True)
        ratios = [log(one / accumulate / base) for one, base in pairs]
        model = self._model_error(strategy)
        noise, drift, corrected = 0.0, 0.0, [log(one) for one in seconds]
        if self.ensemble is not None:
            noise, drift = self.ensemble.noise, self.ensemble.drift
            offsets = (0.0, *self.ensemble.offsets)
            corrected = [one - off for one, off in zip(corrected, offsets, strict=True)]
        half = isinstance(strategy.precision, HalfWeightsConfig)
        computed = workload.computed(half, network.half_speed)
        return Prediction(
            strategy=strategy,
            seconds=seconds[0],
            samples_per_second=float(workload.samples.sum()) * accumulate / seconds[0],
            efficiency=harmonic_mean(computed.alone(accumulate).tolist()) / seconds[0],
            memory_bytes=_memory(strategy, computed),
            segments=len(plan_segments(workload.gradients, strategy.gradients.split)),
            exactness=exactness(strategy, self.base),
            interval=_interval(corrected, model, noise, drift, REPLAY),
            ratio=exp(ratios[0]),
            ratio_interval=_interval(ratios, model, 0.0 if strategy == self.base else noise),
        )

    def _model_error(self, strategy: Strategy) -> float:
        """The simulator's own error of a ratio, with that of sizes that were not measured."""
        if strategy == self.base:
            return 0.0
        mine, its = (_way(one) for one in (strategy, self.base))
        own = SAME_WAY if mine == its else OTHER_WAY
        return sqrt(own**2 + (EXTRAPOLATED * _doublings(strategy, *self.worlds[0])) ** 2)


def _interval(logarithms: Sequence[float], *errors: float) -> Bounds:
    """80 % around the first, from how far the others are from it and from independent errors."""
    middle, *others = logarithms
    spread = fmean((one - middle) ** 2 for one in others) if others else 0.0
    reach = DEVIATIONS * sqrt(spread + sum(error**2 for error in errors))
    return exp(middle - reach), exp(middle + reach)


def _way(strategy: Strategy) -> object:
    """Name the way to compute and exchange, apart from split, overlap and accumulation."""
    config = strategy.gradients
    return transport_kind(config.transport), config.codec, strategy.precision, strategy.local


def _doublings(strategy: Strategy, workload: Workload, network: NetworkProfile) -> float:
    """Doublings of the largest exchange beyond the largest size that was measured."""
    config, gradients = strategy.gradients, workload.gradients
    cuts = (0, *(segment.stop for segment in plan_segments(gradients, config.split)))
    largest = max(sum(g.num_bytes for g in gradients[a:b]) for a, b in pairwise(cuts))
    stages = ExchangeCurve.of(transport_kind(config.transport), network).stages
    measured = min(stage.curve.points[-1][0] for stage in stages)
    return max(log2(largest / measured), 0.0) if largest else 0.0


def _mean_seconds(
    strategy: Strategy, workload: Workload, network: NetworkProfile, updates: int | None
) -> float:
    """Seconds of an update, the mean over so many; None: in the long run."""
    seconds = seconds_of(strategy, workload, network)
    if late := late_share(strategy, updates):  # DGC's warm-up counts as dense, which it nearly is
        dense = seconds_of(strategy.with_gradients(codec=None), workload, network)
        seconds = (1 - late) * seconds + late * dense
    return seconds


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
