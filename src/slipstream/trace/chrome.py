"""Writes a trace as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing; reads it back.

Format: Google, "Trace Event Format" (the object form).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import TraceError
from slipstream.trace.event import (
    BACKWARD,
    DATA_WAIT,
    FORWARD,
    ITERATION,
    OPTIMIZER,
    STAGE_BACKWARD,
    STAGE_FORWARD,
    STAGE_WEIGHT,
    Event,
    Mark,
    Trace,
    exchange_order,
    marks,
)
from slipstream.trace.intervals import lanes

_FORMAT = "slipstream trace 1"
_ROWS = ("iteration", "marks", "data", "compute", "exchange", "other")
_ROW_OF = {
    ITERATION: "iteration",
    DATA_WAIT: "data",
    FORWARD: "compute",
    BACKWARD: "compute",
    OPTIMIZER: "compute",
    STAGE_FORWARD: "compute",
    STAGE_BACKWARD: "compute",
    STAGE_WEIGHT: "compute",
}
_Row = tuple[int, str, int]  # rank, name, lane
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
    if not path.name.endswith((".json", ".json.gz")):
        raise TraceError(
            f"a trace cannot be written to {path}: the name must end in .json or .json.gz."
        )
    rows = _rows(trace.events)
    tids = _tids(set(rows) | {(event.rank, "marks", 0) for event in trace.events})
    timed = [_slice(event, tids[row]) for event, row in zip(trace.events, rows, strict=True)]
    timed += [_instant(mark, tids[mark.rank, "marks", 0]) for mark in marks(trace.events)]
    content = {
        "traceEvents": [
            *_labels(tids, trace.meta.get("hosts")),
            *sorted(timed, key=lambda entry: float(entry["ts"])),
        ],
        "displayTimeUnit": "ms",
        "otherData": {"format": _FORMAT, **trace.meta},
    }
    data = json.dumps(content, allow_nan=False).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    # mtime=0: equal traces make equal files
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def read(path: str | Path) -> Trace:
    """Read a trace that ``write`` wrote; times come back rounded to nanoseconds.

    Raises:
        TraceError: The file cannot be read, is damaged, comes from another program, or holds no
            iteration.
    """
    content = _load(Path(path))
    other = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(other, dict) or other.get("format") != _FORMAT:
        raise TraceError(
            f"{path} is JSON, but not a trace of slipstream: otherData.format is missing or is not "
            f'"{_FORMAT}". Give a file recorded with trace.steps in the strategy.'
        )
    entries = content.get("traceEvents")
    if not isinstance(entries, list):
        raise TraceError(f"{path} is damaged: traceEvents is not a list. Record the trace again.")
    try:
        events = tuple(_event(entry) for entry in entries if entry["ph"] == "X")
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"{path} is damaged: an event cannot be read ({error!r:.80}). Record the trace again."
        ) from error
    if not any(event.name == ITERATION for event in events):
        raise TraceError(
            f"{path} holds no iteration ({len(events)} other events). Set trace.steps in the "
            "strategy to steps that the training reaches."
        )
    return Trace(events, {key: value for key, value in other.items() if key != "format"})


def _load(path: Path) -> Any:
    """The JSON value in a file, compressed or not."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(
            f"{path} cannot be read: {error.strerror}. Give the path of a trace file."
        ) from error
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        return json.loads(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path} is truncated or damaged: gzip says {error!s:.80}. Copy or record it again."
        ) from error
    except ValueError as error:
        raise TraceError(
            f"{path} is not JSON: {error!s:.80}. Give a .json or .json.gz file of slipstream."
        ) from error


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _rows(events: Iterable[Event]) -> list[_Row]:
    """The row of each event; no two events of a row overlap."""
    rows: dict[int, _Row] = {}
    grouped: dict[tuple[int, str], list[tuple[int, Event]]] = defaultdict(list)
    for index, event in enumerate(events):
        is_exchange = exchange_order(event.name) is not None
        row = "exchange" if is_exchange else _ROW_OF.get(event.name, "other")
        grouped[event.rank, row].append((index, event))
    for (rank, row), members in grouped.items():
        spans = [(_ns(event.start), _ns(event.end)) for _, event in members]
        for (index, _), lane in zip(members, lanes(spans), strict=True):
            rows[index] = (rank, row, lane)
    return [rows[index] for index in sorted(rows)]


def _tids(rows: set[_Row]) -> dict[_Row, int]:
    """Thread numbers from 1 for the rows of each rank, in display order."""
    tids: dict[_Row, int] = {}
    last: dict[int, int] = defaultdict(int)
    for rank, name, lane in sorted(rows, key=lambda row: (row[0], _ROWS.index(row[1]), row[2])):
        last[rank] += 1
        tids[rank, name, lane] = last[rank]
    return tids


def _labels(tids: Mapping[_Row, int], hosts: list[str] | None) -> list[_Json]:
    """Names and order of processes and threads."""
    entries = []
    for rank in sorted({row[0] for row in tids}):
        host = f" @ {hosts[rank]}" if hosts and rank < len(hosts) else ""
        entries.append(_label("process_name", rank, name=f"rank {rank}{host}"))
        entries.append(_label("process_sort_index", rank, sort_index=rank))
    for (rank, name, lane), tid in tids.items():
        entries.append(
            _label("thread_name", rank, tid, name=f"{name} {lane + 1}" if lane else name)
        )
        entries.append(_label("thread_sort_index", rank, tid, sort_index=tid))
    return entries


def _label(kind: str, rank: int, tid: int = 0, **args: Any) -> _Json:
    return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": args}


def _slice(event: Event, tid: int) -> _Json:
    """A span. Rounds its end, not its length, so that adjacent spans still touch."""
    start, end = _ns(event.start), _ns(event.end)
    args = {"step": event.step, **event.args}
    if "ready" in args:
        args["ready"] = _ns(args["ready"]) / 1000
    return {
        "ph": "X",
        "name": event.name,
        "pid": event.rank,
        "tid": tid,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": args,
    }


def _instant(mark: Mark, tid: int) -> _Json:
    return {
        "ph": "i",
        "s": "t",
        "name": mark.name,
        "pid": mark.rank,
        "tid": tid,
        "ts": _ns(mark.time) / 1000,
        "args": {"step": mark.step},
    }


def _event(entry: _Json) -> Event:
    """The inverse of ``_slice``."""
    args = dict(entry["args"])
    step = args.pop("step")
    if "ready" in args:
        args["ready"] /= 1e6
    start, end = entry["ts"] / 1e6, (entry["ts"] + entry["dur"]) / 1e6
    return Event(entry["name"], entry["pid"], step, start, end, args)
