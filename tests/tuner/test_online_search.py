"""What is searched for while the training runs, the split: when it changes, and what stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from slipstream.calibration import collective_timer
from slipstream.errors import TraceError
from slipstream.planner.forecast import Forecast
from slipstream.strategy import ByIndexConfig
from slipstream.trace import read
from slipstream.tuner import online_search
from slipstream.tuner.turns import SETTLING, TURNS
from tests.harness.ranks import Ranks

STEPS = 2
LAYERS = 6
Cuts = list[tuple[str, ...]]


def train(
    updates: int,
    settings: dict[str, Any],
    proposed: tuple[int, ...] | Exception | None = None,
    seconds: tuple[float, ...] = (2.0, 1.0, 2.0, 1.0),
    state: dict[str, Any] | None = None,
) -> tuple[list[Cuts], list[float], str, dict[str, Any]]:
    """Segments after every update, parameters, report and state.

    ``proposed`` and ``seconds`` (measured in each window) stand in for the planner's answer and the
    clock: on a model this small both would be chance.
    """
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online_search, "CALIBRATION_SECONDS", 0.2)
        if proposed is not None:
            patch.setattr(Forecast, "optimal_split", _answer(proposed))
            windows = iter(seconds)
            patch.setattr(online_search, "iterations", lambda trace: [next(windows)])
        random = torch.get_rng_state()
        session = slipstream.accelerate(model, optimizer, strategy=settings)
        if state is not None:
            session.load_state_dict(state)
        seen: list[Cuts] = []
        for step in range(updates):
            inputs = torch.full((4, 8), float(step + session.rank))
            session.backward(session.model(inputs).square().mean())
            session.step()
            seen.append([segment.gradients for segment in session.segments])
        report, state = session.report(), session.state_dict()
        session.close()
        assert torch.equal(random, torch.get_rng_state())  # dropout goes on as without a search
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return seen, flat.tolist(), report, state


def _answer(proposed: tuple[int, ...] | Exception) -> Any:
    def optimal_split(*_: object) -> ByIndexConfig:
        if isinstance(proposed, Exception):
            raise proposed
        return ByIndexConfig(last=proposed)

    return optimal_split


OPTIMAL = {"gradients": {"split": {"kind": "optimal", "steps": STEPS}}}
FIRST = SETTLING + STEPS  # updates before the first decision
SECOND, THIRD, LAST = (FIRST + FIRST * n for n in range(1, 2 * TURNS))


@pytest.mark.parametrize(("faster", "word"), [(True, "; 2 kept"), (False, "; 1 kept")])
def test_all_ranks_switch_at_one_step_and_keep_the_faster(
    two: Ranks, faster: bool, word: str
) -> None:
    # A machine that slows down meanwhile speaks for neither.
    seconds = (2.0, 1.0, 4.0, 3.0) if faster else (1.0, 2.0, 3.0, 4.0)
    answers = two.run(train, LAST + 2, OPTIMAL, (3, 11), seconds)
    for seen, _, report, state in answers:
        sizes = [[len(names) for names in cuts] for cuts in seen]
        assert sizes[:FIRST] == [[12]] * FIRST
        assert sizes[FIRST:SECOND] == [[4, 8]] * FIRST
        assert sizes[SECOND:THIRD] == [[12]] * FIRST
        assert sizes[THIRD:LAST] == [[4, 8]] * FIRST
        assert sizes[LAST:] == [[4, 8] if faster else [12]] * 2
        assert word in report
        kind = "by_index" if faster else "by_bytes"
        assert state["split"]["kind"] == kind
    first, second = answers
    assert first[0] == second[0]


def test_a_change_of_the_split_changes_no_bit_on_two_ranks(two: Ranks) -> None:
    plain = two.run(train, LAST + 2, {})
    searched = two.run(train, LAST + 2, OPTIMAL, (0, 5, 11))
    assert [a[1] for a in plain] == [a[1] for a in searched]


CODECS = [{"kind": "half"}, *({"kind": k, "start_step": 0} for k in ("onebit", "powersgd"))]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["kind"])
def test_codecs_go_on_when_the_split_changes(two: Ranks, codec: dict[str, object]) -> None:
    config = {"gradients": {**OPTIMAL["gradients"], "codec": codec}}
    answers = two.run(train, LAST + 2, config, (0, 5, 11))
    (seen, parameters, *_), other = answers
    assert [len(names) for names in seen[-1]] == [1, 5, 6]
    assert parameters == other[1]
    assert all(abs(value) < 1e3 for value in parameters)


def test_the_real_planner_answers_on_real_ranks(two: Ranks) -> None:
    answers = two.run(train, LAST + 1, OPTIMAL)
    (seen, _, report, state), other = answers
    assert seen == other[0]
    assert state["split"] is not None
    assert "optimal " in report
    assert "predicted" in report or "optimum" in report


def timed_collectives() -> set[str]:
    """The collectives that are timed on the way to a split."""
    timed, original = set(), collective_timer.COLLECTIVES

    def named(name: str) -> Any:
        def call(*arguments: Any) -> None:
            timed.add(name)
            original[name](*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_timer, "COLLECTIVES", {name: named(name) for name in original})
        train(FIRST, OPTIMAL)
    return timed


def test_only_the_all_reduce_that_the_choice_reads_is_measured(two: Ranks) -> None:
    assert two.run(timed_collectives) == [{"all_reduce"}] * 2


def test_a_trace_that_explains_nothing_leaves_the_default(two: Ranks) -> None:
    error = TraceError("a step is missing")
    for seen, _, report, state in two.run(train, FIRST, OPTIMAL, error):
        assert all(len(cuts) == 1 for cuts in seen)
        assert "the default split stays" in report
        assert state["split"]["kind"] == "by_bytes"


@pytest.fixture(scope="module")
def state(two: Ranks) -> Any:
    """That of a run which has chosen."""
    return two.run(train, LAST, OPTIMAL, (3, 11))[0][3]


def test_a_resumed_run_begins_with_the_chosen_split(two: Ranks, state: Any) -> None:
    answers = two.run(train, 2, OPTIMAL, (5, 11), (1.0, 1.0), state)
    for seen, _, report, again in answers:
        assert [[len(names) for names in cuts] for cuts in seen] == [[4, 8]] * 2
        assert "before the checkpoint" in report
        assert again["split"] == state["split"]


def test_the_trace_that_the_user_asked_for_comes_after_the_choice(
    two: Ranks, tmp_path: Path
) -> None:
    config = {"trace": {"steps": 2, "skip": 0, "folder": str(tmp_path)}}
    two.run(train, LAST + 6, OPTIMAL | config, (3, 11))
    trace = read(tmp_path / "trace.json")
    assert {e.step for e in trace.events} == {LAST + SETTLING + i for i in range(2)}
    assert [len(segment["gradients"]) for segment in trace.meta["segments"]] == [4, 8]
    assert trace.meta["strategy"]["gradients"]["split"] == {"kind": "by_index", "last": [3, 11]}


def test_the_trace_that_the_user_asked_for_comes_after_a_resume_too(
    two: Ranks, state: Any, tmp_path: Path
) -> None:
    config = {"trace": {"steps": 2, "skip": 0, "folder": str(tmp_path)}}
    begin = FIRST + SETTLING  # behind what would have been the window of the search
    two.run(train, begin + 3, OPTIMAL | config, (5, 11), (1.0, 1.0), state)
    trace = read(tmp_path / "trace.json")
    assert {event.step for event in trace.events} == {begin, begin + 1}
    assert [len(segment["gradients"]) for segment in trace.meta["segments"]] == [4, 8]


def test_one_process_has_nothing_to_search() -> None:
    seen, _, report, state = train(2, OPTIMAL)
    assert seen == [[], []]
    assert "one process" in report
    assert state["split"] is None
