"""The advisor: each rule fires above its bound and not below, and its patches are valid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given

from slipstream.advisor import rules, split_rules
from slipstream.advisor.advise import RULES, advise
from slipstream.advisor.findings import Finding, merged
from slipstream.advisor.trace_stats import trace_stats
from slipstream.errors import TraceError
from slipstream.strategy import Strategy
from slipstream.trace.event import Event, Trace
from tests.harness.traces import by_hand, many, random_traces
from tests.harness.training import MS, Training


@dataclass(frozen=True)
class Case:
    """A training on which a rule fires, one on which it just does not, and the finding."""

    rule: str
    fires: Training
    just_not: Training
    where: str
    severity: str
    gain: float  # ms
    says: tuple[str, ...]
    last: tuple[int, ...] | None = None  # the split in the patch


def _late(seconds: float, rank: int = 1) -> Callable[[int, int], float]:
    return lambda at, step: seconds if at == rank else 0.0


def _in_turn(seconds: float) -> Callable[[int, int], float]:
    return lambda rank, step: seconds if rank == step % 3 else 0.0


ALONE = Training(ranks=1)
JOINED = {"cuts": (10,), "startup": 100.0, "per_mb": 10.0}
EACH = tuple(range(1, 11))
WAITING = {"cuts": (3, 4, 10), "per_mb": 10.0}


def _third_ready(at: float) -> tuple[float, ...]:
    return (10.0, 20.0, at, *range(40, 101, 10))


CASES = (
    # All but the last exchange end at 88 of 100 ms; with the cut one gradient later, 2 ms less.
    Case(
        "move_cut_later",
        Training(cuts=(4, 10), forward=37),
        Training(cuts=(4, 10), forward=39),
        "gradients.split",
        "warning",
        2.0,
        ("The last one, of 6.00 MB", "continues for 52.00 ms", "5.00, 5.00 MB"),
        (4, 9),
    ),
    Case(
        "move_cut_earlier",
        Training(cuts=(6, 10), forward=820),
        Training(cuts=(6, 10), forward=840),
        "gradients.split",
        "warning",
        10.0,
        ("Exchange 1 of 2 ends 12.00 ms after backward, the last one 60.00 ms",),
        (4, 9),
    ),
    Case(
        "add_segments",
        Training(cuts=(10,), forward=820),
        Training(cuts=(10,), forward=840),
        "gradients.split",
        "warning",
        10.0,
        ("1 segment as good as 2", "2 segments of 5.00, 5.00 MB"),
        (4, 9),
    ),
    Case(
        "join_segments",
        Training(cuts=EACH, startup=21, per_mb=20),
        Training(cuts=EACH, startup=19, per_mb=20),
        "gradients.split",
        "problem",
        148.0,
        ("10 segments take 410.00 ms, of which 51% is startup",),
        (2, 9),
    ),
    Case(
        "start_earlier",
        Training(**WAITING, offsets=_third_ready(35.1)),
        Training(**WAITING, offsets=_third_ready(34.9)),
        "gradients.split",
        "problem",
        40.0,
        ("In 25.10 ms of the 100.00 ms of backward",),
        (2, 9),
    ),
    Case(
        "overlap_exchange",
        Training(overlap=False, forward=4780),
        Training(overlap=False, forward=4800),
        "gradients.overlap",
        "warning",
        50.0,
        ("100.00 ms after backward",),
    ),
    Case(
        "feed_faster",
        replace(ALONE, data_wait=17.9),
        replace(ALONE, data_wait=17.6),
        "data",
        "problem",
        17.9,
        ("17.90 ms for the loader, 10.1% of an iteration",),
    ),
    Case(
        "even_ranks",
        Training(ranks=3, late=_late(11.2)),
        Training(ranks=3, late=_late(10.9)),
        "rank 1, forward",
        "warning",
        11.2,
        ("takes 61.20 ms for forward, the others 50.00 ms, in 3 of 3 steps",),
    ),
    Case(
        "even_ranks",
        Training(ranks=3, late=_in_turn(11.2)),
        Training(ranks=3, late=_in_turn(10.9)),
        "ranks",
        "warning",
        11.2,
        ("which rank is last changes",),
    ),
    Case(
        "lighten_optimizer",
        replace(ALONE, optimizer=16.8),
        replace(ALONE, optimizer=16.5),
        "optimizer",
        "warning",
        0.0,
        ("16.80 ms for 10 parameters, 10.1% of an iteration",),
    ),
    Case(
        "accumulate",
        Training(**JOINED, forward=299),
        Training(**JOINED, forward=301),
        "gradients.accumulate",
        "note",
        105.0,
        ("200.00 ms at the best split, compute 399.00 ms", "is 2 times as large"),
    ),
    Case(
        "send_less",
        Training(**JOINED, forward=99),
        Training(**JOINED, forward=101),
        "network",
        "note",
        100.0,
        ("busy for 200.00 ms, compute takes 199.00 ms",),
    ),
    Case(
        "distrust_clocks",
        Training(clock_error=2.11),
        Training(clock_error=2.09),
        "clocks",
        "warning",
        0.0,
        ("off by 2.11 ms",),
    ),
    Case(
        "miss_steps",
        Training(meta={"world_size": 3}),
        Training(meta={"world_size": 2}),
        "trace",
        "problem",
        0.0,
        ("rank 2 has 0 of 3 steps",),
    ),
    Case(
        "miss_sizes",
        Training(meta={"gradients": []}),
        Training(),
        "trace",
        "note",
        0.0,
        ("size of each gradient",),
    ),
)


def _apply(name: str, training: Training) -> Finding | None:
    rule = getattr(split_rules, name, None) or getattr(rules, name)
    return rule(trace_stats(training.trace, training.seconds_of))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_fires_above_its_bound_and_not_below(case):
    found = _apply(case.rule, case.fires)
    assert found is not None
    assert (found.where, found.severity) == (case.where, case.severity)
    assert found.gain / MS == pytest.approx(case.gain)
    for text in case.says:
        assert text in f"{found.evidence} {found.advice}"
    if case.last is not None:
        assert found.patch == {
            "gradients": {"split": {"kind": "by_index", "last": list(case.last)}}
        }
    assert _apply(case.rule, case.just_not) is None


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_findings_are_sorted_by_gain_and_patches_are_valid_strategies(case):
    trace = case.fires.trace
    found = advise(trace, case.fires.seconds_of)
    assert case.where in {finding.where for finding in found}
    assert all(a.gain >= b.gain >= 0 for a, b in pairwise(found))
    for patch in (finding.patch for finding in found if finding.patch):
        before = Strategy.load(trace.meta["strategy"])
        after = Strategy.load(merged(trace.meta["strategy"], patch))
        assert after.trace == before.trace
        assert after.gradients != before.gradients


def test_a_patch_gains_what_the_finding_says():
    training = Training(cuts=(9, 10), startup=5.0, per_mb=8.0)
    [finding] = [f for f in advise(training.trace, training.seconds_of) if "split" in f.where]
    last = finding.patch["gradients"]["split"]["last"]
    after = replace(training, cuts=tuple(index + 1 for index in last))

    def took(one: Training) -> float:
        return trace_stats(one.trace).iteration

    assert took(training) - took(after) == pytest.approx(finding.gain)
    assert not [f for f in advise(after.trace, training.seconds_of) if "split" in f.where]


def test_without_overlap_the_patch_adds_a_split_if_the_present_one_hides_nothing():
    found = _apply("overlap_exchange", Training(cuts=(10,), overlap=False))
    assert found is not None
    assert found.patch == {
        "gradients": {"overlap": True, "split": {"kind": "by_index", "last": [4, 9]}}
    }
    assert found.gain == pytest.approx(10 * MS)


def test_rules_with_the_same_patch_make_one_finding():
    found = advise(Training(cuts=(10,)).trace, Training().seconds_of)
    [split] = [finding for finding in found if finding.where == "gradients.split"]
    assert "1 segment as good as 2" in split.evidence
    assert "wait for their segment to fill" in split.evidence


@pytest.mark.parametrize(
    "training",
    [
        Training(cuts=(9, 10), startup=0.5, per_mb=0.1),
        replace(ALONE, optimizer=5),
    ],
    ids=["hidden", "one process"],
)
def test_a_run_without_problems_is_good(training):
    [finding] = advise(training.trace)
    assert (finding.severity, finding.gain, finding.patch) == ("good", 0.0, {})
    assert "of an iteration" in finding.evidence


def test_the_cost_can_be_fitted_to_the_trace_itself():
    training = Training(cuts=(2, 9, 10), startup=6.3, per_mb=6.9)
    alone, told = advise(training.trace), advise(training.trace, training.seconds_of)
    assert [(f.where, f.patch) for f in alone] == [(f.where, f.patch) for f in told]
    assert [f.gain for f in alone] == pytest.approx([f.gain for f in told])


def test_exchanges_of_one_size_do_not_lead_to_ever_smaller_segments():
    training = Training(cuts=(5, 10), startup=1.0, per_mb=10.0)
    assert [f for f in advise(training.trace, training.seconds_of) if "split" in f.where]
    assert not [f for f in advise(training.trace) if "split" in f.where]


def test_steps_before_the_segments_changed_do_not_count():
    old, new = Training(cuts=(10,), steps=2), Training(cuts=(5, 10), steps=3)
    moved = [replace(event, step=event.step + 100) for event in new.trace.events]
    stats = trace_stats(Trace((*old.trace.events, *moved), new.trace.meta))
    assert stats.typical.iterations == 3
    assert stats.exchanges is not None
    assert stats.exchanges.cuts == (5, 10)


def test_a_step_that_a_rank_misses_is_named_and_omitted():
    trace = Training(steps=4).trace
    cut = tuple(e for e in trace.events if e.rank == 0 or e.step < 4)
    found = advise(Trace(cut, trace.meta))
    assert any("rank 1 has 2 of 4 steps" in finding.evidence for finding in found)
    assert trace_stats(Trace(cut, trace.meta)).typical.iterations == 2


def test_a_prediction_may_hold_the_events_of_some_ranks_only():
    trace = Training(meta={"world_size": 4096, "predicted": True}).trace
    assert not [finding for finding in advise(trace) if finding.where == "trace"]


def _foreign(cuts: tuple[int, ...]) -> Trace:
    """Rank 1 comes from another run."""
    ours, theirs = Training().trace, Training(cuts=cuts).trace
    events = [e for e in ours.events if e.rank == 0] + [e for e in theirs.events if e.rank == 1]
    return Trace(tuple(events), ours.meta)


def _apart() -> Trace:
    """No step is common to both ranks."""
    trace = Training().trace
    moved = [replace(e, step=e.step + 10) if e.rank else e for e in trace.events]
    return Trace(tuple(moved), trace.meta)


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (_foreign((3, 10)), r"disagree in step 2: rank 0 .* of \[5, 5\] gradients, rank 1 of \[3"),
        (_foreign((10,)), r"of \[5, 5\] gradients, rank 1 of \[10\]\. These are different runs"),
        (_apart(), r"no step was recorded by every rank \(rank 0 has 3 of 6 steps; rank 1"),
        (Trace((Event("forward", 0, 2, 0.0, 1.0),)), "no iteration"),
        (Training(meta={"gradients": ["g0"]}).trace, "list of gradients cannot be read"),
        (Training(meta={"gradients": 3}).trace, "list of gradients cannot be read"),
    ],
)
def test_traces_of_different_runs_are_refused(trace, reason):
    with pytest.raises(TraceError, match=reason):
        advise(trace)


def test_older_traces_without_sizes_get_all_other_advice():
    found = advise(by_hand())
    assert [f.where for f in found if f.severity == "note"] == ["trace"]
    assert "gradients.split" not in {finding.where for finding in found}


@many
@given(random_traces())
def test_any_trace_gets_advice_or_a_reason_why_not(trace):
    try:
        found = advise(trace)
    except TraceError as error:
        found, reason = [], str(error)
    assert found or "rank" in reason
