"""How a session ends: by close(), without it, or by an exception on one rank or on all."""

from __future__ import annotations

import multiprocessing.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.errors import HangError
from tests.harness.ranks import RankFailure, Ranks
from tests.harness.scripts import Script, torchrun
from tests.session.training import loss_of, opened, update


def raise_on_one_rank(at: str) -> None:
    with opened() as session:
        update(session)
        if at == "forward" and session.rank == 1:
            raise KeyError("bad batch")
        session.backward(loss_of(session))
        if at == "after backward" and session.rank == 1:
            raise KeyError("bad batch")
        session.step()
        update(session)


@pytest.mark.parametrize("at", ["forward", "after backward"])
def test_an_exception_on_one_rank_ends_all(two: Ranks, at: str) -> None:
    with pytest.raises(RankFailure) as failure:
        two.run(raise_on_one_rank, at)
    errors = failure.value.errors
    assert type(errors[1]) is KeyError
    assert type(errors[0]) is HangError
    assert "rank 1 (host" in str(errors[0])
    assert "has ended with KeyError: 'bad batch' after 1 update" in str(errors[0])


def group_after_close() -> tuple[bool, float, bool]:
    own = dist.new_group()
    with opened() as session:
        update(session)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.all_reduce(total, group=own)
    with opened() as again:  # and it serves a second session
        update(again)
    return dist.is_initialized(), float(total), dist.group.WORLD is not None


def test_the_scripts_own_groups_stay_usable(two: Ranks) -> None:
    assert two.run(group_after_close) == [(True, 4.0, True)] * 2


def group_made_by_session() -> list[bool]:
    seen = [dist.is_initialized()]
    with opened() as session:
        seen.append(dist.is_initialized())
        update(session)
    session.close()
    return [*seen, dist.is_initialized()]


def test_a_group_that_the_session_made_ends_with_it(two: Ranks) -> None:
    assert two.run(group_made_by_session, connect=False) == [[False, True, False]] * 2


def first_closes_first(strategy: Any) -> tuple[list[float], bool]:
    first, second = opened(strategy), opened(strategy)
    for session in (first, second):
        update(session)
    first.close()
    update(second)
    second.close()
    sums = [float(p.detach().sum()) for p in second.model.parameters()]
    return sums, dist.is_initialized()


@pytest.mark.parametrize("strategy", [{}, {"gradients": {"transport": "sharded"}}], ids=str)
def test_sessions_of_one_world_close_in_any_order(two: Ranks, strategy: Any) -> None:
    of_the_script = two.run(first_closes_first, strategy)
    own = two.run(first_closes_first, strategy, connect=False)
    assert own == [(sums, False) for sums, _ in of_the_script]


def end_of_a_child() -> tuple[bool, bool]:
    util: Any = multiprocessing.util
    kept = len(util._finalizer_registry)
    opened().close()
    forgotten = len(util._finalizer_registry) == kept
    session = opened()
    update(session)
    util._run_finalizers(0)
    return forgotten, session.closed


def test_a_child_process_leaves_a_session_that_it_has_not_closed(two: Ranks) -> None:
    """One that was forked ends without atexit; others took it for dead half a minute later."""
    assert two.run(end_of_a_child) == [(True, True)] * 2


def closed_in_turn(strategy: Any) -> list[bool]:
    """Two sessions, as a GAN has them; the one that made the world ends before the other."""
    first, second = opened(strategy), opened(strategy)
    update(first)
    update(second)
    first.close()
    seen = [dist.is_initialized()]
    update(second)
    second.checkpoint()
    second.close()
    with opened() as again:
        update(again)
    return [*seen, dist.is_initialized()]


@pytest.mark.parametrize("transport", ["direct", "sharded"])
def test_a_group_of_two_sessions_ends_with_the_last(two: Ranks, transport: str) -> None:
    strategy = {"gradients": {"transport": transport}}
    assert two.run(closed_in_turn, strategy, connect=False) == [[True, False]] * 2


SCRIPT = """
import sys, torch, slipstream
embedding = torch.nn.Embedding(9, 4, sparse=True)
model = torch.nn.Sequential(embedding, torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = slipstream.accelerate(model, optimizer, [torch.arange(6)] * 3)
for batch in session.loader:
    session.backward(session.model(batch).square().mean())
    session.step()
"""
CAUGHT = """
try:
    session.step()
except slipstream.SlipstreamError as error:
    kept = error
"""
ENDINGS: dict[str, tuple[str, int, tuple[str, str]]] = {
    "close is forgotten": ("", 0, ("", "")),
    "close is forgotten, a cycle": (
        "kept = [session]; kept.append(kept); del session",
        0,
        ("", ""),
    ),
    "a backward too many": ("session.backward(session.model(batch).mean())", 0, ("", "")),
    "a mistake that is caught": (CAUGHT, 0, ("", "")),
    "a mistake": ("session.step()", 1, ("UsageError: step() without",) * 2),
    "one rank fails": (
        "if session.rank: raise KeyError('bad batch')\n"
        "session.backward(session.model(batch).mean())",
        1,
        ("ExchangeError", "KeyError: 'bad batch'"),
    ),
}


@pytest.mark.parametrize(("ending", "code", "words"), ENDINGS.values(), ids=ENDINGS)
def test_a_script_ends_with_its_own_exit_code(
    tmp_path: Path, ending: str, code: int, words: tuple[str, str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{SCRIPT}{ending}\n")
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [Script(path, log=log, env=env) for log, env in zip(logs, torchrun(2), strict=True)]
    returned = [script.wait(60) for script in ranks]
    outcomes = [log.read_text() for log in logs]
    assert returned == [code, code], outcomes
    for text, expected in zip(outcomes, words, strict=True):
        assert expected in text
        assert expected or "Traceback" not in text, text
