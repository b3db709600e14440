"""Settings of computing and loading that a tuner tries: nothing predicts what they bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import StrategyError
from slipstream.strategy import BalanceConfig, PrefetchConfig, Strategy
from slipstream.trace import Trace

MEASURED_CHOICES: tuple[Mapping[str, Any], ...] = (
    {"balance": BalanceConfig()},
    {"prefetch": PrefetchConfig()},
    {"channels_last": True},
    {"compile": True},
    {"fuse_bn_act": True, "fuse_add_act": True},
    {"fuse_optimizer": True},
)
"""Each is tried on the best so far, and stays if it makes that faster."""

LOADING = {"prefetch": "prefetchable", "balance": "balanceable"}
"""Settings of data, and what a trace calls trainings that they have a use in."""


def with_settings(strategy: Strategy, settings: Mapping[str, Any]) -> Strategy | None:
    """``strategy`` with other settings of compute or data; None where it has them, or excludes
    them.

    Example:
        >>> with_settings(Strategy(), {"compile": True}).compute.compile
        True
        >>> compiled = Strategy.load({"compute": {"compile": True}})
        >>> with_settings(compiled, {"fuse_bn_act": True}) is None
        True
        >>> captured = Strategy.load({"compute": {"cuda_graph": True}})
        >>> with_settings(captured, {"compile": True}) is None
        True
    """
    group = "data" if settings.keys() & LOADING.keys() else "compute"
    config = getattr(strategy, group)
    asked = {name: value for name, value in settings.items() if not getattr(config, name)}
    if not asked:
        return None
    try:
        return strategy.model_copy(update={group: config.model_copy(update=asked)})
    except StrategyError:
        return None


def useful(choices: Sequence[Mapping[str, Any]], trace: Trace) -> list[Mapping[str, Any]]:
    """Keep of each choice the settings that have a use in the training that was traced.

    Example:
        >>> trace = Trace((), {"useful_compute": ["compile", "fuse_add_act"]})
        >>> useful(MEASURED_CHOICES, trace)
        [{'compile': True}, {'fuse_add_act': True}]
    """
    names = trace.meta.get("useful_compute")
    return [
        left
        for choice in choices
        if (left := {n: v for n, v in choice.items() if _has_use(n, names, trace)})
    ]


def _has_use(name: str, names: Sequence[str] | None, trace: Trace) -> bool:
    if name in LOADING:
        return bool(trace.meta.get(LOADING[name], False))
    return names is None or name in names
