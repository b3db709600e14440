"""Refusals of settings and loaders that do not go with training that meets rarely."""

from __future__ import annotations

from slipstream.errors import StrategyError
from slipstream.strategy.precision import HalfWeightsConfig
from slipstream.strategy.spec import Strategy
from slipstream.strategy.split import OptimalConfig

ALLOWED = ("flat", "direct", "shared_memory", "hierarchical")


def check_local(strategy: Strategy) -> None:
    """Refuse what ranks cannot do that train on their own.

    Raises:
        StrategyError: names both settings, and the way out.
    """
    if strategy.local is None:
        return
    gradients, checks, problem = strategy.gradients, strategy.checks, ""
    hosts = gradients.transport.between_hosts
    if gradients.transport.kind not in ALLOWED:
        problem = (
            f"gradients.transport {gradients.transport.kind}: it would share updates that differ "
            f"from rank to rank, or search for an exchange that is rare; allowed: "
            f"{', '.join(ALLOWED)}"
        )
    elif hosts and strategy.local.auto:
        problem = (
            f"gradients.transport {gradients.transport.kind} and auto, which knows the cost of "
            "ranks that are alone; write local: {steps: ...}"
        )
    elif hosts and strategy.local.stretch:
        problem = (
            f"gradients.transport {gradients.transport.kind} and stretch: ranks of a host keep "
            "step with each other; leave out one"
        )
    elif isinstance(gradients.split, OptimalConfig):
        problem = "gradients.split optimal, which is found while gradients are exchanged; leave out"
    elif gradients.codec is not None:
        problem = "gradients.codec: gradients do not travel; write local: {codec: ...}"
    elif strategy.local.rendezvous is not None and checks.every is not None and not checks.replay:
        problem = (
            f"rendezvous and checks.every {checks.every}, which would compare nothing: jobs that "
            "come and go are not compared; leave it out, or add checks.replay true"
        )
    elif strategy.parallel.active:
        problem = "parallel: ranks that share a model exchange at every update; leave out one"
    elif isinstance(strategy.precision, HalfWeightsConfig):
        problem = (
            "precision half_weights, which updates fp32 copies of its own; write "
            "precision: {kind: autocast}"
        )
    elif strategy.data.balance is not None:
        problem = (
            "data.balance, whose weights are those of batches that are averaged together; leave "
            "out one"
        )
    if problem:
        raise StrategyError(f"local with {problem}")


def check_local_loader(strategy: Strategy, loader: object) -> None:
    """Refuse a loader of which all ranks must take a batch at the same time.

    Raises:
        StrategyError: says what to do with it.
    """
    local = strategy.local
    if local is None or loader is None:
        return
    if local.stretch:
        raise StrategyError(
            "local.stretch with a loader: ranks of different speed take different numbers of "
            "batches, and session.loader keeps them in step; leave it out of accelerate(), and "
            "iterate over it by yourself while session.all_updates is below what you want"
        )
    if local.rendezvous is not None:
        raise StrategyError(
            "local.rendezvous with a loader: which share of the data a job has is known after "
            "accelerate(); make the loader then, by session.data_rank and session.data_size"
        )
