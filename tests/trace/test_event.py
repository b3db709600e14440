"""Marks, names of exchanges, and that reading a trace needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream.trace.event import Event, allreduce, exchange_order, marks
from tests.harness.traces import by_hand


def test_marks_have_the_names_of_hccl():
    names = [mark.name for mark in marks(by_hand(ranks=1, steps=1).events)]
    assert names == [
        "fp_start",
        "allreduce1_start",
        "allreduce1_end",
        "allreduce2_start",
        "bp_end",
        "allreduce2_end",
        "iteration_end",
    ]


def test_marks_of_an_accumulation_window_span_all_its_passes():
    window = [
        Event("forward", 0, 5, 0.0, 1.0),
        Event("backward", 0, 5, 1.0, 2.0),
        Event("forward", 0, 5, 2.0, 3.0),
        Event("backward", 0, 5, 3.0, 4.0),
        Event("forward", 0, 6, 9.0, 10.0),
        Event("forward", 1, 5, 0.5, 1.0),
    ]
    times = {(m.name, m.rank, m.step): m.time for m in marks(window)}
    assert times == {
        ("fp_start", 0, 5): 0.0,
        ("fp_start", 1, 5): 0.5,
        ("bp_end", 0, 5): 4.0,
        ("fp_start", 0, 6): 9.0,
    }
    assert marks([]) == []


@pytest.mark.parametrize("number", [1, 9, 10, 161])
def test_exchanges_are_recognized_by_name(number):
    assert exchange_order(allreduce(number)) == number


@pytest.mark.parametrize("name", ["allreduce", "allreduce0", "allreduce1x", "Allreduce1", ""])
def test_other_names_are_not_exchanges(name):
    assert exchange_order(name) is None


READERS = ("trace", "trace.timeline", "analysis.summary", "advisor.advise", "report.report")


def test_reading_a_trace_needs_no_torch():
    imports = "; ".join(f"import slipstream.{name}" for name in READERS)
    check = f"{imports}; import slipstream.cli.trace, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", check]).returncode == 0
