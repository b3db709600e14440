"""One start of the script that tries several exact choices, where starts are what takes long.

The script runs under ``split: optimal`` and ``transport: auto``, as far as the strategy to start
from leaves these at their defaults. ``online_search`` lets the choices take turns in it; the trace
that follows says which one was kept, and why.
"""

from __future__ import annotations

from slipstream.planner.candidates import with_gradients
from slipstream.planner.ranking import traced_strategy
from slipstream.strategy import Auto, ByBytes, Flat, Optimal, Strategy
from slipstream.trace import Trace
from slipstream.tuner.search_space import MOST, SETTLING, TURNS

STEPS = 5
"""Iterations in a window, where the split alone is searched for."""
UPDATES = max(TURNS * MOST * (SETTLING + STEPS), Auto().updates)
"""Of the script until the choice stays, at most."""
CALIBRATION = 20.0
"""Seconds in which the network is measured meanwhile, at most."""


def open_strategy(base: Strategy) -> Strategy | None:
    """``base`` with its exchange left open; None where all of it is named.

    Another split than the default stays, and another transport than ``flat``: the search begins
    with these, and would not notice that it ends slower than ``base``.

    Example:
        >>> open_strategy(Strategy.load("hccl")).gradients.split.kind
        'by_percent'
    """
    split, transport = base.gradients.split, base.gradients.transport
    settings = {
        "split": Optimal(steps=STEPS) if split == ByBytes() else split,
        "transport": Auto() if transport == Flat() else transport,
    }
    searching = with_gradients(base, **settings)
    return None if searching == base else searching


def chosen(trace: Trace, base: Strategy) -> Strategy:
    """``base`` with the split and the transport that a trace was recorded under."""
    gradients = traced_strategy(trace).gradients
    return with_gradients(base, split=gradients.split, transport=gradients.transport)


def reason(trace: Trace) -> str:
    """Why: what was measured in turn."""
    return str(trace.meta.get("search", "the script did not say what was measured"))
