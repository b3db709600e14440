"""Predictions of strategies for a training, from its trace and the network.

The only way in from other rooms: ``iteration`` says how long an iteration takes under a plan,
``search`` which strategies are worth comparing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from slipstream.errors import ClusterError, StrategyError, TraceError
from slipstream.planner.iteration.contention_fit import read_trace
from slipstream.planner.iteration.ensemble import Ensemble, traced_network
from slipstream.planner.iteration.model import predict, seconds_of
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.iteration.traced import traced_strategy
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.scale_out.collectives import fabric_profile
from slipstream.planner.scale_out.growth import Growth, Placement, grow
from slipstream.planner.scale_out.shape import FabricConfig
from slipstream.planner.search import candidates
from slipstream.planner.search.ranking import (
    NODES,
    RATES,
    Prediction,
    ScaleOutPoint,
    rank,
    recommended,
    what_if,
)
from slipstream.planner.search.rare_meetings import RareMeetings, choose_meetings
from slipstream.planner.search.unpredicted import Beside, beside
from slipstream.strategy import ByIndexConfig, Strategy
from slipstream.trace.event import FULLY_SHARD, Trace


@dataclass(frozen=True)
class Forecast:
    """Predicts strategies for the training of a trace.

    Attributes:
        trace: of the training, under any strategy.
        base: the strategy that others are compared with; their other settings are its.
        workload: what an iteration computes, and the bytes of its gradients.
        network: what exchanges cost, with the contention that explains the trace.
        measured: the network that ``network`` is extrapolated from, or ``network`` itself.
        calibrated: the network as its file says, before anything was fitted or extrapolated.
        rate: bits/s of each host's link, where they are not as measured.
        updates: of the whole training, if known: a codec that begins late counts for the rest.

    Example:
        >>> forecast = Forecast.of(trace, network)  # doctest: +SKIP
        >>> best = forecast.exact()[0]  # doctest: +SKIP
        >>> best.strategy, best.seconds  # doctest: +SKIP
    """

    trace: Trace
    base: Strategy
    workload: Workload
    network: NetworkProfile
    measured: NetworkProfile
    calibrated: NetworkProfile
    updates: int | None = None
    rate: float | None = None

    @classmethod
    def of(
        cls,
        trace: Trace,
        network: NetworkProfile,
        base: Strategy | None = None,
        updates: int | None = None,
    ) -> Self:
        """Read a trace, and fit the contention of the network to it.

        Args:
            trace: of all ranks, or of a single process: every rank is then assumed to be like it.
            network: as measured.
            base: None: the strategy that the trace was recorded under.
            updates: of the whole training, if known.

        Raises:
            ClusterError: the network was measured on another number of ranks.
            StrategyError: the trace has a strategy or a codec that is not known here.
            TraceError: the trace lacks what a prediction needs, ranks met rarely in it, or it is of
                torch's FSDP2.
        """
        if trace.meta.get("engine") == FULLY_SHARD:
            raise TraceError(
                "this trace is of torch's FSDP2 (fully_shard), which waits for each collective and "
                "takes none of a session's settings but codecs: nothing can be predicted from it. "
                "`slipstream trace summary` and `report` show where its time goes; for predictions "
                "record some iterations of the model under accelerate()"
            )
        base = base or traced_strategy(trace)
        if base.local is not None:
            raise TraceError(
                "this trace is of a run under local, whose iterations exchange nothing, or a "
                "fragment now and then: nothing can be predicted from it; record a few iterations "
                "without local"
            )
        workload, fitted = read_trace(trace, network)
        return cls(trace, base, workload, fitted, fitted, network, updates)

    @classmethod
    def elsewhere(
        cls,
        trace: Trace,
        network: NetworkProfile,
        *,
        nodes: int | None = None,
        ranks_per_node: int | None = None,
        rate: float | None = None,
        updates: int | None = None,
    ) -> Self:
        """Predict for other hosts, ranks or links than the trace was recorded on.

        Args:
            trace, network, updates: as for `of`; the network may have been measured on another
                number of ranks if ``nodes`` or ``ranks_per_node`` is given.
            nodes: hosts; None: as many as were measured.
            ranks_per_node: likewise.
            rate: bits/s of each host's link; None: as measured.

        Raises:
            ClusterError: the cluster asked for cannot be predicted.
            StrategyError, TraceError: as `of`; ranks share a model in the trace.
        """
        base = traced_strategy(trace)
        if base.parallel.active:
            raise TraceError(
                "this trace is of ranks that share a model (parallel), while a cluster file holds "
                "what exchanges between all ranks cost: nothing can be predicted from it; "
                "`slipstream trace summary` and `report` show where its time goes; for predictions "
                "record some iterations without parallel"
            )
        known = traced_network(network, trace) if nodes or ranks_per_node else network
        here = replace(cls.of(trace, known, base, updates), calibrated=network)
        hosts, per_host = here.network.hosts, here.network.ranks_per_host
        if rate is not None and (nodes or hosts) == 1:
            raise ClusterError("all ranks are on one host and use no link; give nodes, too")
        if not (nodes or ranks_per_node or rate):
            return here
        target = here.network.scaled(nodes or hosts, ranks_per_node or per_host, rate)
        workload = here.workload.for_ranks(target.world_size)
        return replace(here, workload=workload, network=target, rate=rate)

    # Which strategies.

    def exact(self) -> list[Prediction]:
        """Rank the ways to exchange that keep the mathematics; that of ``base`` is among them."""
        return self.rank(candidates.exact(self.workload, self.network, self.base))

    def lossy(self) -> list[Prediction]:
        """Rank what changes the mathematics: codecs, larger batches, 16-bit weights.

        Each on the exchange of ``base``, which is among them.
        """
        others = candidates.lossy(self.workload, self.network, [self.base])
        return self.rank([self.base, *others])

    def coded(self) -> list[Prediction]:
        """Rank ``base`` with each codec whose cost is known and that the optimizer allows."""
        return self.rank(candidates.coded(self.base, self.workload, self.network))

    def all(self) -> list[Prediction]:
        """Rank what is exact and what is lossy, each on ``base`` and on its best split, and ranks
        that meet rarely, where that pays."""
        every = candidates.every(self.workload, self.network, self.base)
        known = rank(every, self.workload, self.network, self.base, self.updates)
        rare = self.meetings(known).strategy
        return self.rank(every if rare is None else [*every, rare])

    def meetings(self, exchanges: Sequence[Prediction]) -> RareMeetings:
        """Choose how rarely ranks meet, beside these exchanges of gradients at every update.

        Example:
            >>> forecast.meetings(forecast.coded()).reason  # doctest: +SKIP
        """
        mine = self.base.gradients.accumulate, self.base.precision
        alike = [
            one
            for one in exchanges
            if (one.strategy.gradients.accumulate, one.strategy.precision) == mine
        ]
        return choose_meetings(self.workload, self.network, self.base, alike, self.updates)

    def rank(self, strategies: Iterable[Strategy]) -> list[Prediction]:
        """Predict these, the one to prefer first; see ``search.ranking.rank``."""
        here = self.workload, self.network, self.base, self.updates
        return rank(strategies, *here, self._ensemble)

    def recommended(self, ranked: Sequence[Prediction]) -> Prediction:
        """The one of these to act on without a measurement; see ``search.ranking.recommended``."""
        return recommended(ranked, self.base)

    def optimal_split(self, *seeds: Strategy) -> ByIndexConfig:
        """Compute the split with the shortest predicted iteration, all else as in the first."""
        return candidates.optimal_split(self.workload, self.network, seeds)

    def best_sharded(self, replicated: Sequence[float]) -> list[Strategy]:
        """``base`` by ``sharded`` as it is by default, and as it is predicted to be fastest with
        one of these replicated parts."""
        network = self.network
        return candidates.sharded(self.workload, network, self.base, [self.base], replicated)

    # What they take.

    def seconds(self, strategy: Strategy) -> float:
        """Predict an iteration in the long run."""
        return seconds_of(strategy, self.workload, self.network)

    def samples_per_second(self, batch: int, recompute_share: float = 0.0) -> float:
        """Predict the speed of all ranks under ``base`` with other batches.

        Args:
            batch: samples of each rank.
            recompute_share: the part of forward that runs again in backward.

        Raises:
            TraceError: how many samples the traced batches have is not known.
        """
        larger = self.workload.with_batch(batch)
        plan = replace(self._plan(self.base), recompute_share=recompute_share)
        seconds = predict(larger, plan, self.network)
        return float(larger.samples.sum()) * plan.accumulate / seconds

    def simulated(self, strategy: Strategy, steps: int) -> Trace:
        """The trace that so many iterations would leave.

        Raises:
            StrategyError: ranks meet rarely in it: no iteration stands for all.
        """
        if strategy.local is not None:
            raise StrategyError(
                "a predicted trace of local: its iterations differ; predict another strategy, or "
                "record the run"
            )
        plan = self._plan(strategy)
        trace = simulate(self.workload, plan, self.network, steps=steps)
        whole = strategy.with_gradients(split=ByIndexConfig.of_cuts(plan.cuts))
        return replace(trace, meta={**trace.meta, "strategy": whole.document(full=True)})

    def with_codecs(self, costs: Mapping[str, CodecCost]) -> Self:
        """The same where codecs cost this."""
        return replace(self, network=self.network.model_copy(update={"codecs": costs}))

    def with_workload(self, workload: Workload) -> Self:
        """The same for other work: balanced, fed in time."""
        return replace(self, workload=workload)

    def beside(self, best: Prediction) -> tuple[list[Beside], tuple[str, ...]]:
        """Predict what settings of data and computing would bring beside ``best``, and list those
        that nothing predicts."""
        return beside(self.trace, self.workload, self.network, best, self.base, self.updates)

    def over_nodes(self, strategy: Strategy) -> list[ScaleOutPoint]:
        """Predict one strategy on more and fewer hosts; none where hosts differ in size."""
        return self._elsewhere(strategy, nodes=NODES, rates=(self.rate,))

    def over_rates(self, strategy: Strategy) -> list[ScaleOutPoint]:
        """Predict one strategy with other links; none on one host."""
        hosts = self.network.hosts
        return self._elsewhere(strategy, nodes=(hosts,), rates=RATES) if hosts > 1 else []

    def over_ranks(
        self,
        numbers: Sequence[int],
        *,
        ranks_per_node: int | None = None,
        rate: float | None = None,
        fabric: FabricConfig = FabricConfig(),  # noqa: B008 - frozen
        lossy: bool = False,
    ) -> Growth:
        """Predict each technique on these numbers of ranks, each with its batch of the trace.

        Args:
            numbers: of ranks.
            ranks_per_node: None: as many as were measured.
            rate: bits/s of each host's link; None: as measured.
            fabric: what hosts share, and how unequal ranks are.
            lossy: also what changes the mathematics.

        Raises:
            ClusterError: a number is no multiple of the ranks of a host, or the network cannot be
                extrapolated.
        """
        each = ranks_per_node or self.network.ranks_per_host

        def place(ranks: int) -> Placement:
            if ranks % each:
                raise ClusterError(
                    f"{ranks} ranks are not a multiple of {each}, the ranks of each host; choose "
                    "other numbers, or --ranks-per-node"
                )
            network = self.measured.scaled(ranks // each, each, rate)
            return Placement(self.workload.for_ranks(ranks), fabric_profile(network, fabric))

        most = place(max(numbers)).network
        notes = tuple(filter(None, (most.extrapolated, *most.doubts)))
        return replace(grow(place, numbers, self.base, fabric, lossy=lossy), notes=notes)

    @cached_property
    def _ensemble(self) -> Ensemble:
        networks = self.calibrated, self.measured, self.network
        return Ensemble.of(self.trace, self.workload, *networks)

    def _elsewhere(self, strategy: Strategy, **where: Any) -> list[ScaleOutPoint]:
        here = self.measured
        if here.hosts * here.ranks_per_host != here.world_size:
            return []
        per_node = self.network.ranks_per_host
        return what_if(strategy, self.workload, here, ranks_per_node=per_node, **where)

    def _plan(self, strategy: Strategy) -> CommPlan:
        return CommPlan.of(strategy, self.workload.gradients, self.network.codecs)
