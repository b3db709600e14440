"""Workloads and networks that what was measured leaves possible, to say how sure a prediction is.

[Note: What varies]
A member of an ensemble is one drawing of all that is not known for certain:

- *The trace.* Its steps are drawn again, with replacement, in blocks of neighbours, as what slows a
  machine down lasts for several steps: the moving block bootstrap (Künsch 1989).
- *Contention.* Each slowdown varies by the noise of its measurement. A fit to the trace that moves
  the slowdowns of the traced transport has two explanations: this training's computing is in the
  way more than what was measured, or exchanges are slower here even alone. Members take one, the
  other, or a part of both; and of the move, the other transports make all, nothing, or a part.
- *Exchanges.* Each collective varies by the noise of its timing, and by ``EXTRAPOLATED`` for every
  doubling of ranks or rates since.
- *Computing of ``sharded``*, of which only the testbeds' CPU is known.

All strategies are predicted in every member, so errors that they share cancel in a ratio.

A trace is of seconds, and a machine that others use is faster or slower minutes later. By how much
nothing in the trace tells; the network was measured in rounds, and each collective scatters with
the same machine, and by itself. So ``drift``, the least noise of all, is added to the seconds of a
later run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, log, log2, sqrt
from typing import NamedTuple, TypeVar, get_args

import numpy as np

from slipstream.planner.iteration.contention_fit import HALFWAY, changed, moved
from slipstream.planner.iteration.model import predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.traced import MeasuredSteps, traced_transport
from slipstream.planner.iteration.transport_cost import RECIPES
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.costs import Contention
from slipstream.planner.network.profile import CollectiveName, NetworkProfile
from slipstream.trace.event import Trace

MEMBERS = 16
UNKNOWN = 0.1
"""The noise of what was measured without saying how much it scatters."""
EXTRAPOLATED = 0.05
"""The standard deviation of the logarithm of an exchange's time, for each doubling beyond what was
measured: of ranks, of the rate of a link, of bytes."""
SHARDING_SPREAD = 0.5
"""The standard deviation of the logarithm of what ``sharded`` computes for a gradient."""
_DIRECT: tuple[CollectiveName, ...] = ("direct_all_reduce", "reduce_scatter", "all_gather")
_SLOWDOWNS = ("compute_slowdown", "exchange_slowdown", "latency_slowdown")


Name = TypeVar("Name", bound=str)


class Draw(NamedTuple):
    """Standard normal numbers of one member, each for what it is named after; of the fit's move,
    the part that computing explains, and the part that the other transports make (0 to 1)."""

    flat: Mapping[str, float]
    direct: Mapping[str, float]
    collectives: Mapping[CollectiveName, float]
    sharding: float
    by_computing: float
    by_others: float


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Members drawn from what a trace and a network say; see the note at the top of the file.

    Attributes:
        workloads: of the members.
        draws: likewise.
        offsets: by how much each member takes the trace itself to be longer than its drawn steps
            are: the logarithm of a factor, which is no error of a member that explains them.
        noise: the standard deviation of the logarithm of an iteration's seconds, between one
            drawing of the trace's steps and another.
        moves: how far the fit has moved slowdowns; see `contention_fit.moved`.
        direct: whether it was those of direct sends.
        drift: the standard deviation of the logarithm of an iteration's seconds, between one run
            and another.
        distance: doublings of ranks and rates between the network that was measured and that of the
            predictions.
    """

    workloads: tuple[Workload, ...]
    draws: tuple[Draw, ...]
    offsets: tuple[float, ...]
    noise: float
    moves: Mapping[str, float]
    direct: bool
    drift: float
    distance: float

    @classmethod
    def of(
        cls,
        trace: Trace,
        workload: Workload,
        calibrated: NetworkProfile,
        fitted: NetworkProfile,
        target: NetworkProfile,
    ) -> Ensemble:
        """Draw the members; the same ones for the same trace and networks.

        Args:
            trace: of the training.
            workload: what was read from it.
            calibrated: the network as it was measured.
            fitted: with as many ranks as the trace has, after the fit to it.
            target: the network that is predicted.
        """
        measured = traced_network(calibrated, trace)
        steps = MeasuredSteps.of(trace, measured)
        whole = steps.typical()
        random = np.random.default_rng(0)
        workloads, seconds, draws = [], [], []
        for _ in range(MEMBERS):
            chosen = _blocks(len(steps.seconds), random)
            seconds.append(log(np.median(steps.seconds[chosen])))
            workloads.append(_as_read(steps.typical(chosen), whole, workload))
            draws.append(_draw(random))
        direct = RECIPES[traced_transport(trace)].direct
        moves = moved(measured.contention(direct), fitted.contention(direct))
        noise = float(np.std(seconds))
        drift = min(_noise(one.noise) for one in measured.networks["world"].curves.values())
        traced = cls(tuple(workloads), tuple(draws), (), noise, moves, direct, drift, 0.0)
        plan = CommPlan.of_trace(trace, measured.codecs)

        def replayed(drawn: Workload, network: NetworkProfile) -> float:
            if drawn.num_ranks == 1:  # of a single process, which exchanges nothing
                return float(drawn.alone(plan.accumulate).max())
            return predict(drawn, plan, network)

        offsets = [
            log(replayed(*member)) - spent
            for member, spent in zip(traced.members(fitted), seconds, strict=True)
        ]
        elsewhere = tuple(one.for_ranks(target.world_size) for one in workloads)
        far = _distance(calibrated, target)
        return replace(traced, workloads=elsewhere, offsets=tuple(offsets), distance=far)

    def members(self, network: NetworkProfile) -> list[tuple[Workload, NetworkProfile]]:
        """The members' workloads, each with this network as it was drawn."""
        pairs = zip(self.workloads, self.draws, strict=True)
        return [(workload, self._drawn(network, draw)) for workload, draw in pairs]

    def _drawn(self, network: NetworkProfile, draw: Draw) -> NetworkProfile:
        far, alone = EXTRAPOLATED * self.distance, 1 - draw.by_computing
        factors: dict[CollectiveName, tuple[float, float]] = {}
        for name, curve in network.networks["world"].curves.items():
            noise = sqrt(_noise(curve.noise) ** 2 + far**2) * draw.collectives[name]
            part = alone if (name in _DIRECT) == self.direct else alone * draw.by_others
            latency, transfer = self.moves["latency_slowdown"], self.moves["exchange_slowdown"]
            factors[name] = exp(noise + part * latency), exp(noise + part * transfer)
        drawn = network.slowed(factors)
        for direct, numbers in ((False, draw.flat), (True, draw.direct)):
            if direct and network.direct is None:
                continue
            if direct == self.direct or network.direct is None:
                part = -alone  # of what the fit has moved this contention by
            else:
                part = draw.by_computing * draw.by_others - HALFWAY
            varied = _varied(network.contention(direct), numbers, self.moves, part)
            drawn = drawn.with_contention(direct, varied)
        sharding = network.sharding_seconds * exp(SHARDING_SPREAD * draw.sharding)
        return drawn.model_copy(update={"sharding_seconds": sharding})


def traced_network(network: NetworkProfile, trace: Trace) -> NetworkProfile:
    """The network with as many ranks as the trace has, extrapolated if it was measured on others.

    Only where an extrapolation was asked for; otherwise a different number is a mistake.
    """
    ranks = int(trace.meta.get("world_size", 1))
    if ranks in (1, network.world_size):
        return network
    hosts = len(set(trace.meta.get("hosts") or [""]))
    return network.scaled(hosts, ranks // hosts)


def _blocks(count: int, random: np.random.Generator) -> list[int]:
    """Numbers of ``count`` steps: blocks of about the root of that many, drawn with replacement."""
    length = max(round(sqrt(count)), 1)
    begins = random.integers(0, count - length + 1, size=ceil(count / length))
    return [int(begin) + i for begin in begins for i in range(length)][:count]


def _draw(random: np.random.Generator) -> Draw:
    def numbers(names: Sequence[Name]) -> dict[Name, float]:
        return dict(zip(names, random.standard_normal(len(names)).tolist(), strict=True))

    names: tuple[CollectiveName, ...] = get_args(CollectiveName)
    flat, direct = numbers(_SLOWDOWNS), numbers(_SLOWDOWNS)
    sharding, parts = float(random.standard_normal()), random.random(2).tolist()
    return Draw(flat, direct, numbers(names), sharding, *parts)


def _as_read(drawn: Workload, whole: Workload, workload: Workload) -> Workload:
    """A drawn workload changed as ``whole``, that of all steps, was changed to ``workload``."""
    shorter = float(workload.forward[0] / max(whole.forward[0], 1e-30))
    return replace(drawn, forward=drawn.forward * shorter)


def _varied(
    contention: Contention, numbers: Mapping[str, float], moves: Mapping[str, float], part: float
) -> dict[str, float]:
    """The slowdowns of a contention after a part of the moves, with the noise that was drawn."""
    noise = _noise(contention.noise)
    return changed(
        contention, {n: part * moves.get(n, 0.0) + noise * numbers[n] for n in _SLOWDOWNS}, 1.0
    )


def _distance(measured: NetworkProfile, target: NetworkProfile) -> float:
    """Doublings between two networks: of ranks, and of the time of their largest exchange."""
    ranks = abs(log2(target.world_size / measured.world_size))
    before, after = (one.networks["world"].all_reduce for one in (measured, target))
    rates = [curve.points[-1][1] for curve in (before, after)]
    return ranks + (abs(log2(rates[1] / rates[0])) if all(rates) else 0.0)


def _noise(measured: float | None) -> float:
    return UNKNOWN if measured is None else measured
