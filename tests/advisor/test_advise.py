"""The advisor: each rule fires above its bound and not below, and its patches are valid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from slipstream.advisor import rules
from slipstream.advisor.advise import RULES, advise
from slipstream.advisor.exchange_rules import accumulate, exchange_otherwise, send_less
from slipstream.advisor.findings import Finding, merged
from slipstream.advisor.trace_stats import TraceStats, trace_stats
from slipstream.errors import ClusterError, TraceError
from slipstream.planner.iteration.contention_fit import read_trace
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.network.curve import Curve
from slipstream.planner.search.candidates import exact
from slipstream.planner.search.ranking import rank
from slipstream.strategy import Strategy
from slipstream.trace.event import FULLY_SHARD, Event, Trace
from tests.harness.traces import by_hand, many, random_traces
from tests.harness.training import MS, Training
from tests.planner.networks import ethernet_profile
from tests.planner.test_ranking import workload


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


def _late(seconds: float, rank: int = 1) -> Callable[[int, int], float]:
    return lambda at, step: seconds if at == rank else 0.0


def _in_turn(seconds: float) -> Callable[[int, int], float]:
    return lambda rank, step: seconds if rank == step % 3 else 0.0


def _on_one_host(*cpu_seconds: float) -> dict[str, Any]:
    return {"hosts": ["here"] * len(cpu_seconds), "cpu_seconds": [*cpu_seconds]}


ALONE = Training(ranks=1)
EACH = tuple(range(1, 11))


CASES = (
    Case(
        "feed_faster",
        replace(ALONE, data_wait=17.9),
        replace(ALONE, data_wait=17.6),
        "data",
        "problem",
        17.9,
        ("17.90 ms for the loader, 10.1% of an iteration", "stay alive"),
    ),
    Case(
        "feed_faster",
        replace(ALONE, data_wait=17.9, meta={"prefetchable": True}),
        replace(ALONE, data_wait=17.6, meta={"prefetchable": True}),
        "data",
        "problem",
        17.9,
        ("data.prefetch",),
    ),
    Case(
        "feed_faster",
        replace(ALONE, data_wait=17.9, reading={"readers": 2, "queued": 0}),
        replace(ALONE, data_wait=17.6, reading={"readers": 2, "queued": 0}),
        "data",
        "problem",
        17.9,
        ("Its 2 readers do not keep up", "Read with 4"),
    ),
    Case(
        "feed_faster",
        replace(ALONE, data_wait=17.9, reading={"readers": 2, "queued": 3}),
        replace(ALONE, data_wait=17.6, reading={"readers": 2, "queued": 3}),
        "data",
        "warning",
        0.0,
        ("3 batches are there when it asks for one", "data.prefetch.threads"),
    ),
    Case(
        "feed_faster",
        Training(data_wait=40, meta={"prefetchable": True}),
        Training(data_wait=20, meta={"prefetchable": True}),
        "data",
        "problem",
        40.0,
        ("data.prefetch",),
    ),
    Case(
        "feed_faster",
        Training(data_wait=40, reading={"readers": 2, "queued": 0}, meta={"resizable": True}),
        Training(data_wait=20, reading={"readers": 2, "queued": 0}),
        "data",
        "problem",
        40.0,
        ("Read with 4 workers or threads: set data.prefetch.workers",),
    ),
    Case(
        "feed_faster",
        Training(data_wait=40, reading={"readers": 2, "queued": 3}),
        Training(data_wait=20, reading={"readers": 2, "queued": 3}),
        "data",
        "warning",
        0.0,
        ("3 batches are there",),
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
        11.2 * 2 / 3,  # to the mean of three
        ("which rank is last changes",),
    ),
    Case(
        "even_ranks",
        Training(ranks=3, late=_in_turn(11.2), meta={"balanceable": True}),
        Training(ranks=3, late=_in_turn(10.9), meta={"balanceable": True}),
        "ranks",
        "warning",
        11.2 * 2 / 3,  # to the mean of three
        ("which rank is last changes", "data.balance"),
    ),
    Case(
        "even_ranks",
        Training(ranks=3, late=_late(11.2), meta=_on_one_host(0.161, 0.164, 0.16)),
        Training(ranks=3, late=_late(10.9), meta=_on_one_host(0.161, 0.164, 0.16)),
        "cores",
        "warning",
        0.0,
        ("Rank 1 takes 61.20 ms for forward", "no more CPU time", "cores of its own"),
    ),
    Case(
        "even_ranks",
        Training(ranks=3, late=_late(11.2), meta=_on_one_host(0.16, 0.171, 0.16)),
        Training(ranks=3, late=_late(10.9), meta=_on_one_host(0.16, 0.171, 0.16)),
        "rank 1, forward",
        "warning",
        11.2,
        ("check its host for other processes",),
    ),
    Case(
        "even_ranks",
        Training(ranks=3, late=_late(11.2), phase="data_wait", meta=_on_one_host(0.16, 0.16, 0.16)),
        Training(ranks=3, late=_late(10.9), phase="data_wait", meta=_on_one_host(0.16, 0.16, 0.16)),
        "rank 1, data wait",
        "warning",
        11.2,
        ("takes 11.20 ms for data wait, the others 0.0 us", "a slower disk"),
    ),
    Case(
        "even_ranks",
        Training(ranks=3, late=_late(11.2), meta={"engine": FULLY_SHARD}),
        Training(ranks=3, late=_late(10.9), meta={"engine": FULLY_SHARD}),
        "rank 1, forward",
        "warning",
        11.2,
        ("Rank 1 takes 61.20 ms for forward, the others 50.00 ms, in 3 of 3 steps",),
    ),
    Case(
        "look_outside",
        replace(ALONE, outside=17.9),
        replace(ALONE, outside=17.6),
        "script",
        "warning",
        0.0,
        ("runs for 17.90 ms, 10.1% of an iteration", "give the loader to accelerate()"),
    ),
    Case(
        "even_ranks",
        Training(ranks=3, late=_late(11.2), phase="outside"),
        Training(ranks=3, late=_late(10.9), phase="outside"),
        "rank 1",
        "warning",
        11.2,
        ("Rank 1 is the last, by 11.20 ms, in most steps", "do not explain that", "logging"),
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
        "gather_less",
        Training(cuts=(10,), startup=18, per_mb=0, meta={"engine": FULLY_SHARD}),
        Training(cuts=(10,), startup=17, per_mb=0, meta={"engine": FULLY_SHARD}),
        "fully_shard",
        "warning",
        0.0,
        ("for 18.00 ms, 10.1% of an iteration", "reshard_after_forward=False"),
    ),
    Case(
        "miss_sizes",
        Training(meta={"gradients": []}),
        Training(),
        "trace",
        "note",
        0.0,
        ("size of each gradient", "Record again"),
    ),
)


def _apply(name: str, training: Training) -> Finding | None:
    rule: Callable[[TraceStats], Finding | None] = getattr(rules, name)
    return rule(trace_stats(training.trace))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_fires_above_its_bound_and_not_below(case):
    found = _apply(case.rule, case.fires)
    assert found is not None
    assert (found.where, found.severity) == (case.where, case.severity)
    assert found.gain / MS == pytest.approx(case.gain)
    for text in case.says:
        assert text in f"{found.evidence} {found.advice}"
    assert _apply(case.rule, case.just_not) is None


def test_every_rule_has_a_case():
    of_exchanges = {exchange_otherwise, send_less, accumulate}
    assert {case.rule for case in CASES} == {r.__name__ for r in RULES if r not in of_exchanges}


# The exchange: what the planner says.

SLOW = {"startup": 100.0, "per_mb": 10.0}
SCENARIOS = {
    "the last one is long": (
        Training(cuts=(2, 10), startup=5, per_mb=4),
        "gradients.split",
        "",
    ),
    "one before the last is exposed": (
        Training(cuts=(3, 6, 10), startup=30, per_mb=8),
        "gradients.split",
        "Exchange 2 of 3 ends",
    ),
    "too few segments": (
        Training(cuts=(10,), startup=5, per_mb=8),
        "gradients.split",
        "No split makes 1 segment as good as",
    ),
    "too many segments": (
        Training(cuts=EACH, startup=40, per_mb=1),
        "gradients.split",
        "10 segments keep the network busy",
    ),
    "gradients wait": (
        Training(cuts=(9, 10), startup=1, per_mb=10),
        "gradients.split",
        "gradients wait for their segment to fill",
    ),
    "no overlap": (
        Training(overlap=False, startup=10, per_mb=8),
        "gradients.overlap",
        "Overlap is off: exchanges take",
    ),
}


@pytest.mark.parametrize(("training", "where", "says"), SCENARIOS.values(), ids=SCENARIOS)
def test_another_exchange_gains_what_the_planner_predicts(training, where, says) -> None:
    trace, network = training.trace, training.network
    stats = trace_stats(trace, network)
    found = exchange_otherwise(stats)
    assert found is not None
    assert found.where == where
    assert says in found.evidence
    workload, here = read_trace(trace, network)
    settings = [trace.meta["strategy"], merged(trace.meta["strategy"], found.patch)]
    base, best = (Strategy.load({"gradients": one["gradients"]}) for one in settings)
    ranked = rank(exact(workload, here, base), workload, here, base)
    assert ranked[0].strategy.gradients == best.gradients  # what `slipstream plan` puts first
    seconds = {one.strategy: one.seconds for one in ranked}
    assert found.gain == pytest.approx(seconds[base] - ranked[0].seconds)
    assert found.severity == stats.severity(found.gain)
    assert exchange_otherwise(stats._replace(worthwhile=found.gain * 1.01)) is None


def test_no_exchange_gains_more_than_is_exposed_now() -> None:
    training, *_ = SCENARIOS["the last one is long"]
    stats = trace_stats(training.trace, training.network)
    assert stats.what_if is not None
    base = stats.what_if.base
    slow = replace(stats.what_if, base=replace(base, seconds=2 * base.seconds))
    found = exchange_otherwise(stats._replace(what_if=slow))
    assert found is not None
    assert found.gain == stats.exposed_exchange < slow.saved(slow.best)


@pytest.mark.parametrize("split", ["single", {"kind": "by_bytes", "megabytes": 64}])
def test_a_patch_gains_what_the_finding_says(split: object) -> None:
    network, work = ethernet_profile(slowdown=0.2), workload()

    def took(settings: dict[str, Any]) -> tuple[float, Trace]:
        strategy = Strategy.load(settings)
        trace = simulate(work, CommPlan.of(strategy, work.gradients), network, steps=3)
        meta = {**trace.meta, "strategy": strategy.document(full=True)}
        return trace_stats(trace).iteration, Trace(trace.events, meta)

    before, trace = took({"gradients": {"split": split}})
    found = exchange_otherwise(trace_stats(trace, network))
    assert found is not None
    after, improved = took(merged({"gradients": {"split": split}}, found.patch))
    assert before - after == pytest.approx(found.gain, rel=0.05)
    assert exchange_otherwise(trace_stats(improved, network)) is None


def test_transports_that_were_measured_are_advised() -> None:
    training = Training(startup=10, per_mb=20)
    network = training.network
    world = network.networks["world"]
    half = Curve.fit([(size, seconds / 2) for size, seconds in world.all_reduce.points])
    faster = world.model_copy(update={"direct_all_reduce": half})
    found = exchange_otherwise(
        trace_stats(training.trace, network.model_copy(update={"networks": {"world": faster}}))
    )
    assert found is not None
    assert (found.where, found.patch["gradients"]["transport"]["kind"]) == (
        ("gradients.transport", "direct")
    )
    assert "by transport direct" in found.advice


def test_a_codec_is_named_where_nothing_exact_hides_the_exchange() -> None:
    training = Training(**SLOW, forward=99)
    assumed = send_less(trace_stats(training.trace))
    assert assumed is not None
    assert (assumed.severity, assumed.patch) == ("note", {"gradients": {"codec": "half"}})
    assert "not measured here" in assumed.advice
    ratios = {"int8": 0.26, "dgc": 0.01, "half": 1.0}
    costs = {kind: CodecCost(ratio=ratio) for kind, ratio in ratios.items()}
    network = training.network.model_copy(update={"codecs": costs})
    sgd, other = (
        replace(training, meta={"optimizer": {"bytes": 0, "shardable": True, "sgd": sgd}})
        for sgd in (True, False)
    )
    found = send_less(trace_stats(sgd.trace, network))
    assert found is not None
    assert found.patch == {"gradients": {"codec": "int8"}}  # dgc begins with update 1005
    assert "26.0% of the bytes: codec int8" in found.advice
    without = send_less(trace_stats(other.trace, network))
    assert without is not None
    assert without.patch == {"gradients": {"codec": "int8"}}
    assert found.gain == without.gain > 0
    assert ("dgc" in found.evidence, "dgc" in without.evidence) == (True, False)
    hidden = replace(training, forward=400)
    assert send_less(trace_stats(hidden.trace, network)) is None


def test_larger_batches_are_a_note_where_exchanges_stay_exposed() -> None:
    training = Training(cuts=(10,), **SLOW)
    found = accumulate(trace_stats(training.trace, training.network))
    assert found is not None
    assert (found.severity, found.where) == ("note", "gradients.accumulate")
    assert found.patch == {"gradients": {"accumulate": 4}}
    assert "is 4 times as large" in found.advice
    # three of four exchanges of 200 ms, and of four updates of 10 ms, for each batch
    assert found.gain / MS == pytest.approx(0.75 * 210, rel=0.05)
    hidden = replace(training, forward=1000)
    assert accumulate(trace_stats(hidden.trace, hidden.network)) is None


def test_a_larger_batch_is_that_of_the_strategy_times_as_large() -> None:
    training = Training(cuts=(10,), **SLOW)
    gradients = training.trace.meta["strategy"]["gradients"] | {"accumulate": 2}
    twice = replace(training, meta={"strategy": {"gradients": gradients}})
    found = accumulate(trace_stats(twice.trace, twice.network))
    assert found is not None
    assert found.patch == {"gradients": {"accumulate": 8}}
    assert "Exchange once in 8 backward passes" in found.advice
    assert "is 4 times as large" in found.advice


def test_findings_are_sorted_by_gain_and_patches_are_valid_strategies() -> None:
    for training in (Training(**SLOW), Training(overlap=False), Training(cuts=EACH)):
        found = advise(training.trace, training.network)
        assert all(a.gain >= b.gain >= 0 for a, b in pairwise(found))
        settings = training.trace.meta["strategy"]
        for patch in (finding.patch for finding in found if finding.patch):
            before, after = Strategy.load(settings), Strategy.load(merged(settings, patch))
            assert after.trace == before.trace
            assert after.gradients != before.gradients


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
    alone, told = advise(training.trace), advise(training.trace, training.network)
    assert alone[0].where == told[0].where == "gradients.split"
    assert alone[0].gain == pytest.approx(told[0].gain, rel=0.1)


def test_exchanges_of_one_size_do_not_lead_to_ever_smaller_segments():
    training = Training(cuts=(5, 10), startup=1.0, per_mb=10.0)
    told = exchange_otherwise(trace_stats(training.trace, training.network))
    assert told is not None
    assert "No split makes 2 segments" in told.evidence
    alone = exchange_otherwise(trace_stats(training.trace))
    assert alone is None or "No split makes 2 segments" not in alone.evidence


def test_a_network_of_other_ranks_is_refused():
    with pytest.raises(ClusterError, match="2 ranks"):
        advise(Training(ranks=3).trace, Training().network)


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


def test_what_a_framework_sets_by_itself_is_advised_there() -> None:
    theirs = {
        "framework": {"name": "Accelerate", "own_settings": {"gradients.accumulate": "its setting"}}
    }
    training = Training(cuts=(10,), **SLOW, meta=theirs)
    found = accumulate(trace_stats(training.trace, training.network))
    assert found is not None
    assert found.patch == {}
    assert "4 times as rarely, by its setting of Accelerate" in found.advice
    outside = replace(ALONE, outside=17.9, meta=theirs)
    [said] = [one for one in advise(outside.trace) if one.where == "script"]
    assert "give the loader" not in said.advice
