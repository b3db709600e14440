"""Collectives of a process as torch's flight recorder has them: since 2.15 of gloo, too."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from slipstream.strategy.setting import FrozenModel

KEPT = 16
"""Collectives of a process that are kept, the last ones; more where more are under way."""
MOST = 64
"""Of those under way, beside the last ones."""
LARGEST = 16 * 2**20
"""Bytes of a record: that of 2,000 collectives has one or two million."""

_ALIKE = re.compile(r"_?(all_?reduce|reduce|broadcast|reduce_scatter|all_?gather)(_(base|single))?")
"""Collectives to which each rank gives as many elements: uneven all-gathers have other names."""


class RecordedCollective(FrozenModel):
    """A collective that a rank has begun."""

    group: str
    number: int
    """In its group, the same on all ranks."""
    what: str
    """``all_reduce of 28 float``: each rank has to give the same."""
    age: float
    """Seconds since it began."""
    done: bool

    def __str__(self) -> str:
        end = "ended" if self.done else "under way"
        return f"{self.number} of {self.group}: {self.what}, begun {self.age:.1f} s ago, {end}"


class _Entry(BaseModel):
    collective_seq_id: int
    is_p2p: bool = False
    profiling_name: str
    process_group: tuple[str, str]
    pg_id: int
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    retired: bool = False
    state: str = ""
    time_created_ns: int

    @property
    def what(self) -> str:
        name = self.profiling_name.rpartition(":")[2]
        if not self.input_sizes or not self.input_dtypes or not _ALIKE.fullmatch(name):
            return name
        tensors = f" in {len(self.input_sizes)} tensors" if len(self.input_sizes) > 1 else ""
        total = sum(map(math.prod, self.input_sizes))
        return f"{name} of {total} {self.input_dtypes[0].lower()}{tensors}"


class _Progress(BaseModel):
    last_completed_collective: int = -1


class _Record(BaseModel):
    entries: list[_Entry] = []
    pg_status: dict[str, _Progress] = {}


def collectives_of(text: str, now: float) -> tuple[RecordedCollective, ...]:
    """Read the last collectives from the records of a process, a JSON list; of others none.

    Args:
        text: of ``_dump_fr_trace_json``, that of each backend.
        now: seconds since the epoch.
    """
    try:
        records = [_Record.model_validate(record) for record in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        return ()
    found = [
        _read(entry, record, now)
        for record in records
        for entry in record.entries
        if not entry.is_p2p
    ]
    found.sort(key=lambda one: -one.age)
    open_ = [one for one in found if not one.done]
    last = found[-KEPT:]
    return (*(one for one in open_[:MOST] if one not in last), *last)


def _read(entry: _Entry, record: _Record, now: float) -> RecordedCollective:
    progress = record.pg_status.get(str(entry.pg_id), _Progress())
    over = entry.collective_seq_id <= progress.last_completed_collective
    name, described = entry.process_group
    group = f"group {name}" if described in ("", "undefined") else f"{described} (group {name})"
    return RecordedCollective(
        # several may have one description, as those of a mesh
        group=described if described == "default_pg" else group,
        number=entry.collective_seq_id,
        what=entry.what,
        age=round(max(now - entry.time_created_ns / 1e9, 0.0), 1),
        done=entry.retired or over or entry.state == "completed",
    )


def earliest_apart(of_rank: Mapping[int, Sequence[RecordedCollective]]) -> dict[str, list[int]]:
    """Group ranks by what they give to the earliest collective that is not over for all of them
    and to which they do not give the same; empty: there is none."""
    given: dict[tuple[str, int], dict[int, RecordedCollective]] = {}
    for rank, collectives in sorted(of_rank.items()):
        for one in collectives:
            given.setdefault((one.group, one.number), {})[rank] = one
    waited = [ranks for ranks in given.values() if not all(one.done for one in ranks.values())]
    for ranks in sorted(waited, key=lambda ranks: -max(one.age for one in ranks.values())):
        groups: dict[str, list[int]] = {}
        for rank, one in ranks.items():
            groups.setdefault(one.what, []).append(rank)
        if len(groups) > 1:
            return groups
    return {}
