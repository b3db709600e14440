"""Writes a trace as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing; reads it back.

Format: Google, "Trace Event Format" (the object form).
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from slipstream.errors import TraceError
from slipstream.files import document
from slipstream.files.document import MIB, Unreadable
from slipstream.files.write import write_whole
from slipstream.trace.checks import mistake, wrong_description
from slipstream.trace.event import (
    BACKWARD,
    DATA_WAIT,
    FORWARD,
    ITERATION,
    MEETING_WAIT,
    OPTIMIZER,
    STAGE_SPANS,
    Event,
    Trace,
    exchange_order,
    is_meeting,
    marks,
)
from slipstream.trace.intervals import lanes

LONGEST = 512 * MIB
"""Bytes of a trace file, packed and unpacked."""
_FORMAT = "slipstream trace 1"
_ROWS = ("iteration", "marks", "data", "compute", "exchange", "other")
_COMPUTE = (FORWARD, BACKWARD, OPTIMIZER, MEETING_WAIT, *STAGE_SPANS)
_ROW_OF = {ITERATION: "iteration", DATA_WAIT: "data"} | dict.fromkeys(_COMPUTE, "compute")
_Row = tuple[int, int, int]  # rank, index of the name, lane
_Json = dict[str, Any]


def write(trace: Trace, path: str | Path) -> None:
    """Write ``path`` (``.json`` or ``.json.gz``), and create the folders above it.

    Each rank is a process. Its threads are the rows iteration, marks, data, compute and exchange.
    Spans that overlap get further rows, since slices of one thread must nest. Times are
    microseconds, rounded to nanoseconds.

    Raises:
        TraceError: The path has another ending.

    Example:
        >>> import tempfile
        >>> trace = Trace((Event("iteration", 0, 2, 1.0, 1.5, {"bytes": 8}),), {"world_size": 1})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(trace, f"{folder}/trace.json.gz")
        ...     read(f"{folder}/trace.json.gz") == trace
        True
    """
    path = Path(path)
    check_name(path)
    rows = _rows(trace.events)
    points = [(mark, (mark.rank, _ROWS.index("marks"), 0)) for mark in marks(trace.events)]
    tids = _tids({*rows, *(row for _, row in points)})
    timed = [_slice(event, tids[row]) for event, row in zip(trace.events, rows, strict=True)]
    for mark, row in points:
        args, at = {"step": mark.step}, _ns(mark.time) / 1000
        timed.append(_entry("i", mark.name, mark.rank, tids[row], s="t", ts=at, args=args))
    labels = _labels(tids, trace.meta.get("hosts") or [])
    content = {
        "traceEvents": [*labels, *sorted(timed, key=lambda entry: float(entry["ts"]))],
        "displayTimeUnit": "ms",
        "otherData": {"format": _FORMAT, **trace.meta},
    }
    data = json.dumps(content, allow_nan=False).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    # mtime=0: equal traces make equal files
    write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def leave(trace: Trace, path: Path) -> None:
    """Write a trace beside the training that it is of, which goes on if that fails; say which."""
    try:
        write(trace, path)
        said = f"trace written to {path}"
    except OSError as error:
        said = f"the trace cannot be written to {path}: {error.strerror}; set trace.folder"
    print(f"slipstream: {said}", file=sys.stderr)


def read(path: str | Path) -> Trace:
    """Read a trace that ``write`` wrote; times come back rounded to nanoseconds.

    Raises:
        TraceError: The file cannot be read, is damaged, comes from another program, or holds no
            iteration.
    """
    content = load_json(path, "a .json or .json.gz file of slipstream")
    other = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(other, dict) or other.get("format") != _FORMAT:
        raise TraceError(
            f"{path} is JSON, but not a trace of slipstream: otherData.format is missing or is not "
            f'"{_FORMAT}". Give a file recorded with trace.steps in the strategy.'
        )
    entries = content.get("traceEvents")
    if not isinstance(entries, list):
        raise TraceError(f"{path} is damaged: traceEvents is not a list. Record the trace again.")
    for number, entry in enumerate(entries):
        if (problem := mistake(entry)) is not None:
            raise TraceError(
                f"{path} is damaged: traceEvents[{number}] cannot be read: {problem}. Record the "
                "trace again."
            )
    if (problem := wrong_description(other)) is not None:
        raise TraceError(f"{path} is damaged: otherData.{problem}. Record the trace again.")
    events = tuple(_event(entry) for entry in entries if entry["ph"] == "X")
    if not any(event.name == ITERATION for event in events):
        raise TraceError(
            f"{path} holds no iteration ({len(events)} other events). Set trace.steps in the "
            "strategy to steps that the training reaches."
        )
    return Trace(events, {key: value for key, value in other.items() if key != "format"})


def load_json(path: str | Path, what: str) -> Any:
    """The JSON value in a file, compressed or not; errors say to give ``what``.

    Raises:
        TraceError: The file cannot be read, is longer than LONGEST, or is damaged or not JSON.
    """
    try:
        data = document.unpacked(document.read_bytes(path, LONGEST), LONGEST)
        if (found := document.parse_json(document.decoded(data))) is not None:
            return found
        problem = "is not JSON: it is empty"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except Unreadable as error:
        problem = f"cannot be read: {error}"
        if Path(path).suffix in (".yaml", ".yml"):  # a strategy, or a description of a cluster
            problem = "is YAML"
    raise TraceError(f"{path} {problem}. Give {what}.")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _rows(events: Iterable[Event]) -> list[_Row]:
    """The row of each event; no two events of a row overlap."""
    rows: dict[int, _Row] = {}
    grouped: dict[tuple[int, str], list[tuple[int, Event]]] = defaultdict(list)
    for index, event in enumerate(events):
        is_exchange = exchange_order(event.name) is not None or is_meeting(event.name)
        row = "exchange" if is_exchange else _ROW_OF.get(event.name, "other")
        grouped[event.rank, row].append((index, event))
    for (rank, row), members in grouped.items():
        spans = [(_ns(event.start), _ns(event.end)) for _, event in members]
        for (index, _), lane in zip(members, lanes(spans), strict=True):
            rows[index] = (rank, _ROWS.index(row), lane)
    return [rows[index] for index in range(len(rows))]


def _tids(rows: Iterable[_Row]) -> dict[_Row, int]:
    """Thread numbers from 1 for the rows of each rank, in display order."""
    by_rank = groupby(sorted(rows), key=itemgetter(0))
    return {row: tid for _, of_rank in by_rank for tid, row in enumerate(of_rank, 1)}


def _labels(tids: Mapping[_Row, int], hosts: list[str]) -> list[_Json]:
    """Names and order of processes and threads."""
    labels: list[tuple[str, int, int, _Json]] = []
    for rank in sorted({rank for rank, _, _ in tids}):
        host = f" @ {hosts[rank]}" if rank < len(hosts) else ""
        labels.append(("process_name", rank, 0, {"name": f"rank {rank}{host}"}))
        labels.append(("process_sort_index", rank, 0, {"sort_index": rank}))
    for (rank, name, lane), tid in tids.items():
        title = f"{_ROWS[name]} {lane + 1}" if lane else _ROWS[name]
        labels.append(("thread_name", rank, tid, {"name": title}))
        labels.append(("thread_sort_index", rank, tid, {"sort_index": tid}))
    return [_entry("M", kind, rank, tid, args=args) for kind, rank, tid, args in labels]


def _slice(event: Event, tid: int) -> _Json:
    """A span. Rounds its end, not its length, so that adjacent spans still touch."""
    start, end = _ns(event.start), _ns(event.end)
    args = {"step": event.step, **event.args}
    if "ready" in args:
        args["ready"] = _ns(args["ready"]) / 1000
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return _entry("X", event.name, event.rank, tid, **times, args=args)


def check_name(path: Path) -> None:
    """Refuse a name that is no trace's.

    Raises:
        TraceError: says how it must end.
    """
    if not path.name.endswith((".json", ".json.gz")):
        raise TraceError(
            f"a trace cannot be written to {path}: the name must end in .json or .json.gz."
        )


def _entry(kind: str, name: str, rank: int, tid: int, **more: Any) -> _Json:
    return {"ph": kind, "name": name, "pid": rank, "tid": tid, **more}


def _event(entry: _Json) -> Event:
    """The inverse of ``_slice``."""
    args = dict(entry["args"])
    step = args.pop("step")
    if "ready" in args:
        args["ready"] /= 1e6
    start, end = entry["ts"] / 1e6, (entry["ts"] + entry["dur"]) / 1e6
    return Event(entry["name"], entry["pid"], step, start, end, args)
