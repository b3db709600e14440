"""One start of the script that tries several exact choices, where starts are what takes long.

The script runs under ``split: optimal`` and ``transport: auto``, as far as the strategy to start
from leaves these at their defaults. ``online_search`` lets the choices take turns in it; the trace
that follows says which one was kept, and why. ``sharded``, which no training can change to while it
runs, gets a start of its own if it is predicted to be the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from slipstream.errors import LaunchError
from slipstream.planner.candidates import label, with_gradients
from slipstream.planner.ranking import Prediction, traced_strategy
from slipstream.strategy import (
    AutoConfig,
    ByBytesConfig,
    FlatConfig,
    OptimalConfig,
    ShardedConfig,
    Strategy,
)
from slipstream.trace import Trace
from slipstream.tuner.search_space import MOST, SETTLING, TURNS
from slipstream.tuner.trial_log import TrialLog, Tuned
from slipstream.tuner.trials import Failure, Measurement

STEPS = 5
"""Iterations in a window, where the split alone is searched for."""
UPDATES = max(TURNS * MOST * (SETTLING + STEPS), AutoConfig().updates)
"""Of the script until the choice stays, at most."""
CALIBRATION = 20.0
"""Seconds in which the network is measured meanwhile, at most."""
RESERVE = 1.2
"""Later runs may take a little longer than the first one."""
WORTH = 0.05
"""By how much another start must be faster: starts differ, and there is no time for pairs."""

RunTrial = Callable[[Strategy, float], Measurement | Failure]
Predict = Callable[[Trace], Sequence[Prediction]]


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
        "split": OptimalConfig(steps=STEPS) if split == ByBytesConfig() else split,
        "transport": AutoConfig() if transport == FlatConfig() else transport,
    }
    searching = with_gradients(base, **settings)
    return None if searching == base else searching


def chosen(trace: Trace, base: Strategy) -> Strategy:
    """``base`` with the exchange that a trace was recorded under."""
    found = traced_strategy(trace).gradients
    names = ("split", "transport", "overlap")
    return with_gradients(base, **{name: getattr(found, name) for name in names})


def reason(trace: Trace) -> str:
    """Why: what was measured in turn."""
    return str(trace.meta.get("search", "the script did not say what was measured"))


@dataclass(frozen=True)
class OneStart:
    """Tunes a script that takes long to start.

    Args:
        run: measures the script under a strategy, within a number of seconds.
        predict: from the baseline's trace to predictions, the best first.
        log: gets every run.
        left: seconds of the budget that are left.
        doing: called with what happens next, in words.
    """

    run: RunTrial
    predict: Predict
    log: TrialLog
    left: Callable[[], float]
    doing: Callable[[str], None]

    def tune(self, searching: Strategy, first: Measurement, budget: float, instead: int) -> Tuned:
        """Let one run try the exact choices in turn.

        Args:
            searching: the baseline with its exchange left open.
            first: the baseline's run.
            budget: seconds for everything.
            instead: of so many runs, for which there is no room.

        Raises:
            LaunchError: the budget has no room for that either.
        """
        base, steps = self.log.base, len({event.step for event in first.trace.events})
        start = max(first.wall - steps * first.seconds, 0.0)
        needed = RESERVE * (start + (UPDATES + steps) * first.seconds) + CALIBRATION
        if needed > self.left():
            by_trials, spent = instead * first.wall * RESERVE, budget - self.left()
            raise LaunchError(
                f"the budget of {budget:.0f} s is too small for one trial: the baseline run "
                f"took {first.wall:.1f} s, {start:.1f} s of it before the first step; {instead} "
                f"more runs take {by_trials:.0f} s, and one start that tries the exact choices in "
                f"{UPDATES} steps takes {needed:.0f} s; give --budget "
                f"{ceil(spent + min(needed, by_trials))}s or more"
            )
        self.log.note(base, None, first, f"the baseline; {start:.1f} s before the first step")
        self.doing(f"exact choices in one start: {UPDATES} steps, about {needed:.0f} s")
        outcome = self.run(searching, self.left())
        why = f"one start instead of {instead} runs of {first.wall:.1f} s"
        if isinstance(outcome, Failure):
            self.log.note(searching, None, outcome, why)
            verdict = f"the start that tried others {outcome.status}: the baseline stays"
            return self.log.result(base, verdict)
        best, words = chosen(outcome.trace, base), f"{why}: {reason(outcome.trace)}"
        self.log.note(best, None, outcome, words)
        sharded = self._sharded(first, outcome)
        if sharded is not None:
            return sharded
        return self.log.result(best, f"{label(best)} ({best.exactness}), chosen in {words}")

    def _sharded(self, first: Measurement, kept: Measurement) -> Tuned | None:
        """The result, if ``sharded`` is predicted to be the fastest, and is."""
        allowed = (first.trace.meta.get("optimizer") or {}).get("shardable")
        if not allowed or RESERVE * first.wall + 2 * CALIBRATION > self.left():
            return None
        self.doing("predicting sharded")
        try:
            prediction = self.predict(first.trace)[0]  # which may measure the network
        except LaunchError:  # within the budget
            return None
        strategy = prediction.strategy
        if not isinstance(strategy.gradients.transport, ShardedConfig):
            return None
        self.doing(label(strategy))
        outcome = self.run(strategy, self.left())
        self.log.note(strategy, prediction, outcome, "predicted fastest; a start of its own")
        if isinstance(outcome, Failure) or outcome.seconds > (1 - WORTH) * kept.seconds:
            return None
        verdict = (
            f"{label(strategy)} ({strategy.exactness}), {outcome.seconds / kept.seconds:.3f} of "
            "the time of the best other choice, each measured in a start of its own"
        )
        return self.log.result(strategy, verdict)
