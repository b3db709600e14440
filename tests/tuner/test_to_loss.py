"""What ``tune --to-loss`` runs, in which order, and what it makes of the losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from slipstream.cli.time_to_loss import agreement
from slipstream.errors import LaunchError, StrategyError
from slipstream.planner.search.ranking import Prediction
from slipstream.strategy import Strategy
from slipstream.trace import Event, Trace
from slipstream.trace.event import meeting_span
from slipstream.tuner.to_loss import LossTuner, check_updates
from slipstream.tuner.trials import Failure, Measurement

SECONDS = {"local": 0.5, "": 1.0, "int8": 0.6, "onebit": 0.3, "accumulate": 1.2}
WORTH = {"local": 0.9, "": 1.0, "int8": 0.98, "onebit": 0.2, "accumulate": 1.9}
"""Updates of the baseline for one of theirs."""


def kind_of(strategy: Strategy) -> str:
    if strategy.local is not None:
        return "local"
    if strategy.gradients.accumulate > 1:
        return "accumulate"
    return strategy.gradients.codec.kind if strategy.gradients.codec else ""


class Script:
    """A training whose runs take the seconds and have the losses of the tables above."""

    def __init__(
        self,
        wall: float = 10.0,
        seeded: bool = True,
        fails: str = "none",
        nonfinite: str = "none",
    ) -> None:
        self.now, self.wall, self.seeded, self.fails = 0.0, wall, seeded, fails
        self.nonfinite = nonfinite
        self.runs: list[tuple[str, int, bool]] = []

    def run(
        self, strategy: Strategy, limit: float, updates: int, norms: bool
    ) -> Measurement | Failure:
        kind = kind_of(strategy)
        self.runs.append((kind, updates, norms))
        self.now += self.wall
        if kind == self.fails:
            return Failure("failed", "boom")
        worth = WORTH[kind] * np.arange(1, updates + 1)
        seed = 0 if self.seeded else len(self.runs)
        losses = 1 + 4 * worth**-0.5 + 0.02 * np.random.default_rng(seed).standard_normal(updates)
        of_norms = {"own_norm2": 3.0, "average_norm2": 2.0} if norms else {}
        seconds = SECONDS[kind]
        events = [
            Event("iteration", rank, step, step * seconds, (step + 1) * seconds, args)
            for rank in (0, 1)
            for step, loss in enumerate(losses)
            for has_loss in [kind != self.nonfinite or step < updates // 2]
            for args in [
                ({"loss": float(loss)} if has_loss else {}) | ({} if kind == "local" else of_norms)
            ]
        ]
        if kind == "local":
            events += [
                Event(meeting_span(1), rank, 4, 4.0, 4.5, {"update": 4, **of_norms})
                for rank in (0, 1)
            ]
        return Measurement(seconds, 0.01, self.wall, Trace(tuple(events)))

    def tuner(self, budget: float = 100.0, loss: float = 1.16) -> LossTuner:
        return LossTuner(
            self.run, Strategy(), loss, budget, predictions, 100, clock=lambda: self.now
        )


def predictions(trace: Trace, base: Strategy) -> Sequence[Prediction]:
    late = {"kind": "onebit", "start_step": 1000}
    others = [
        base.with_gradients(accumulate=2),
        *(Strategy.load({"gradients": {"codec": codec}}) for codec in ("int8", late)),
        Strategy.load({"gradients": {"codec": "half"}}),
        Strategy.load({"gradients": {"codec": "int8", "split": "single"}}),
    ]
    seconds = [1.0, 1.2, 0.6, 0.3, 1.5, 0.7]
    return [
        Prediction(one, took, 0.0, 0.0, 0, 1, one.exactness, (took, took), took, (took, took))
        for one, took in zip([base, *others], seconds, strict=True)
    ]


def test_runs_pair_with_the_baseline_and_the_soonest_is_chosen() -> None:
    script = Script()
    tuned = script.tuner().tune()
    # half is predicted to be slower, and int8 runs once; larger batches come last, as many batches
    expected = [("", 100, False), ("", 100, True), ("onebit", 100, False), ("int8", 100, False)]
    assert script.runs == [*expected, ("accumulate", 50, False)]
    assert kind_of(tuned.strategy) == "int8"
    assert tuned.paired
    assert tuned.calibration.noise == pytest.approx(1.0)
    of_onebit = next(one for one in tuned.predictions if kind_of(one.strategy) == "onebit")
    assert of_onebit.strategy.gradients.codec.start_step == 0  # as it ran
    assert of_onebit.ratio.low > 1
    assert len(tuned.trials) == len(script.runs)


def test_what_ranks_have_in_common_is_measured_where_they_meet() -> None:
    script = Script()
    tuner = script.tuner()
    rare = Strategy.load({"local": {"steps": 4}})
    faster = Prediction(rare, 0.5, 0.0, 0.0, 0, 1, "lossy", (0.5, 0.5), 0.5, (0.5, 0.5))
    tuner.predict = lambda trace, base: [*predictions(trace, base), faster]
    tuned = tuner.tune()
    assert ("local", 100, True) in script.runs
    cosines = {kind_of(Strategy.load(run.strategy)): run.cosine for run in tuned.calibration.runs}
    assert cosines.pop("local") == pytest.approx(1 / 3)
    assert not any(cosines.values())
    printed = agreement(tuned.calibration)
    assert "two ranks change until they meet: 0.33" in printed[-1]
    assert "gradient noise scale: 1 times the batch" in printed[0]


def test_a_baseline_whose_codec_begins_late_is_refused() -> None:
    tuner = Script().tuner()
    tuner.base = Strategy.load({"gradients": {"codec": "onebit"}})
    with pytest.raises(StrategyError, match=r"begins at update 1000.*start_step: 0"):
        tuner.tune()


def test_the_end_of_the_budget_is_in_the_verdict() -> None:
    tuned = Script(wall=30.0).tuner(budget=125.0).tune()
    assert "the budget ended before 2 more: a larger --budget tries them" in tuned.verdict


def test_losses_that_are_not_finite_end_their_run_alone() -> None:
    script = Script(nonfinite="int8")
    tuned = script.tuner().tune()
    failed = [trial for trial in tuned.trials if trial.status == "failed"]
    assert [kind_of(Strategy.load(dict(trial.strategy))) for trial in failed] == ["int8"]
    assert "accumulate" in {kind_of(one.strategy) for one in tuned.predictions}


@pytest.mark.parametrize("fault", ["fails", "nonfinite"])
def test_a_larger_batch_whose_run_failed_is_not_predicted(fault: str) -> None:
    faults: dict[str, Any] = {fault: "accumulate"}
    tuned = Script(**faults).tuner().tune()
    assert {kind_of(one.strategy) for one in tuned.predictions} == {"", "onebit", "int8"}


def test_without_seeds_it_says_that_runs_are_no_pairs() -> None:
    assert not Script(seeded=False).tuner().tune().paired


def test_what_the_budget_has_no_room_for_is_predicted_or_left_out() -> None:
    script = Script(wall=30.0)
    tuned = script.tuner(budget=125.0).tune()
    assert [kind for kind, _, _ in script.runs] == ["", "", "onebit"]
    sources = {kind_of(one.strategy): one.source for one in tuned.predictions}
    assert sources == {"": "exact", "onebit": "measured", "accumulate": "noise scale"}


def test_a_run_that_fails_is_in_the_log_and_the_others_go_on() -> None:
    tuned = Script(fails="int8").tuner().tune()
    assert [trial.status for trial in tuned.trials].count("failed") == 1
    assert {kind_of(one.strategy) for one in tuned.predictions} == {"", "onebit", "accumulate"}


def test_mistakes_are_said_after_the_first_run_at_the_latest() -> None:
    script = Script()
    with pytest.raises(StrategyError, match="has reached it in its 100 updates"):
        script.tuner(loss=3.0).tune()
    assert len(script.runs) == 1
    with pytest.raises(LaunchError, match=r"no room behind the first run of 10 s.*--budget 41s"):
        Script().tuner(budget=20.0).tune()
    with pytest.raises(LaunchError, match=r"failed, boom; .*100 updates: --steps takes"):
        Script(fails="").tuner().tune()
    with pytest.raises(LaunchError, match=r"--steps 12: too few updates.*allowed: 40 or more"):
        check_updates(12)


def test_measured_losses_are_kept_where_nothing_can_be_predicted() -> None:
    def nothing(trace: Trace, base: Strategy) -> Sequence[Prediction]:
        raise LaunchError("the network could not be measured")

    script = Script()
    tuner = script.tuner()
    tuner.predict = nothing
    tuned = tuner.tune()
    assert len(script.runs) == 2
    assert "nothing else was tried: the network could not be measured" in tuned.verdict
    assert len(tuned.calibration.runs) == 1
