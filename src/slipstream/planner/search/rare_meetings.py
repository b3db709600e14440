"""Choose how rarely ranks meet: seldom enough to hide the exchange, and no more rarely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.planner.iteration.local_cost import is_costed, local_bytes, local_seconds
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import Prediction
from slipstream.strategy import (
    ByBytesConfig,
    DirectConfig,
    FlatConfig,
    GradientsConfig,
    Int4Config,
    Int8Config,
    LocalConfig,
    SharedMemoryConfig,
    Strategy,
)
from slipstream.strategy.conflicts import beside_local
from slipstream.strategy.local import ENOUGH, FRAGMENTS

STEPS = (8, 16, 32, 64, 128)
ROUNDS = 100
"""Meetings below which a run that meets rarely ends with a higher loss (Douillard et al. 2025)."""
HARMLESS = 16
"""Steps up to which a causal LM and a ResNet kept the loss of data parallelism: docs/local.md."""
LITTLE = 0.03
"""Part of the time for which meetings beyond `HARMLESS` steps do not become rarer: twice as many
steps raised the loss of that causal LM by one to three percent."""
CODECS = (None, Int8Config(), Int4Config())
"""The least lossy first."""


@dataclass(frozen=True, slots=True)
class RareMeetings:
    """A choice, and its reason.

    Attributes:
        strategy: with ``local``; None: ranks go on exchanging gradients.
        reason: of either, a sentence.
    """

    strategy: Strategy | None
    reason: str


def choose_meetings(
    workload: Workload,
    network: NetworkProfile,
    base: Strategy,
    exchanges: Sequence[Prediction],
    updates: int | None = None,
) -> RareMeetings:
    """Choose the settings of ``local`` that keep most of a training and reach `ENOUGH`.

    Up to `HARMLESS` steps a shorter delay comes first, then fewer steps, then a codec that keeps
    more; where none reaches it, the fastest. Beyond, fewer steps that are slower by a `LITTLE`.

    Args:
        workload: what an update computes, and the bytes of its gradients.
        network: what exchanges cost.
        base: the strategy whose other settings stay.
        exchanges: of gradients at every update, as they are predicted.
        updates: of the whole run, if known.
    """
    if network.world_size == 1:
        return RareMeetings(None, "one rank meets nobody")
    others = base.checks, base.parallel, base.precision, base.data
    if (problem := beside_local(LocalConfig(), GradientsConfig(), *others)) is not None:
        return RareMeetings(None, f"the strategy of the trace stays as it is: local with {problem}")
    alone = float(workload.alone(base.gradients.accumulate).max())
    best = min(exchanges, key=lambda prediction: prediction.seconds)
    reached = alone / best.seconds
    if reached >= ENOUGH:
        return RareMeetings(
            None,
            f"{label(best.strategy)} exchanges gradients at {reached:.0%} of the speed without any "
            f"exchange ({best.seconds:.4g} s an update), so nothing is left to gain",
        )
    found = [one for one in _settings(base, network) if _rounds(one, updates) >= ROUNDS]
    if not found:
        return RareMeetings(
            None,
            f"{updates} updates are fewer than {ROUNDS} meetings of {STEPS[0]} updates: the loss "
            "would end higher",
        )
    seconds = [local_seconds(one, workload, network) for one in found]
    goal = max(alone / ENOUGH, min(seconds))
    reaches = next(i for i, each in enumerate(seconds) if each <= goal)
    steps = [_steps(one) for one in found]
    enough = (
        i
        for i, each in enumerate(seconds)
        if max(steps[i], HARMLESS) < steps[reaches] and each <= (1 + LITTLE) * goal
    )
    chosen = next(enough, reaches)
    rarer = ""
    if chosen != reaches:
        rarer = (
            f"; {steps[reaches]} steps would reach {alone / seconds[reaches]:.0%}, at "
            f"meetings {steps[reaches] // steps[chosen]} times as rare"
        )
    megabytes = local_bytes(found[chosen], workload, network) / 2**20
    return RareMeetings(
        found[chosen],
        f"{label(found[chosen])}: predicted {seconds[chosen]:.4g} s and {megabytes:.3g} MB an "
        f"update, {alone / seconds[chosen]:.0%} of the speed without any exchange{rarer}; "
        f"{label(best.strategy)} takes {best.seconds:.4g} s",
    )


def _settings(base: Strategy, network: NetworkProfile) -> Iterator[Strategy]:
    """List what may be chosen, the one that keeps most of a training first."""
    transport = base.gradients.transport
    if not isinstance(transport, FlatConfig | DirectConfig | SharedMemoryConfig):
        transport = FlatConfig()
    plain = base.with_gradients(transport=transport, split=ByBytesConfig(), codec=None)
    codecs = [codec for codec in CODECS if codec is None or is_costed(codec, network.codecs)]
    found = [(steps, delay) for steps in STEPS for delay in range(steps // FRAGMENTS + 1)]
    for steps, delay in sorted(found, key=_harm):
        for codec in codecs:
            config = LocalConfig(
                steps=steps, fragments=FRAGMENTS if delay else 1, delay=delay, codec=codec
            )
            yield plain.model_copy(update={"local": config})


def _harm(setting: tuple[int, int]) -> tuple[float, ...]:
    """Sort key of steps and delay: up to `HARMLESS` steps cost nothing, further ones more than a
    delay, and a delay by the part of a round that it is."""
    steps, delay = setting
    return max(steps, HARMLESS), delay / steps, steps


def _rounds(strategy: Strategy, updates: int | None) -> float:
    return float("inf") if updates is None else updates / _steps(strategy)


def _steps(strategy: Strategy) -> int:
    assert strategy.local is not None
    return strategy.local.steps
