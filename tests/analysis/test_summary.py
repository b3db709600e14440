"""What the terminal shows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from rich.console import Console

from slipstream.analysis.ascii_timeline import strip, unit
from slipstream.analysis.summary import document, summary
from slipstream.trace.event import Event, Trace
from slipstream.trace.timeline import timeline
from tests.trace.traces import by_hand, many, random_traces
from tests.trace.training import Training


def _shown(trace: Trace, **options) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(summary(trace, **options))
    return capture.get()


def _row(text: str, label: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"{label} ")]
    return line.removeprefix(label).replace(" .. ", "..").split()


def test_a_row_for_each_part():
    shown = _shown(by_hand())
    assert _row(shown, "forward") == ["26.00", "26.0", "25.00..27.00", "rank", "1"]
    assert _row(shown, "backward") == ["39.00", "39.0", "38.00..40.00", "rank", "0"]
    assert _row(shown, "exposed exchange") == ["15.00", "15.0", "15.00..15.00", "-"]
    assert _row(shown, "tail")[0] == "15.00"
    assert _row(shown, "iteration")[:2] == ["100.00", "100.0"]


def test_a_row_for_each_exchange():
    # gradients, MB, start, time, hidden %, exposed, skew, Gbit/s
    shown = _shown(by_hand())
    assert _row(shown, "1") == ["7", "5.00", "40.00", "20.00", "100.0", "0.00", "2.00", "2.00"]
    assert _row(shown, "2") == ["7", "5.00", "60.00", "25.00", "40.0", "15.00", "2.00", "1.60"]


def test_the_headline_says_what_was_measured():
    shown = _shown(by_hand())
    head = " ".join(shown[: shown.index("rank 0, step")].split())
    assert head == (
        "ResNet-50 | 2 ranks on 2 hosts | 3 iterations | split by_bytes | clocks within 30 us"
    )


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
    assert "   2  forward      50.00         20.00      3 of 3" in shown
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
    assert "2       5.00    29.00     36.00    15.00      10.00   5.00     100.00  15.00" in (
        side_by_side
    )


def test_the_strip_shows_the_overlap():
    drawing = strip(timeline(by_hand().events)[0], width=51).plain.splitlines()
    assert drawing[1:3] == [
        "compute  |ddffffffffffbbbbbbbbbbbbbbbb      oooo  |",
        "exchange |                111111112222222222      |",
    ]


def test_the_strip_gives_each_span_a_column_and_overlapping_exchanges_a_row():
    [iteration] = timeline(
        [
            Event("iteration", 0, 0, 0.0, 10.0),
            Event("optimizer", 0, 0, 9.999, 10.0),
            Event("buffers", 0, 0, 0.0, 0.001),
            Event("allreduce9", 0, 0, 1.0, 6.0),
            Event("allreduce10", 0, 0, 5.0, 8.0),
        ]
    )
    assert strip(iteration, width=21).plain.splitlines()[1:4] == [
        "compute  |         o|",
        "exchange |v99999    |",
        "         |     000  |",
    ]


@many
@given(random_traces())
def test_any_trace_can_be_shown(trace):
    assert max(map(len, _shown(trace, per_rank=True).splitlines())) <= 80
    json.dumps(document(trace), allow_nan=False)


def test_a_bare_trace_can_be_shown():
    shown = _shown(Trace((Event("iteration", 0, 0, 0.0, 2e-4),)))
    assert _row(shown, "other") == ["200.0", "100.0", "200.0..200.0", "-"]
    assert "Exchanges" not in shown


@pytest.mark.parametrize(
    ("seconds", "name"), [(0.0, "us"), (9e-4, "us"), (1e-3, "ms"), (9.9, "ms"), (10.0, "s")]
)
def test_units_fit_the_largest_time(seconds, name):
    assert unit(seconds)[0] == name
