"""What a tuner decides about scripts whose truth is known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.errors import LaunchError, TraceError
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import Prediction
from slipstream.strategy import Strategy
from slipstream.strategy.codec import SCATTERED
from slipstream.trace import Trace
from slipstream.trace.event import FULLY_SHARD
from slipstream.tuner.exact_search import UPDATES, open_strategy
from slipstream.tuner.measured_choices import MEASURED_CHOICES, with_settings
from slipstream.tuner.significance import LEAST_PAIRS, MOST_PAIRS
from slipstream.tuner.trial_log import Tuned
from slipstream.tuner.trials import Failure, Measurement
from slipstream.tuner.tune import Tuner
from tests.harness.traces import by_hand

STEP, STEPS, WALL = 0.1, 4, 10.0
TRACE = by_hand(ranks=2, steps=STEPS)
BASE = Strategy()
OPEN = open_strategy(BASE)
KEPT = Strategy.load(
    {"gradients": {"split": {"kind": "by_index", "last": [0, 3]}, "transport": "direct"}}
)


def candidate(number: int, base: Strategy = BASE, **gradients: Any) -> Strategy:
    """A lossy strategy like no other: one that accumulates so many batches, or as given."""
    return base.with_gradients(**(gradients or {"accumulate": 2 + number}))


class Script:
    """A training of which the truth is known: seconds for one batch, by strategy.

    Every run takes WALL seconds of its own clock. The run that tries exact choices keeps ``kept``.
    """

    def __init__(
        self, truth: Mapping[Strategy, Any], kept: Strategy = BASE, spread: float = 0.0
    ) -> None:
        self.truth, self.kept, self.spread = dict(truth), kept, spread
        self.clock, self.runs, self.limits = 0.0, list[Strategy](), list[float]()
        self.trace = TRACE

    def run(self, strategy: Strategy, limit: float) -> Measurement | Failure:
        self.runs.append(strategy)
        self.limits.append(limit)
        meta: dict[str, Any] = {}
        if strategy == OPEN:
            meta = {"strategy": self.kept.document(full=True), "search": "measured in turn: so"}
            truth = self.truth.get(OPEN, self.truth.get(self.kept))
        else:
            truth = self.truth[strategy]
        outcome = truth(self.runs.count(strategy)) if callable(truth) else truth
        self.clock += limit if outcome == "hangs" else WALL
        if outcome == "hangs":
            return Failure("hanging", "no trace: killed")
        if outcome == "fails":
            return Failure("failed", "exit code 1: RuntimeError: boom")
        seconds = outcome * strategy.gradients.accumulate
        trace = Trace(self.trace.events, self.trace.meta | meta)
        return Measurement(seconds, self.spread, WALL, trace)

    def tune(
        self,
        guesses: Mapping[Strategy, float] | None = None,
        budget: float = 1000.0,
        updates: int | None = None,
        choices: Sequence[Mapping[str, Any]] = (),
    ) -> Tuned:
        def predict(trace: Trace, base: Strategy) -> list[Prediction]:
            times = {base: self.truth[base], **(guesses or {})}
            ranked = sorted(times.items(), key=lambda one: one[1])
            seconds = {s: 2 * t * s.gradients.accumulate for s, t in ranked}
            return [
                Prediction(s, each, 0.0, 0.5, 0, 3, "lossy", (each, each), 1.0, (1.0, 1.0))
                for s, each in seconds.items()
            ]

        self.tuner = Tuner(
            *(self.run, BASE, budget, None if guesses is None else predict, choices, updates),
            clock=lambda: self.clock,
        )
        return self.tuner.tune()


# FSDP2.


def under_fully_shard(truth: Mapping[Strategy, Any]) -> Script:
    script = Script(truth)
    script.trace = Trace(TRACE.events, TRACE.meta | {"engine": FULLY_SHARD})
    return script


def test_under_fully_shard_codecs_are_measured_alone() -> None:
    codecs = [BASE.with_gradients(codec=codec()) for codec in SCATTERED]
    script = under_fully_shard(
        {BASE: 1.0} | dict(zip(codecs, (0.9, 0.7, "fails", 1.2), strict=True))
    )
    tuned = script.tune(guesses={}, choices=MEASURED_CHOICES)
    assert script.runs[:5] == [BASE, *codecs]
    assert tuned.strategy == codecs[1]
    assert re.search(r"int8.* \(lossy\) is 30\.0% faster than the baseline", tuned.verdict)


def test_under_fully_shard_nothing_exact_is_open() -> None:
    script = under_fully_shard({BASE: 1.0})
    tuned = script.tune(choices=MEASURED_CHOICES)
    assert (script.runs, tuned.strategy) == ([BASE], BASE)
    assert "codecs are the only choice, and they are lossy" in tuned.verdict
    assert "--allow-lossy" in tuned.verdict


# The exact choice.


@pytest.mark.parametrize("kept", [KEPT, BASE], ids=["another choice", "nothing faster"])
def test_one_run_tries_all_exact_choices(kept: Strategy) -> None:
    script = Script({BASE: 1.0, KEPT: 0.8}, kept)
    tuned = script.tune()
    assert script.runs == [BASE, OPEN]
    assert (tuned.strategy, tuned.improved) == (kept, kept != BASE)
    stays = "the baseline stays" if kept == BASE else re.escape(label(KEPT))
    assert re.search(f"{stays}.*measured in turn: so", tuned.verdict)
    assert [trial.status for trial in tuned.trials] == ["measured"] * 2


@pytest.mark.parametrize("outcome", ["fails", "hangs"])
def test_a_run_without_a_choice_leaves_the_baseline(outcome: str) -> None:
    script = Script({BASE: 1.0, OPEN: outcome})
    tuned = script.tune()
    assert tuned.strategy == BASE
    assert re.search(
        "the run that tried others (failed|took too long): the baseline stays", tuned.verdict
    )
    assert script.clock < 1000


def test_a_script_that_ends_too_early_for_the_choices_is_told_how_long_they_take() -> None:
    class Short(Script):
        def run(self, strategy: Strategy, limit: float) -> Measurement | Failure:
            if strategy == OPEN:
                return Failure("no trace", "it ended without a trace")
            return super().run(strategy, limit)

    tuned = Short({BASE: 1.0}).tune()
    assert tuned.strategy == BASE
    assert (
        "ended before the 60 steps that try them and those of a trace behind them: the b"
        in tuned.verdict
    )


def test_what_is_named_stays_named() -> None:
    named = Strategy.load({"gradients": {"split": "single", "transport": "direct"}})
    assert open_strategy(named) is None
    half = open_strategy(Strategy.load({"gradients": {"split": "single"}}))
    assert half is not None
    assert (half.gradients.split.kind, half.gradients.transport.kind) == ("single", "auto")


def test_where_nothing_is_open_only_the_rest_is_tried() -> None:
    named = Strategy.load({"gradients": {"split": "single", "transport": "direct"}})
    script = Script({named: 1.0})
    tuned = Tuner(script.run, named, 1000.0, clock=lambda: script.clock).tune()
    assert script.runs == [named]
    assert (tuned.strategy, tuned.improved) == (named, False)


# Lossy strategies, on the best exact choice.

A, B = (candidate(number) for number in range(2))


def fast_once(run: int) -> float:
    """Lucky in its first run, and slower than the baseline in every other one."""
    return 0.5 if run == 1 else 1.1


def breaks_later(run: int) -> float | str:
    return 0.79 if run == 1 else "fails"


def now_and_then(run: int) -> float:
    return 0.8 if run % 2 else 1.01


CASES = {
    "the prediction is right": ({A: 0.8, B: 0.82}, {A: 0.8, B: 0.82}, A),
    "the order of the predictions is wrong": ({A: 0.8, B: 0.78}, {A: 0.95, B: 0.9}, B),
    "candidates are slower than predicted": ({A: 0.7, B: 0.8}, {A: 1.2, B: 1.01}, BASE),
    "one is as fast": ({A: 0.9}, {A: 1.0}, BASE),
    "one was lucky": ({A: 0.9}, {A: fast_once}, BASE),
    "one is faster now and then": ({A: 0.9}, {A: now_and_then}, BASE),
    "the best fails": ({A: 0.7, B: 0.8}, {A: "fails", B: 0.8}, B),
    "the best hangs": ({A: 0.7, B: 0.8}, {A: "hangs", B: 0.8}, B),
    "all fail": ({A: 0.7, B: 0.8}, {A: "fails", B: "hangs"}, BASE),
    "the best fails when it is compared": ({A: 0.7, B: 0.8}, {A: breaks_later, B: 0.8}, B),
    "nothing is to be gained": ({A: 1.1, B: 1.2}, {}, BASE),
    "there is no other": ({}, {}, BASE),
}


@pytest.mark.parametrize(("guesses", "truth", "chosen"), CASES.values(), ids=CASES)
def test_what_is_chosen_has_proved_itself(guesses, truth, chosen) -> None:
    script = Script({BASE: 1.0, **truth})
    tuned = script.tune(guesses)
    assert (tuned.strategy, tuned.improved) == (chosen, chosen != BASE)
    assert label(chosen) in tuned.verdict or "the baseline stays" in tuned.verdict
    assert set(script.runs) == {BASE, OPEN, *truth}
    if tuned.improved:
        assert len(tuned.ratios) >= LEAST_PAIRS
        assert max(tuned.ratios) < 1
    assert script.clock <= 1000


@pytest.mark.parametrize(("seconds", "wins"), [(0.5, True), (0.85, False)])
def test_lossy_strategies_build_on_the_best_exact_choice(seconds: float, wins: bool) -> None:
    lossy = candidate(0, KEPT)
    script = Script({BASE: 1.0, KEPT: 0.8, lossy: seconds}, KEPT)
    tuned = script.tune({lossy: 0.5})
    assert tuned.strategy == (lossy if wins else KEPT)
    assert script.runs[:3] == [BASE, OPEN, lossy]
    assert ("chosen in one run" in tuned.verdict) == (not wins)


def test_without_predictions_the_exact_choice_stays() -> None:
    def predict(trace: Trace, base: Strategy) -> list[Prediction]:
        raise LaunchError("the network could not be measured")

    script = Script({BASE: 1.0, KEPT: 0.8}, KEPT)
    tuned = Tuner(script.run, BASE, 1000.0, predict, clock=lambda: script.clock).tune()
    assert tuned.strategy == KEPT
    assert re.search("chosen in one run.*not tried: the network could not be", tuned.verdict)


def test_without_room_for_lossy_strategies_nothing_is_predicted() -> None:
    script = Script({BASE: 1.0, OPEN: "hangs"})
    tuned = script.tune({A: 0.1}, budget=300.0)
    assert (script.runs, tuned.strategy) == ([BASE, OPEN], BASE)
    assert "the baseline stays; lossy strategies were not tried: the budget" in tuned.verdict


# Settings of compute and data, on the best of all.

DEALT, AHEAD, LAST, COMPILED, CHAINS, ONE_STEP = MEASURED_CHOICES


def test_settings_of_compute_are_added_to_the_best() -> None:
    """Each that brings something stays, whatever the one before it brought."""
    best = with_settings(KEPT, LAST)
    assert best is not None
    truth = {KEPT: 0.8, best: 0.7, with_settings(best, COMPILED): "fails"}
    truth |= {with_settings(best, CHAINS): 0.699, with_settings(best, ONE_STEP): 0.6}
    tuned = Script({BASE: 1.0, **truth}, KEPT).tune(choices=MEASURED_CHOICES)
    assert tuned.strategy == with_settings(best, ONE_STEP)
    assert label(tuned.strategy).endswith("direct, fuse_optimizer, channels_last")


@pytest.mark.parametrize(
    ("choice", "told", "name"),
    [(AHEAD, "prefetchable", "prefetch"), (DEALT, "balanceable", "balance")],
)
def test_another_way_to_load_is_tried_where_the_loader_allows_it(choice, told, name) -> None:
    other = with_settings(BASE, choice)
    assert other is not None
    script = Script({BASE: 1.0, other: 0.5})
    script.trace = Trace(TRACE.events, {**TRACE.meta, told: True, "useful_compute": []})
    tuned = script.tune(choices=MEASURED_CHOICES)
    assert tuned.strategy == other
    assert label(other).endswith(f", {name}")


def test_compute_alone_may_win() -> None:
    compiled = with_settings(BASE, COMPILED)
    truth = {A: 1.1, with_settings(BASE, LAST): 1.2, compiled: 0.5}
    script = Script({BASE: 1.0, **truth, with_settings(compiled, ONE_STEP): 0.6})
    tuned = script.tune({A: 0.9}, choices=MEASURED_CHOICES)
    assert tuned.strategy == compiled, "chains are left to the compiler"


def test_compute_leaves_room_for_the_comparison() -> None:
    script = Script({BASE: 1.0, A: 0.8})
    tuned = script.tune({A: 0.8}, budget=110.0, choices=MEASURED_CHOICES)
    assert tuned.strategy == A
    assert [t.status for t in tuned.trials if "compile" in t.name] == ["not measured"]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.floats(0.3, 2), st.one_of(st.floats(0.3, 2), st.sampled_from(["fails", "hangs"]))
        ),
        max_size=24,
    ),
    st.floats(110, 2000),
)
def test_it_never_ends_slower_nor_late_and_finds_what_it_measured(cases, budget) -> None:
    strategies = [candidate(number) for number in range(len(cases))]
    truth = {s: true for s, (_, true) in zip(strategies, cases, strict=True)} | {BASE: 1.0}
    script = Script(truth)
    tuned = script.tune({s: p for s, (p, _) in zip(strategies, cases, strict=True)}, budget)
    ran = [truth[s] for s in set(script.runs) - {OPEN}]
    assert script.clock <= budget + 1e-6
    assert truth[tuned.strategy] == min(t for t in ran if not isinstance(t, str))
    assert len(set(script.runs)) <= 2 + max(3, -(-(1 + len(cases)) // 4))
    assert {t.name for t in tuned.trials} == {label(s) for s in truth}  # every one has its reason


INT8 = candidate(0, codec="int8")
ONEBIT = candidate(0, codec={"kind": "onebit", "start_step": 1000})


@pytest.mark.parametrize(
    ("updates", "chosen", "mean"),
    [(None, ONEBIT, 0.4), (100_000, ONEBIT, 0.406), (1600, INT8, 0.775), (900, INT8, 1.0)],
)
def test_a_codec_that_begins_late_counts_for_the_rest(updates, chosen, mean) -> None:
    script = Script({BASE: 1.0, INT8: 0.7, ONEBIT: 0.4})
    tuned = script.tune({INT8: 0.7, ONEBIT: mean}, updates=updates)
    assert tuned.strategy == chosen
    measured = {trial.name: trial.measured for trial in tuned.trials}
    if ONEBIT in script.runs:
        assert measured["by_bytes 4 (first 1, last 1), onebit from update 1000"] == (
            pytest.approx(mean)
        )
    assert ("--updates N" in tuned.verdict) == (updates is None)
    assert tuned.ratios == pytest.approx([{ONEBIT: mean, INT8: 0.7}[chosen]] * LEAST_PAIRS)


def test_a_codec_of_the_baseline_that_begins_late_is_no_reason_for_updates() -> None:
    late = ONEBIT.with_gradients(split="single", transport="direct")
    compiled = with_settings(late, COMPILED)
    assert compiled is not None
    script = Script({late: 1.0, compiled: 0.5})
    clock = {"clock": lambda: script.clock}
    tuned = Tuner(script.run, late, 1000.0, choices=[COMPILED], **clock).tune()
    assert tuned.strategy == compiled
    assert "--updates" not in tuned.verdict


# Time and noise.


def test_runs_are_bounded_and_alternate() -> None:
    script = Script({BASE: 1.0, A: "hangs", B: lambda run: 0.8 + 0.01 * run})
    script.tune({A: 0.5, B: 0.8})
    assert script.limits[0] == pytest.approx(1000 / 3)
    assert script.runs[:4] == [BASE, OPEN, A, B]
    assert script.limits[2:4] == [3 * 2 * WALL, 3 * 3 * WALL]  # of so many batches
    assert script.runs[4:10] == [BASE, B, B, BASE, BASE, B]


def test_a_small_gain_takes_more_pairs_than_a_large_one() -> None:
    def pairs(gain: float) -> int:
        noisy = Script({BASE: 1.0, INT8: lambda run: 1 - gain + 0.01 * (run % 3)})
        return len(noisy.tune({INT8: 1 - gain}).ratios)

    assert pairs(0.3) == LEAST_PAIRS
    assert pairs(0.025) == MOST_PAIRS


def test_a_noisy_baseline_is_not_chased() -> None:
    guesses = {INT8: 0.97}
    assert Script({BASE: 1.0, INT8: 1.0}).tune(guesses).trials[2].status == "measured"
    noisy = Script({BASE: 1.0, INT8: 1.0}, spread=0.4).tune(guesses)
    assert noisy.trials[2].status == "not measured"
    assert "noise (20.0%)" in noisy.trials[2].reason


WRONG = {
    "a budget for one run": (
        STEP,
        35,
        LaunchError,
        f"the baseline run took 10.0 s.* in {UPDATES} steps takes up to 29 s.* --budget 40s",
    ),
    "a baseline that fails": ("fails", 500, LaunchError, "RuntimeError: boom; fix the script"),
    "a baseline that hangs": (
        "hangs",
        500,
        LaunchError,
        "a budget of 500 s has room for runs of 167 s",
    ),
    "a script without a step": (
        "none",
        500,
        TraceError,
        "ended without a trace.*an adapter.*three updates",
    ),
}


@pytest.mark.parametrize(("truth", "budget", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_baseline_without_a_result_is_an_error(truth, budget, error, message) -> None:
    script = Script({BASE: truth})
    if truth == "none":
        script.run = lambda strategy, limit: Failure("no trace", "it ended without a trace")  # type: ignore[method-assign]
    with pytest.raises(error, match=message):
        script.tune(budget=budget)
    assert len(script.runs) <= 1
