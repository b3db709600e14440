"""Gains of settings beside the exchange: predicted where a trace tells, else a bound."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.ranking import Prediction, rank
from slipstream.strategy import Strategy
from slipstream.trace import Trace

LEAST = 0.01
"""A smaller share of an iteration is not worth a word."""


class Beside(NamedTuple):
    """A setting, and seconds of an iteration with it; ``at_best``: no less than these."""

    setting: str
    seconds: float
    at_best: bool = False


def beside(
    trace: Trace,
    workload: Workload,
    network: NetworkProfile,
    best: Prediction,
    base: Strategy,
    updates: int | None = None,
) -> tuple[list[Beside], tuple[str, ...]]:
    """Settings of data and computing that the traced training has a use for, beside ``best``.

    Args:
        trace: of the training; says what it has a use for.
        workload: its work, on as many ranks as are asked about.
        network: what exchanges cost.
        best: the exchange, as it is predicted.
        base: the strategy of the trace.
        updates: of the training, if known.

    Returns:
        Those that save a hundredth of an iteration, and the names of those that nothing predicts.
    """
    names = trace.meta.get("useful_compute") or ()
    found: list[Beside] = []

    def add(setting: str, changed: Workload, at_best: bool = False) -> None:
        [other] = rank([best.strategy], changed, network, base, updates)
        if other.seconds <= (1 - LEAST) * best.seconds:
            found.append(Beside(setting, other.seconds, at_best))

    if workload.reading is not None:
        if trace.meta.get("resizable"):
            add("twice as many data.prefetch.workers", workload.fed(times=2))
    elif trace.meta.get("prefetchable"):
        add("data.prefetch", workload.fed())
    if trace.meta.get("balanceable"):
        add("data.balance", workload.evened())
    if "fuse_optimizer" in names:
        at_once = replace(workload, optimizer=np.zeros_like(workload.optimizer))
        add("compute.fuse_optimizer", at_once, at_best=True)
    return found, tuple(f"compute.{name}" for name in names if name != "fuse_optimizer")
