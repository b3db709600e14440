"""Collectives as torch's flight recorder keeps them: read, and compared between ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from slipstream.checks.autopsy import Autopsy, RankCase, RankState
from slipstream.checks.flight_record import KEPT, RecordedCollective, collectives_of, earliest_apart

NOW = 1_795_971_382.0


def entry(number: int, name: str = "all_reduce", **changed: Any) -> dict[str, Any]:
    """An entry, as torch 2.15.0 has written it on gloo."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[2, 4]],
        "is_p2p": False,
        "op_id": number,
        "output_dtypes": ["Float"],
        "output_sizes": [[2, 4]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"gloo:{name}",
        "record_id": number,
        "retired": False,
        "state": "scheduled",
        "time_created_ns": int((NOW - 20) * 1e9) + number,
        "timeout_ms": 1800000,
    } | changed


def record(*entries: dict[str, Any], completed: int = 0) -> dict[str, Any]:
    status = {"last_completed_collective": str(completed), "last_enqueued_collective": "9"}
    return {"entries": [*entries], "pg_status": {"0": status}, "version": "2.10"}


def read(*records: dict[str, Any]) -> tuple[RecordedCollective, ...]:
    return collectives_of(json.dumps(records), NOW)


def test_what_a_rank_has_begun_and_ended():
    named, other = {"process_group": ["7", ""], "pg_id": 7}, {"process_group": ["8", "mesh_tp"]}
    found = read(
        record(
            entry(1),
            entry(2, retired=True),
            entry(3, state="completed"),
            entry(4, "broadcast", input_sizes=[[3], [2, 2]], input_dtypes=["Long", "Long"]),
            entry(9, "send", is_p2p=True),
            completed=1,
        ),
        record(entry(5, "gather"), entry(1, "barrier", input_sizes=[], **named)),
        record(entry(1, "barrier", input_sizes=[], **other), completed=-1),
        {"entries": [], "pg_status": {}, "comm_lib_version": ""},
    )
    assert {(one.group, one.number): (one.what, one.done) for one in found} == {
        ("default_pg", 1): ("all_reduce of 8 float", True),
        ("default_pg", 2): ("all_reduce of 8 float", True),
        ("default_pg", 3): ("all_reduce of 8 float", True),
        ("default_pg", 4): ("broadcast of 7 long in 2 tensors", False),
        ("default_pg", 5): ("gather", False),
        ("group 7", 1): ("barrier", False),
        ("mesh_tp (group 8)", 1): ("barrier", False),
    }
    assert found[0].age == 20.0


def test_the_last_ones_are_kept_and_those_under_way():
    found = read(record(entry(1), *(entry(n, retired=True) for n in range(2, 100))))
    assert [one.number for one in found] == [1, *range(100 - KEPT, 100)]
    assert str(found[0]) == ("1 of default_pg: all_reduce of 8 float, begun 20.0 s ago, under way")


@given(st.recursive(st.none() | st.text() | st.floats() | st.integers(), st.lists, max_leaves=9))
def test_what_is_no_record_has_no_collectives(value: Any):
    assert collectives_of(json.dumps(value), NOW) == ()


@pytest.mark.parametrize("text", ["", "[" * 100_000, '[{"entries": [{}]}]', '[{"entries": 3}]'])
def test_what_is_damaged_has_none(text: str):
    assert collectives_of(text, NOW) == ()


def case(rank: int, *collectives: RecordedCollective, line: str = "train.py:9 in main") -> RankCase:
    state = RankState(
        rank=rank, host="a", pid=rank, step=None, line=line, exchange="backward", still=18.0
    )
    return RankCase(state=state, collectives=collectives)


def test_ranks_that_give_different_ones_are_told_apart_where_stacks_are_alike():
    before, wide, narrow = read(
        record(entry(1, retired=True), entry(2), entry(2, input_sizes=[[7]]))
    )
    cases = {0: case(0, before, wide), 1: case(1, before, narrow), 2: case(2, before, wide)}
    found = Autopsy.of(cases, {}, 3, "it waits")
    assert found.blamed == (1,)
    assert found.verdict == (
        "rank 1 (host a) is in all_reduce of 7 float (waits in train.py:9 in main, for 18 s), "
        "ranks 0 and 2 in all_reduce of 8 float (waits in train.py:9 in main, for 18 s): they will "
        "never meet"
    )


def test_ranks_at_different_ones_are_not_apart():
    """One has its part of the sum already, and goes on."""
    first, second = read(record(entry(1), entry(2, input_sizes=[[7]])))
    over = first.model_copy(update={"done": True})
    assert earliest_apart({0: (over, second), 1: (first,), 2: ()}) == {}


def test_what_is_over_on_all_ranks_is_not_compared():
    first, other = read(record(entry(1, retired=True), entry(1, "barrier", retired=True)))
    assert earliest_apart({0: (first,), 1: (other,)}) == {}
