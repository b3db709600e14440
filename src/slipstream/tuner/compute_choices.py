"""Settings of compute that a tuner tries. Nothing predicts what they bring: they are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.strategy import Strategy
from slipstream.trace import Trace

COMPUTE_CHOICES: tuple[Mapping[str, Any], ...] = (
    {"channels_last": True},
    {"compile": True},
    {"fuse_bn_act": True, "fuse_add_act": True},
    {"fuse_optimizer": True},
)
"""Each is tried on the best so far, and stays if it makes that faster."""


def with_compute(strategy: Strategy, settings: Mapping[str, Any]) -> Strategy | None:
    """``strategy`` with other settings of compute; None where it has them, or excludes them.

    Example:
        >>> with_compute(Strategy(), {"compile": True}).compute.compile
        True
        >>> compiled = Strategy.load({"compute": {"compile": True}})
        >>> with_compute(compiled, {"fuse_bn_act": True}) is None
        True
    """
    compute = strategy.compute
    asked = {name: value for name, value in settings.items() if not getattr(compute, name)}
    fuses = bool(compute.patterns) or any(name.startswith(FUSED) for name in asked)
    if not asked or (fuses and (compute.compile or "compile" in asked)):
        return None
    changed = compute.model_copy(update=asked)
    return strategy.model_copy(update={"compute": changed})


def useful(choices: Sequence[Mapping[str, Any]], trace: Trace) -> list[Mapping[str, Any]]:
    """Of each choice the settings that have a use in the training that was traced.

    Example:
        >>> trace = Trace((), {"useful_compute": ["compile", "fuse_add_act"]})
        >>> useful(COMPUTE_CHOICES, trace)
        [{'compile': True}, {'fuse_add_act': True}]
    """
    names = trace.meta.get("useful_compute")
    if names is None:
        return [*choices]
    left = ({name: value for name, value in c.items() if name in names} for c in choices)
    return [choice for choice in left if choice]


FUSED = ("fuse_bn", "fuse_add", "fuse_relu")
"""How settings begin that ``compile`` excludes."""
