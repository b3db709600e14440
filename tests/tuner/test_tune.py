"""The tuner's decisions on scripts whose truth is known, and its trials on real processes."""

from __future__ import annotations

import re
import shlex
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.errors import LaunchError, TraceError
from slipstream.planner.candidates import label
from slipstream.planner.ranking import Prediction
from slipstream.strategy import (
    ByBytesConfig,
    ByIndexConfig,
    DgcConfig,
    DirectConfig,
    FlatConfig,
    Strategy,
    late_by,
)
from slipstream.trace import Trace, chrome, read
from slipstream.tuner import trials
from slipstream.tuner.measured_choices import MEASURED_CHOICES, with_settings
from slipstream.tuner.one_start import open_strategy
from slipstream.tuner.significance import LEAST_PAIRS, MOST_PAIRS
from slipstream.tuner.trial_log import Tuned
from slipstream.tuner.trials import Failure, Measurement, Trials, iterations, measure
from slipstream.tuner.tune import Tuner
from tests.harness.traces import by_hand
from tests.testbed.traces import marked

TRACE = by_hand(ranks=2, steps=4)
WALL = 10.0
BASE = Strategy()


def candidate(number: int, accumulate: int = 1) -> Strategy:
    """A strategy like no other: by_bytes of so many megabytes."""
    split = {"kind": "by_bytes", "megabytes": 100 + number}
    return Strategy.load({"gradients": {"split": split, "accumulate": accumulate}})


def predicted(strategy: Strategy, seconds: float) -> Prediction:
    return Prediction(strategy, seconds, 0.0, 0.5, 0, 3, "reordered")


class Script:
    """A training of which the truth is known: every run takes WALL seconds of its own clock."""

    def __init__(self, truth: dict[Strategy, Any], spread: float = 0.0) -> None:
        self.truth, self.spread = truth, spread
        self.clock, self.runs, self.limits = 0.0, [], []
        self.trace = TRACE

    def run(self, strategy: Strategy, limit: float) -> Measurement | Failure:
        self.runs.append(strategy)
        self.limits.append(limit)
        truth = self.truth[strategy]
        outcome = truth(self.runs.count(strategy)) if callable(truth) else truth
        self.clock += limit if outcome == "hangs" else WALL
        if outcome == "hangs":
            return Failure("hanging", "no trace: killed")
        if outcome == "fails":
            return Failure("failed", "exit code 1: RuntimeError: boom")
        return Measurement(outcome, self.spread, WALL, self.trace)

    def tune(
        self,
        predictions: dict[Strategy, float],
        budget: float = 1000.0,
        updates: int | None = None,
        choices: Sequence[dict[str, Any]] = (),
    ) -> Tuned:
        ranked = [predicted(strategy, seconds) for strategy, seconds in predictions.items()]
        ranked.sort(key=lambda one: one.per_batch)
        self.tuner = Tuner(
            *(self.run, lambda trace: ranked, BASE, budget, choices, updates),
            clock=lambda: self.clock,
        )
        return self.tuner.tune()


A, B, C, D = (candidate(number) for number in range(4))
SHARDED = Strategy.load({"gradients": {"transport": {"kind": "sharded", "replicated": 0.25}}})


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
    "sharded is hardly faster": ({SHARDED: 0.8, A: 0.82}, {SHARDED: 0.8, A: 0.81}, A),
    "sharded is faster": ({SHARDED: 0.8}, {SHARDED: 0.8}, SHARDED),
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


@pytest.mark.parametrize(("predictions", "truth", "chosen"), CASES.values(), ids=CASES)
def test_what_is_chosen_has_proved_itself(predictions, truth, chosen) -> None:
    script = Script({BASE: 1.0, **truth})
    tuned = script.tune({BASE: 2.0, **{s: 2 * seconds for s, seconds in predictions.items()}})
    assert (tuned.strategy, tuned.improved) == (chosen, chosen != BASE)
    assert label(chosen) in tuned.verdict or "the baseline stays" in tuned.verdict
    assert set(script.runs) == {BASE, *truth}
    if tuned.improved:
        assert len(tuned.ratios) >= LEAST_PAIRS
        assert max(tuned.ratios) < 1
    assert script.clock <= 1000


DEALT, AHEAD, LAST, COMPILED, CHAINS, STEPS = MEASURED_CHOICES


def test_settings_of_compute_are_added_to_the_best() -> None:
    """Each that brings something stays, whatever the one before it brought."""
    best = with_settings(A, LAST)
    assert best is not None
    truth = {A: 0.8, best: 0.7, with_settings(best, COMPILED): "fails"}
    truth |= {with_settings(best, CHAINS): 0.699, with_settings(best, STEPS): 0.6}
    script = Script({BASE: 1.0, **truth})
    tuned = script.tune({BASE: 1.0, A: 0.8}, choices=MEASURED_CHOICES)
    assert tuned.strategy == with_settings(best, STEPS)
    assert label(tuned.strategy) == "by_bytes 100 (first 1, last 1), fuse_optimizer, channels_last"


@pytest.mark.parametrize(
    ("choice", "told", "name"),
    [(AHEAD, "prefetchable", "prefetch"), (DEALT, "balanceable", "balance")],
)
def test_another_way_to_load_is_tried_where_the_loader_allows_it(choice, told, name) -> None:
    other = with_settings(BASE, choice)
    assert other is not None
    script = Script({BASE: 1.0, other: 0.5})
    script.trace = Trace(TRACE.events, {**TRACE.meta, told: True, "useful_compute": []})
    tuned = script.tune({BASE: 1.0}, choices=MEASURED_CHOICES)
    assert tuned.strategy == other
    assert label(other).endswith(f", {name}")


def test_compute_alone_may_win() -> None:
    compiled = with_settings(BASE, COMPILED)
    truth = {A: 1.1, with_settings(BASE, LAST): 1.2, compiled: 0.5}
    script = Script({BASE: 1.0, **truth, with_settings(compiled, STEPS): 0.6})
    tuned = script.tune({BASE: 1.0, A: 0.9}, choices=MEASURED_CHOICES)
    assert tuned.strategy == compiled, "chains are left to the compiler"


def test_compute_leaves_room_for_the_comparison() -> None:
    script = Script({BASE: 1.0, A: 0.8})
    tuned = script.tune({BASE: 1.0, A: 0.8}, budget=95.0, choices=MEASURED_CHOICES)
    assert tuned.strategy == A
    assert [t.status for t in tuned.trials if "compile" in t.name] == ["not measured"]


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.floats(0.3, 2), st.one_of(st.floats(0.3, 2), st.sampled_from(["fails", "hangs"]))
        ),
        max_size=24,
    ),
    st.floats(95, 2000),
)
def test_it_never_ends_slower_nor_late_and_finds_what_it_measured(cases, budget) -> None:
    strategies = [candidate(number) for number in range(len(cases))]
    truth = {s: true for s, (_, true) in zip(strategies, cases, strict=True)} | {BASE: 1.0}
    script = Script(truth)
    tuned = script.tune(
        {BASE: 1.0} | {s: p for s, (p, _) in zip(strategies, cases, strict=True)}, budget
    )
    ran = [truth[s] for s in set(script.runs)]
    assert script.clock <= budget + 1e-6
    assert truth[tuned.strategy] == min(t for t in ran if not isinstance(t, str))
    assert len(set(script.runs)) <= 1 + max(3, -(-len(cases) // 4))
    assert {t.name for t in tuned.trials} == {label(s) for s in truth}  # every one has its reason


def test_steps_that_take_more_batches_are_compared_by_the_batch() -> None:
    double, quadruple = candidate(1, accumulate=2), candidate(2, accumulate=4)
    script = Script({BASE: 1.0, double: 1.6, quadruple: 4.4})
    tuned = script.tune({BASE: 1.0, double: 1.6, quadruple: 3.0})
    assert tuned.strategy == double
    assert tuned.ratios == pytest.approx([0.8] * 3)
    measured = {trial.name: trial.measured for trial in tuned.trials}
    assert measured[label(quadruple)] == pytest.approx(1.1)


INT8 = Strategy.load({"gradients": {"codec": "int8"}})
ONEBIT = Strategy.load({"gradients": {"codec": {"kind": "onebit", "start_step": 1000}}})


@pytest.mark.parametrize(
    ("updates", "chosen", "mean"),
    [(None, ONEBIT, 0.4), (100_000, ONEBIT, 0.406), (1600, INT8, 0.775), (900, INT8, 1.0)],
)
def test_a_codec_that_begins_late_counts_for_the_rest(updates, chosen, mean) -> None:
    script = Script({BASE: 1.0, INT8: 0.7, ONEBIT: 0.4})
    tuned = script.tune({BASE: 1.0, INT8: 0.7, ONEBIT: mean}, updates=updates)
    assert tuned.strategy == chosen
    measured = {trial.name: trial.measured for trial in tuned.trials}
    if ONEBIT in script.runs:
        assert measured["by_bytes 4 (first 1, last 1), onebit from update 1000"] == (
            pytest.approx(mean)
        )
    assert ("--updates N" in tuned.verdict) == (updates is None)
    assert tuned.ratios == pytest.approx([{ONEBIT: mean, INT8: 0.7}[chosen]] * LEAST_PAIRS)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["onebit", "powersgd", "dgc", "int8"])
def test_a_trial_runs_the_codec_as_it_is_in_the_end(kind: str, tmp_path: Path) -> None:
    strategy = Strategy.load({"gradients": {"codec": kind}})
    trial = Trials(lambda folder: [sys.executable, "-c", ""], tmp_path).run(strategy, 20.0)
    assert isinstance(trial, Failure)
    codec = Strategy.load(str(tmp_path / "01" / trials.STRATEGY)).gradients.codec
    assert codec is not None
    assert codec.kind == kind
    assert late_by(codec) == 0
    assert isinstance(codec, DgcConfig) == (kind == "dgc")
    if isinstance(codec, DgcConfig):
        assert codec.density == DgcConfig().density


def test_runs_are_bounded_and_alternate() -> None:
    script = Script({BASE: 1.0, A: "hangs", B: lambda run: 0.8 + 0.01 * run})
    script.tune({BASE: 1.0, A: 0.5, B: 0.8})
    assert script.limits[0] == pytest.approx(1000 / 3)
    assert set(script.limits[1:]) == {3 * WALL}
    assert script.runs[:3] == [BASE, A, B]
    assert script.runs[3:9] == [BASE, B, B, BASE, BASE, B]


def test_a_small_gain_takes_more_pairs_than_a_large_one() -> None:
    def pairs(gain: float) -> int:
        noisy = Script({BASE: 1.0, A: lambda run: 1 - gain + 0.01 * (run % 3)})
        return len(noisy.tune({BASE: 1.0, A: 1 - gain}).ratios)

    assert pairs(0.3) == LEAST_PAIRS
    assert pairs(0.025) == MOST_PAIRS


def test_a_noisy_baseline_is_not_chased() -> None:
    predictions = {BASE: 1.0, A: 0.97}
    assert Script({BASE: 1.0, A: 1.0}, spread=0.0).tune(predictions).trials[1].status == "measured"
    noisy = Script({BASE: 1.0, A: 1.0}, spread=0.4).tune(predictions)
    assert noisy.trials[1].status == "not measured"
    assert "noise (20.0%)" in noisy.trials[1].reason


WRONG = {
    "a budget for one run": (
        1.0,
        50,
        LaunchError,
        "the baseline run took 10.0 s, 6.0 s of it.* --budget 94s",
    ),
    "a baseline that fails": ("fails", 500, LaunchError, "RuntimeError: boom; fix the script"),
    "a baseline that hangs": (
        "hangs",
        500,
        LaunchError,
        "a budget of 500 s has room for runs of 167 s",
    ),
    "a script without a step": ("none", 500, TraceError, "ended without a trace.*session.step"),
}


@pytest.mark.parametrize(("truth", "budget", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_baseline_without_a_result_is_an_error(truth, budget, error, message) -> None:
    script = Script({BASE: truth})
    if truth == "none":
        script.run = lambda strategy, limit: Failure("no trace", "it ended without a trace")  # type: ignore[method-assign]
    with pytest.raises(error, match=message):
        script.tune({BASE: 1.0}, budget)
    assert len(script.runs) <= 1


# A script that takes long to start.

SLOW_TO_START = 94.0
KEPT = {"split": {"kind": "by_index", "last": [0, 3]}, "transport": {"kind": "direct"}}
DEFAULTS = {"split": ByBytesConfig().document(full=True), "transport": {"kind": "flat"}}


class SlowScript(Script):
    """60 s before the first of 13 steps of 2.6 s; what it finds by itself is known."""

    def __init__(self, found: dict[str, Any] | str, sharded: float | str = 9.9) -> None:
        super().__init__({SHARDED: sharded})
        self.found = found

    def run(self, strategy: Strategy, limit: float) -> Measurement | Failure:
        if strategy == SHARDED:
            return super().run(strategy, limit)
        self.runs.append(strategy)
        self.limits.append(limit)
        meta: dict[str, Any] = {}
        if strategy == BASE:
            self.clock += SLOW_TO_START
            meta = {"optimizer": {"bytes": 0, "shardable": self.truth[SHARDED] != "refused"}}
        else:
            self.clock += 60 + 73 * 2.6
            if isinstance(self.found, str):
                return Failure("failed", self.found)
            gradients = {**strategy.document(full=True)["gradients"], **self.found}
            meta = {"strategy": {"gradients": gradients}, "search": "measured in turn: direct kept"}
        traced = by_hand(ranks=2, steps=13)
        return Measurement(2.6, 0.0, SLOW_TO_START, Trace(traced.events, traced.meta | meta))


FOUND = {
    "another choice": (KEPT, True, "direct .*chosen in one start instead of 7 runs of 94.0 s"),
    "nothing faster": (DEFAULTS, False, "one start instead of 7 runs"),
    "it fails": ("exit code 1", False, "failed: the baseline stays"),
}


@pytest.mark.parametrize(("found", "improved", "verdict"), FOUND.values(), ids=FOUND)
def test_a_script_that_takes_long_to_start_is_started_twice(found, improved, verdict) -> None:
    script = SlowScript(found)
    tuned = script.tune({BASE: 1.0, SHARDED: 1.1}, budget=720)
    assert script.clock <= 720
    baseline, searching = script.runs
    assert baseline == BASE
    assert searching.gradients.split.kind == "optimal"
    assert searching.gradients.transport.kind == "auto"
    assert tuned.improved == improved
    assert re.search(verdict, tuned.verdict)
    assert tuned.trials[0].status == "measured"
    assert "60.2 s before the first step" in tuned.trials[0].reason
    gradients = tuned.strategy.gradients
    assert gradients.transport == (DirectConfig() if improved else FlatConfig())
    assert gradients.split == (ByIndexConfig(last=(0, 3)) if improved else ByBytesConfig())


TRIED = {
    "it is faster": (2.0, 0.7, 720, True, "sharded .*0.769 of the time of the best other choice"),
    "it is hardly faster": (2.55, 0.7, 720, True, "direct .*chosen in one start"),
    "it fails": ("fails", 0.7, 720, True, "direct .*chosen in one start"),
    "it is not predicted to pay": (2.0, 1.1, 720, False, "direct .*chosen in one start"),
    "the optimizer refuses it": ("refused", 0.7, 720, False, "direct .*chosen in one start"),
    "there is no time left": (2.0, 0.7, 480, False, "direct .*chosen in one start"),
}


@pytest.mark.parametrize(
    ("seconds", "guess", "budget", "tried", "verdict"), TRIED.values(), ids=TRIED
)
def test_sharded_is_tried_in_a_start_of_its_own(seconds, guess, budget, tried, verdict) -> None:
    script = SlowScript(KEPT, seconds)
    tuned = script.tune({BASE: 1.0, SHARDED: guess}, budget=budget)
    assert script.clock <= budget
    assert (SHARDED in script.runs) == tried
    assert re.search(verdict, tuned.verdict)
    assert (tuned.strategy == SHARDED) == (seconds == 2.0 and tried)
    assert tuned.improved
    statuses = [trial.status for trial in tuned.trials]
    assert statuses == ["measured"] * 2 + (["failed" if seconds == "fails" else "measured"] * tried)


def test_a_budget_without_room_for_two_starts_says_what_it_needs() -> None:
    script = SlowScript(KEPT)
    with pytest.raises(
        LaunchError, match=r"60\.2 s of it before.*in 60 steps takes 320 s; .* 414s"
    ):
        script.tune({}, budget=400)
    assert script.runs == [BASE]


def test_what_is_named_stays_named() -> None:
    named = Strategy.load({"gradients": {"split": "single", "transport": "direct"}})
    assert open_strategy(named) is None
    half = open_strategy(Strategy.load({"gradients": {"split": "single"}}))
    assert half is not None
    assert (half.gradients.split.kind, half.gradients.transport.kind) == ("single", "auto")


# Real processes.

SCRIPTS = {
    "writes a trace and goes on": "finish(); time.sleep(100)",
    "writes a trace and ends": "finish()",
    "writes a trace in two parts": "finish(half=True); time.sleep(0.3); finish(); time.sleep(100)",
    "fails": "print('so far'); raise RuntimeError('boom')",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "ends without a trace": "pass",
    "ends with half a trace": "finish(half=True)",
    "hangs": "time.sleep(100)",
    "hangs and does not want to end": "ignore(signal.SIGTERM); time.sleep(100)",
}
OUTCOMES = {
    "writes a trace and goes on": None,
    "writes a trace and ends": None,
    "writes a trace in two parts": None,
    "fails": ("failed", "exit code 1: RuntimeError: boom"),
    "is killed": ("failed", "killed by SIGKILL: it wrote nothing"),
    "ends without a trace": ("no trace", "it ended without a trace"),
    "ends with half a trace": ("failed", "is not JSON"),
    "hangs": ("hanging", "no trace after 1 s: killed"),
    "hangs and does not want to end": ("hanging", "no trace after 1 s: killed"),
}
PRELUDE = """
import signal, subprocess, sys, time
folder, template, marker = sys.argv[1:]
text = open(template).read()
def ignore(number):
    signal.signal(number, signal.SIG_IGN)
def finish(half=False):
    with open(folder + "/trace.json", "w") as file:
        file.write(text[:len(text) // 2] if half else text)
# A child in a session of its own, as launchers have them.
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)", marker],
                 start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], tuple[list[str], str]]:
    """From the last lines of a script to a command that runs it, and the mark of its child."""
    chrome.write(TRACE, tmp_path / "template.json")

    def make(code: str) -> tuple[list[str], str]:
        (tmp_path / "script.py").write_text(PRELUDE + code)
        marker = f"child-{uuid.uuid4()}"
        words = [sys.executable, "-S", "script.py", ".", "template.json", marker]
        return ["sh", "-c", f"cd {shlex.quote(str(tmp_path))}; exec {shlex.join(words)}"], marker

    return make


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_ends_with_its_trace_and_leaves_no_process(
    tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(trials, "GRACE_SECONDS", 0.5)
    argv, marker = command(SCRIPTS[name])
    outcome = measure(argv, tmp_path, limit=1.0 if "hangs" in name else 20.0)
    if OUTCOMES[name] is None:
        assert isinstance(outcome, Measurement)
        assert outcome.trace == read(tmp_path / "template.json")
        assert outcome.seconds == pytest.approx(0.1)
        assert outcome.spread == pytest.approx(0)
    else:
        status, reason = OUTCOMES[name]
        assert isinstance(outcome, Failure)
        assert outcome.status == status
        assert reason in outcome.reason
    assert marked(marker) == []


def test_trials_number_their_folders_and_trace_the_strategy(tmp_path: Path) -> None:
    seen: list[str] = []

    def command(folder: Path) -> list[str]:
        seen.append((folder / "strategy.yaml").read_text())
        return ["false"]

    config = Strategy.load({"gradients": {"overlap": False}, "trace": {"steps": 99}})
    runs = Trials(command, tmp_path / "logs", steps=4, skip=1)
    for _ in range(2):
        assert isinstance(runs.run(config, 5.0), Failure)
    strategies = [Strategy.from_yaml(text) for text in seen]
    assert [s.trace.steps for s in strategies] == [4, 4]
    assert [s.trace.skip for s in strategies] == [1, 1]
    assert [s.trace.folder for s in strategies] == [
        str(tmp_path / "logs" / name) for name in ("01", "02")
    ]
    assert not any(s.gradients.overlap for s in strategies)


def test_an_iteration_is_as_long_as_it_is_on_the_mean_of_ranks() -> None:
    events = [
        event.__class__(event.name, event.rank, event.step, 0.0, 1.0 + event.rank * event.step)
        for event in by_hand(ranks=3, steps=2).events
        if event.name == "iteration"
    ]
    assert iterations(Trace(tuple(events))) == [3.0, 4.0]
