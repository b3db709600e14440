"""What the terminal shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from rich.console import Console

from slipstream.analysis.ascii_timeline import ascii_timeline
from slipstream.analysis.breakdown import IterationParts, TypicalIteration
from slipstream.analysis.summary import document, summary
from slipstream.analysis.tables import PARTS, rank_table
from slipstream.analysis.time_unit import TimeUnit
from slipstream.errors import TraceError
from slipstream.trace.event import Event, Trace
from slipstream.trace.timeline import timeline
from tests.harness.traces import by_hand, many, random_traces
from tests.harness.training import Training


def _shown(trace: Trace, **options) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(summary(trace, **options))
    return capture.get()


def _row(text: str, label: str) -> list[str]:
    """The cells behind a label (a pattern), of which the first is a number with decimals."""
    rows = (re.match(rf"{label} +(\d+\.\d.*)", line) for line in text.splitlines())
    [row] = [row[1] for row in rows if row]
    return row.replace(" .. ", "..").split()


def test_a_row_for_each_part():
    shown = _shown(by_hand())
    assert _row(shown, "forward") == ["26.00", "26.0", "25.00..27.00", "rank", "1"]
    assert _row(shown, "backward") == ["39.00", "39.0", "38.00..40.00", "rank", "0"]
    assert _row(shown, "exposed exchange") == ["15.00", "15.0", "15.00..15.00", "-"]
    assert _row(shown, "tail")[0] == "15.00"
    assert _row(shown, "iteration")[:2] == ["100.00", "100.0"]


def test_a_row_for_each_exchange():
    # exposed, hidden %, time, start, skew, MB, Gbit/s, gradients
    shown = _shown(by_hand())
    assert _row(shown, "1") == ["0.00", "100.0", "20.00", "40.00", "2.00", "5.00", "2.00", "7"]
    assert _row(shown, "2") == ["15.00", "40.0", "25.00", "60.00", "2.00", "5.00", "1.60", "7"]


def test_the_headline_says_what_was_measured():
    shown = _shown(by_hand())
    head, speed, *_ = re.split(r"\n *\n", shown)
    assert " ".join(head.split()) == (
        "ResNet-50 | 2 ranks on 2 hosts | 3 iterations | split by_bytes | clocks within 30 us"
    )
    assert speed.strip() == "75.0% of an iteration is compute"


def test_the_speed_and_what_it_is_spent_on():
    shown = _shown(Training(samples=21).trace)  # 160 of 210 ms on each of 2 ranks
    assert "200 samples/s | 76.2% of an iteration is compute" in shown
    assert "samples/s" not in _shown(by_hand())


def test_a_run_on_one_rank_is_the_base_of_the_efficiency():
    many_ranks, one = Training(ranks=4), Training(ranks=1)  # 210 and 160 ms
    shown = _shown(many_ranks.trace, baseline=one.trace)
    assert "scaling efficiency 0.762 (linear: 1)" in " ".join(shown.split())
    numbers = document(many_ranks.trace, rank=1, baseline=one.trace)
    assert numbers["scaling_efficiency"] == pytest.approx(160 / 210)
    assert numbers["samples_per_second"] == pytest.approx(4 * 8 / 0.210)  # of all ranks
    assert document(many_ranks.trace)["scaling_efficiency"] is None


def test_a_row_for_each_straggler():
    trace = Training(ranks=4, late=lambda rank, step: 20.0 * (rank == 2)).trace
    shown = _shown(trace)
    assert _row(shown, "forward +2") == ["20.00", "50.00", "3", "of", "3"]
    assert document(trace)["stragglers"] == [
        {
            "rank": 2,
            "phase": "forward",
            "seconds": pytest.approx(0.02),
            "usual": pytest.approx(0.05),
            "iterations": 3,
            "of": 3,
        }
    ]
    assert "slower than the others" not in _shown(Training().trace)


def test_ranks_alone_and_side_by_side():
    trace = by_hand(ranks=3)
    alone = _shown(trace, rank=2)
    assert _row(alone, "forward") == ["29.00", "29.0", "29.00..29.00", "-"]
    assert "rank 2, step" in alone
    side_by_side = _shown(trace, per_rank=True)
    # iteration, data wait, forward, backward, exposed exchange, optimizer, other, tail
    numbers = ["100.00", "5.00", "29.00", "36.00", "15.00", "10.00", "5.00", "15.00"]
    assert _row(side_by_side, "   2") == numbers


def test_the_timeline_shows_the_overlap():
    drawing = ascii_timeline(timeline(by_hand().events)[0], width=51).plain.splitlines()
    assert drawing[1:3] == [
        "compute  |ddffffffffffbbbbbbbbbbbbbbbb      oooo  |",
        "exchange |                111111112222222222      |",
    ]


def test_the_timeline_gives_each_span_a_column_and_overlapping_exchanges_a_row():
    [iteration] = timeline(
        [
            Event("iteration", 0, 0, 0.0, 10.0),
            Event("optimizer", 0, 0, 9.999, 10.0),
            Event("buffers", 0, 0, 0.0, 0.001),
            Event("allreduce9", 0, 0, 1.0, 6.0),
            Event("allreduce10", 0, 0, 5.0, 8.0),
        ]
    )
    assert ascii_timeline(iteration, width=21).plain.splitlines()[1:4] == [
        "compute  |         o|",
        "exchange |v99999    |",
        "         |     000  |",
    ]


@many
@given(random_traces())
def test_any_trace_can_be_shown(trace):
    shown = _shown(trace, per_rank=True)
    assert max(map(len, shown.splitlines())) <= 80
    assert "\u2026" not in shown
    json.dumps(document(trace), allow_nan=False)


@pytest.mark.parametrize("seconds", [9e-4, 0.99, 9.9, 99.9, 5000.0])
def test_a_row_of_a_rank_fits_where_every_part_is_as_long_as_the_iteration(seconds):
    """Medians of parts do not add up to that of the iteration."""
    typical = TypicalIteration(8, {4095: IterationParts(**dict.fromkeys(PARTS, seconds))}, ())
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(rank_table(typical))
    assert "\u2026" not in capture.get()


def _huge() -> Trace:
    """Two of 4096 ranks, seconds an iteration, gigabytes in each of 161 exchanges."""
    events = []
    for rank in (0, 4095):
        late = rank / 4096
        events.append(Event("iteration", rank, 0, 0.0, 9.0 + late / 2, {"samples": 8}))
        events.append(Event("forward", rank, 0, 0.0, 3.0 + late))
        events.append(Event("backward", rank, 0, 4.0, 8.0))
        size = {"bytes": 12_345_678_901, "gradients": 1234, "ready": 4.0}
        events += [
            Event(f"allreduce{number}", rank, 0, 4 + number / 36, 4 + (number + 1) / 36, size)
            for number in range(1, 162)
        ]
        stage = {"stage": 100 + late, "micro_batch": 1}
        events.append(Event("stage_forward", rank, 0, 0.0, 2.0 + late, stage))
        operator = {"bytes": 123_456_789_012, "ranks": 4096}
        events.append(Event("reduce_scatter_sum", rank, 0, 1.0, 5.0, operator))
    return Trace(tuple(events), {"world_size": 4096})


def test_no_heading_and_no_number_of_a_huge_trace_is_cut_at_80_columns():
    shown = _shown(_huge(), per_rank=True)
    assert "\u2026" not in shown
    for heading in ("min .. max rank ms", "slower by ms", "exposed", "gradients", "optimizer"):
        assert heading in shown
    for number in ("9499.9", "rank 4095", "12345.68", "3555.56", "123456.79", "1234\n"):
        assert number in re.sub(" +\n", "\n", shown)
    for table in ("Where", "Ranks slower", "Rank by", "Exchanges", "Stages", "Operators"):
        assert f"\n{table}" in shown
    assert len(shown.splitlines()) < 240  # no cell is broken over lines


def test_a_bare_trace_can_be_shown():
    shown = _shown(Trace((Event("iteration", 0, 0, 0.0, 2e-4),)))
    assert _row(shown, "other") == ["200.0", "100.0", "200.0..200.0", "-"]
    assert "Exchanges" not in shown


@pytest.mark.parametrize(
    ("seconds", "name"), [(0.0, "us"), (9e-4, "us"), (1e-3, "ms"), (9.9, "ms"), (10.0, "s")]
)
def test_units_fit_the_largest_time(seconds, name):
    assert TimeUnit.of(seconds).name == name


def test_a_predicted_trace_counts_the_ranks_that_it_does_not_hold():
    trace = Training(ranks=2).trace
    many = replace(trace, meta={**trace.meta, "world_size": 512})
    assert "2 of 512 ranks" in _shown(many)
    rate = document(trace)["samples_per_second"]
    assert document(many)["samples_per_second"] == pytest.approx(256 * rate)


def test_a_baseline_of_another_model_is_refused():
    one, other = (
        replace(run, meta={**run.meta, "model": name})
        for run, name in ((Training(ranks=4).trace, "GPT-2"), (Training(ranks=1).trace, "BERT"))
    )
    with pytest.raises(TraceError, match="of the model BERT, the trace of GPT-2"):
        document(one, baseline=other)
