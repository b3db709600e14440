"""The verdict: whom the others wait for, from what each rank says of itself."""

from __future__ import annotations

import os

import pytest

from slipstream.checks.autopsy import Autopsy, RankCase, RankState, by_stack, ranks_named
from slipstream.errors import TraceError
from tests.cli.running import run


def case(rank: int, **said: object) -> RankCase:
    """A rank that waits for the third segment of update 12, unless it says otherwise."""
    waiting = {
        "step": 11,
        "line": "train.py:40 in main",
        "verb": "backward",
        "exchange": "segment 3 of 4",
        "names": ("conv1.weight",),
        "still": 20.0,
    }
    state = RankState(rank=rank, host=f"host{rank}", pid=1, **{**waiting, **said})
    return RankCase(state=state)


ELSEWHERE = {"verb": "", "exchange": "", "names": (), "still": 21.0, "line": "train.py:30 in data"}


def found(*cases: RankCase, silent: tuple[RankState, ...] = (), size: int = 4) -> Autopsy:
    by_rank = {one.state.rank: one for one in cases}
    return Autopsy.of(by_rank, {one.rank: one for one in silent}, size, "a test")


def test_a_rank_that_waits_for_something_else_is_to_blame():
    autopsy = found(case(0), case(1), case(2, **ELSEWHERE, loading=True), case(3))
    assert autopsy.blamed == (2,)
    assert autopsy.verdict == (
        "rank 2 (host host2) never entered segment 3 of 4 (conv1.weight) of update 12: it waits "
        "for data in train.py:30 in data, for 21 s; if its data is not late, it has left out a "
        "batch that others trained on: leave a batch out on all ranks or on none"
    )


def test_a_silent_rank_comes_first():
    stopped = case(1).state
    seen = case(0).model_copy(update={"neighbours": {1: "its process is stopped"}})
    autopsy = found(seen, case(2, **ELSEWHERE), case(3), silent=(stopped,))
    assert autopsy.blamed == (1,)
    assert "rank 1 (host host1) is silent: its process is stopped; it was last" in autopsy.verdict
    assert "after update 11, in train.py:40" in autopsy.verdict
    assert "ranks 0 and 3 wait in segment 3 of 4 (conv1.weight) of update 12" in autopsy.verdict
    assert autopsy.cases[1].state == stopped


def test_a_silent_rank_without_a_neighbour():
    assert "its host down, or its link cut" in found(case(0), silent=(case(1).state,)).verdict
    never = Autopsy.of({0: case(0)}, {1: None}, 2, "a test")
    assert never.verdict.startswith("rank 1 is silent: its process is stopped or gone")


def test_a_rank_that_has_left_is_to_blame():
    left = case(3, exchange="", ended="ended with ValueError: bad sample 17", step=9)
    autopsy = found(case(0), case(1), case(2), left)
    assert autopsy.blamed == (3,)
    assert autopsy.verdict.startswith(
        "rank 3 (host host3) has ended with ValueError: bad sample 17 after 9 updates; ranks 0, 1 "
        "and 2 wait in segment 3"
    )


@pytest.mark.parametrize(
    "other",
    [
        {"exchange": "", "ended": "left its loop"},
        {"exchange": "an exchange", "names": (), "verb": "checkpoint"},
    ],
    ids=["it has left", "it saves"],
)
def test_a_rank_that_made_fewer_passes_is_told_how_to_make_as_many(other):
    autopsy = found(case(0), case(1, **other), size=2)
    assert "must call backward() as often: leave a batch out on all ranks" in autopsy.verdict


@pytest.mark.parametrize(
    "other",
    [{"exchange": "segment 2 of 4"}, {"exchange": "an exchange", "names": (), "verb": ""}],
    ids=["another segment", "an exchange of the script"],
)
def test_of_ranks_in_different_exchanges_the_fewest_are_to_blame(other):
    autopsy = found(case(0), case(1, **other), case(2), case(3))
    assert autopsy.blamed == (1,)
    assert f"rank 1 (host host1) is in {other['exchange']}" in autopsy.verdict
    assert "ranks 0, 2 and 3 in segment 3 of 4" in autopsy.verdict


def test_where_no_exchange_is_that_of_most_all_are_told():
    others = [case(1, exchange="segment 2 of 4"), case(2, exchange="the broadcast", names=())]
    autopsy = found(case(0), *others)
    assert autopsy.blamed == (0, 1, 2)
    assert autopsy.verdict.startswith("rank 0 (host host0) is in segment 3 of 4")
    assert ", rank 1 in segment 2 of 4" in autopsy.verdict
    assert ", rank 2 in the broadcast" in autopsy.verdict
    assert autopsy.verdict.endswith(": they will never meet")


def test_where_all_are_in_one_exchange_it_is_the_network():
    cut = case(2).model_copy(update={"unsent": ["10.0.0.3"]})
    autopsy = found(case(0), case(1), cut, case(3))
    assert autopsy.blamed == ()
    assert "nothing arrives: the network between them is cut" in autopsy.verdict
    assert "what is sent to 10.0.0.3 is not confirmed" in autopsy.verdict


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([2], "rank 2"),
        ([2, 5], "ranks 2 and 5"),
        ([1, 2, 3], "ranks 1, 2 and 3"),
        ([*range(9)], "ranks 0, 1, 2, 3 and 5 more"),
    ],
)
def test_ranks_are_named(ranks, words):
    assert ranks_named(ranks) == words


def test_ranks_are_grouped_by_stack_the_fewest_first():
    at = {rank: {"MainThread": ["a:1", "b:2" if rank == 1 else "c:3"]} for rank in range(3)}
    cases = [case(rank).model_copy(update={"stacks": stacks}) for rank, stacks in at.items()]
    assert by_stack(cases) == [([1], ["a:1", "b:2"]), ([0, 2], ["a:1", "c:3"])]


# The files.


def test_it_is_read_back_and_shown(tmp_path):
    stuck = case(2, **ELSEWHERE).model_copy(
        update={"stacks": {"MainThread": ["train.py:30 in data: sleep()"]}}
    )
    autopsy = found(case(0), stuck)
    (tmp_path / "autopsy.json").write_text(autopsy.model_dump_json())
    assert Autopsy.read(tmp_path) == Autopsy.read(tmp_path / "autopsy.json") == autopsy
    shown = run("autopsy", tmp_path)
    assert shown.startswith("rank 2 (host host2) never entered")
    assert "2 *" in shown
    assert "train.py:30 in data: sleep()" in shown
    assert '"blamed"' in run("autopsy", tmp_path, "--json")


def test_a_killed_run_has_what_its_ranks_have_left(tmp_path):
    for one in (case(0), case(1, **ELSEWHERE)):
        (tmp_path / f"rank{one.state.rank}.json").write_text(one.model_dump_json())
    autopsy = Autopsy.read(tmp_path)
    assert autopsy.blamed == (1,)
    assert autopsy.reason == "the run was ended from outside"


def test_what_a_later_run_has_left_counts_more_than_an_earlier_autopsy(tmp_path):
    earlier = found(case(0), case(2, **ELSEWHERE))
    whole = tmp_path / "autopsy.json"
    whole.write_text(earlier.model_dump_json())
    for one in (case(0), case(1, **ELSEWHERE)):
        (tmp_path / f"rank{one.state.rank}.json").write_text(one.model_dump_json())
    assert Autopsy.read(tmp_path) == earlier  # ranks go on noting for a while
    os.utime(whole, (0, 0))
    assert Autopsy.read(tmp_path).blamed == (1,)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"version": 1}', "\x00\xff"])
def test_what_is_no_autopsy_is_refused_with_its_place(tmp_path, text):
    if text is not None:
        (tmp_path / "autopsy.json").write_text(text)
    with pytest.raises(TraceError, match=str(tmp_path)) as refused:
        Autopsy.read(tmp_path)
    assert "the folder that the error named" in str(refused.value)
    assert "validation error" not in str(refused.value)
