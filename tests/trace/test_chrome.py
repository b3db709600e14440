"""The file: round trips, what Perfetto demands, and files that are not a trace."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given

from slipstream.errors import TraceError
from slipstream.trace import Event, Trace, read, write
from tests.harness.traces import by_hand, many, random_traces


def _entries(path) -> list[dict]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]


@many
@given(random_traces(scale=1 / 7))  # 1/7 s is not a whole number of nanoseconds
def test_a_trace_comes_back_to_the_nanosecond(tmp_path, trace):
    write(trace, tmp_path / "t.json")
    back = read(tmp_path / "t.json")
    assert back.meta == trace.meta
    for before, after in zip(trace.events, back.events, strict=True):
        assert (after.name, after.rank, after.step) == (before.name, before.rank, before.step)
        assert after.start == pytest.approx(before.start, rel=0, abs=1e-9)
        assert after.end == pytest.approx(before.end, rel=0, abs=1e-9)
        assert dict(after.args) == pytest.approx(dict(before.args), rel=0, abs=1e-9)


def test_the_loss_and_the_norms_of_a_training_that_diverges_come_back(tmp_path):
    numbers = {"loss": -3e30, "own_norm2": 1e38, "average_norm2": 1e37}
    trace = Trace((Event("iteration", 0, 2, 1.0, 1.5, numbers),))
    write(trace, tmp_path / "t.json")
    assert read(tmp_path / "t.json") == trace


@many
@given(random_traces(scale=1 / 7))
def test_slices_of_one_row_never_overlap(tmp_path, trace):
    write(trace, tmp_path / "t.json")
    rows = defaultdict(list)
    entries = _entries(tmp_path / "t.json")
    for entry in entries:
        if entry["ph"] == "X":
            start = round(entry["ts"] * 1000)
            rows[entry["pid"], entry["tid"]].append((start, start + round(entry["dur"] * 1000)))
    for row in rows.values():
        row.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(row))
    times = [entry["ts"] for entry in entries if entry["ph"] != "M"]
    assert times == sorted(times)
    named = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in entries if e["ph"] != "M"} <= named


def test_rows_and_processes_have_names(tmp_path):
    trace = by_hand()
    overlapping = Event("allreduce3", 1, 2, 1002.05, 1002.08)
    write(Trace((*trace.events, overlapping), trace.meta), tmp_path / "new" / "t.json.gz")
    entries = _entries(tmp_path / "new" / "t.json.gz")
    names = defaultdict(list)
    for entry in entries:
        if entry["name"] in ("process_name", "thread_name"):
            names[entry["pid"]].append(entry["args"]["name"])
    rows = ["iteration", "marks", "data", "compute", "exchange"]
    assert names == {
        0: ["rank 0 @ north", *rows],
        1: ["rank 1 @ south", *rows, "exchange 2"],
    }
    assert {e["name"] for e in entries if e["ph"] == "i"} >= {"fp_start", "allreduce2_end"}


def test_times_of_the_file_are_microseconds(tmp_path):
    trace = Trace(
        (Event("iteration", 0, 4, 2.0, 2.5), Event("allreduce1", 0, 4, 2.1, 2.3, {"ready": 2.05}))
    )
    write(trace, tmp_path / "t.json")
    [exchange] = [e for e in _entries(tmp_path / "t.json") if e["name"] == "allreduce1"]
    assert (exchange["ts"], exchange["dur"]) == (2_100_000.0, 200_000.0)
    assert exchange["args"] == {"step": 4, "ready": 2_050_000.0}


def test_a_compressed_file_is_recognized_by_its_content(tmp_path):
    write(by_hand(), tmp_path / "t.json.gz")
    (tmp_path / "t.json.gz").rename(tmp_path / "renamed.json")
    assert read(tmp_path / "renamed.json").meta == by_hand().meta


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"trace\.yaml: the name must end in \.json"):
        write(by_hand(), tmp_path / "trace.yaml")


def _ours(events) -> bytes:
    content = {"traceEvents": events, "otherData": {"format": "slipstream trace 1"}}
    return json.dumps(content).encode()


def _compressed() -> bytes:
    return gzip.compress(_ours([]) * 100)


BAD = {
    "empty": (b"", "is not JSON"),
    "text": (b"loss 0.3", "not valid JSON, line 1, column 1"),
    "binary": (b"\xff\xfe\x00", "not UTF-8 text: invalid start byte at byte 0"),
    "cut JSON": (_ours([])[:-5], "not valid JSON, line 1, column"),
    "cut gzip": (_compressed()[:-20], "truncated or damaged"),
    "broken gzip": (b"\x1f\x8b" + b"\0" * 40, "truncated or damaged"),
    "a list": (b"[]", "otherData.format is missing"),
    "another program": (b'{"traceEvents": [], "schemaVersion": 1}', "otherData.format is missing"),
    "another format": (
        b'{"traceEvents": [], "otherData": {"format": "slipstream trace 2"}}',
        "otherData.format",
    ),
    "no list": (_ours({"a": 1}), "traceEvents is not a list"),
    "no phase": (_ours([{"name": "x"}]), r"traceEvents\[0\] cannot be read: ph: missing"),
    "no object": (_ours([7]), r"traceEvents\[0\] cannot be read: 7; allowed: an object"),
    "no time": (_ours([{"ph": "X", "name": "x", "args": {"step": 1}}]), "pid: missing"),
    "no step": (_ours([{"ph": "X", "name": "x", "args": {}}]), "pid: missing"),
    "no events": (_ours([]), r"no iteration \(0 other events\)"),
    "no iteration": (
        _ours([{"ph": "X", "name": "x", "pid": 0, "ts": 1, "dur": 1, "args": {"step": 1}}]),
        r"no iteration \(1 other events\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_not_a_trace_is_refused_with_a_reason(tmp_path, case):
    content, reason = BAD[case]
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_path_that_is_not_a_file_is_refused(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(TraceError, match=f"{path} cannot be read"):
            read(path)
