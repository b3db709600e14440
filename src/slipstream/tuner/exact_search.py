"""One run of the script that tries all exact ways to exchange in turn, and keeps the fastest.

The script runs under ``split: optimal`` and ``transport: auto``, as far as the strategy to start
from leaves these at their defaults. ``online_search`` lets the choices take turns in it; the trace
that follows says which one was kept, and why.
"""

from __future__ import annotations

from slipstream.planner.iteration.traced import traced_strategy
from slipstream.strategy import (
    AutoConfig,
    ByBytesConfig,
    FlatConfig,
    OptimalConfig,
    Strategy,
)
from slipstream.trace import Trace
from slipstream.tuner.trials import Measurement
from slipstream.tuner.turns import MOST, SETTLING, TURNS

STEPS = 5
"""Iterations in a window, where the split alone is searched for."""
UPDATES = max(TURNS * MOST * (SETTLING + STEPS), AutoConfig().updates)
"""Of the script until the choice stays, at most."""
CALIBRATION = 10.0
"""Seconds in which the network is measured meanwhile, at most."""
RESERVE = 1.2
"""Later runs may take a little longer than the first one."""


def open_strategy(base: Strategy) -> Strategy | None:
    """``base`` with its exchange left open; None where all of it is named.

    Another split than the default stays, and another transport than ``flat``: the search begins
    with these, and would not notice that it ends slower than ``base``.

    Example:
        >>> open_strategy(Strategy.load({"gradients": {"split": "single"}})).gradients.split.kind
        'single'
    """
    split, transport = base.gradients.split, base.gradients.transport
    searching = base.with_gradients(
        split=OptimalConfig(steps=STEPS) if split == ByBytesConfig() else split,
        transport=AutoConfig() if transport == FlatConfig() else transport,
    )
    return None if searching == base else searching


def chosen(trace: Trace, base: Strategy) -> Strategy:
    """``base`` with the exchange that a trace was recorded under."""
    found = traced_strategy(trace).gradients
    names = ("split", "transport", "overlap")
    return base.with_gradients(**{name: getattr(found, name) for name in names})


def reason(trace: Trace) -> str:
    """The measurements in turn, in words."""
    return str(trace.meta.get("search", "the script did not say what was measured"))


def seconds_needed(first: Measurement) -> float:
    """Bound the time of the run by another run of the same script, in seconds."""
    steps = len({event.step for event in first.trace.events})
    start = max(first.wall - steps * first.seconds, 0.0)
    return RESERVE * (start + (UPDATES + steps) * first.seconds) + CALIBRATION
