"""The matrix: every technique under every habit is equal to plain torch, or refused in time."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from tests.conformance.cell import Verdict
from tests.conformance.habit import Habit, all_habits
from tests.conformance.models import Mlp
from tests.conformance.page import COMMAND, PAGE, read, render
from tests.conformance.required import missing, required
from tests.conformance.rows import joined, run_matrix, run_row
from tests.conformance.sides import UnderDdp
from tests.conformance.techniques import TECHNIQUES
from tests.harness.ranks import Ranks

pytestmark = pytest.mark.timeout(900)

NAMES = [technique.name for technique in TECHNIQUES]
IN_SUITE = (
    *("hierarchical", "sharded", "int8 feedback", "accumulate", "half_weights sharded"),
    *("fuse_optimizer adamw", "balance", "pipeline parallel", "local", "DdpCodec onebit"),
)
"""Rows that the suite runs: one of each kind, each under every other habit, so that a habit meets
five kinds. All of them take ten minutes; they are run by the command that makes the page."""


def habits_of(name: str) -> tuple[Habit, ...]:
    """The columns of a row in the suite: a row takes those that the one before leaves out."""
    return all_habits()[IN_SUITE.index(name) % 2 :: 2]


def test_every_setting_kernel_and_hook_has_a_row() -> None:
    assert missing(TECHNIQUES) == []


def test_what_has_no_row_is_named() -> None:
    """As a new technique would be."""
    without = tuple(
        t
        for t in TECHNIQUES
        if not t.name.startswith(("hierarchical", "local island", "kernel sim_ota"))
    )
    assert missing(without) == ["gradients.transport=hierarchical", "kernels.sim_ota"]
    assert len(required()) > 50


def test_names_are_there_once() -> None:
    habits = [habit.name for habit in all_habits()]
    assert len(set(NAMES)) == len(NAMES)
    assert len(set(habits)) == len(habits)


def test_every_habit_is_tried_beside_five_techniques() -> None:
    tried = Counter(habit.name for name in IN_SUITE for habit in habits_of(name))
    assert tried == {habit.name: 5 for habit in all_habits()}


@pytest.mark.parametrize("name", IN_SUITE)
def test_no_cell_is_wrong_or_empty(two: Ranks, name: str) -> None:
    technique = next(technique for technique in TECHNIQUES if technique.name == name)
    row = run_row(two, technique, habits_of(name))
    assert [*row] == [habit.name for habit in habits_of(name)]
    assert {habit: v.text for habit, v in row.items() if v.outcome == "wrong"} == {}


def test_the_page_has_every_technique() -> None:
    page = PAGE.read_text()
    assert [name for name in NAMES if name not in page] == [], f"run {COMMAND}"
    assert [habit.name for habit in all_habits() if habit.name not in page] == []


def test_rows_of_the_page_are_read_as_they_were_written() -> None:
    habits = all_habits()
    assert render(read(habits), habits) == PAGE.read_text()


EQUAL = Verdict("equal", digest="a")
REFUSED = Verdict("refused", "UsageError: a reason")
FOLLOWS = Verdict("refused", "ExchangeError: another rank is gone", follows=True)
WRONG = Verdict("wrong", "head.weight is off by 0.1")


@pytest.mark.parametrize(
    ("verdicts", "outcome", "text"),
    [
        ([EQUAL, EQUAL], "equal", ""),
        ([EQUAL, EQUAL._replace(digest="b")], "wrong", "the ranks' models differ"),
        ([REFUSED, REFUSED], "refused", "UsageError: a reason"),
        ([FOLLOWS, REFUSED], "refused", "UsageError: a reason"),
        ([FOLLOWS, FOLLOWS], "wrong", "no rank says why"),
        ([EQUAL, REFUSED], "wrong", "one rank refuses, the other goes on"),
        ([REFUSED, WRONG], "wrong", "head.weight is off by 0.1"),
    ],
    ids=["equal", "differ", "refused", "one follows", "nobody says why", "one goes on", "wrong"],
)
def test_what_becomes_of_a_cell_on_all_ranks(
    verdicts: list[Verdict], outcome: str, text: str
) -> None:
    found = joined(verdicts)
    assert (found.outcome, found.text[: len(text)]) == (outcome, text)


class DecaysOnOneRank(SGD):
    """By no setting of its own: others than on the other ranks would be refused."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if os.environ.get("RANK") == "1":
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.975)
        return super().step(closure)


def decaying_on_one_rank(model: nn.Module) -> Optimizer:
    return DecaysOnOneRank(model.parameters(), lr=0.05)


def other_body(*, fast: bool) -> nn.Module:
    return Mlp(3 if fast else 2)


def fails(*, fast: bool) -> nn.Module:
    if fast:
        raise KeyError("a bug")
    return Mlp()


class PlainDdp(UnderDdp):
    """Its `applies` are those of a session, so that all habits run."""


FLAT = next(technique for technique in TECHNIQUES if technique.name == "flat")
FAULTY = {
    "the same": (FLAT, "equal", ""),
    "rank by rank": (replace(FLAT, optimizer=decaying_on_one_rank), "wrong", "off by"),
    "another model": (replace(FLAT, body=partial(other_body)), "wrong", "other names"),
    "a bug": (replace(FLAT, body=partial(fails)), "wrong", "KeyError: 'a bug'"),
}


def test_what_is_left_out_for_ddp_is_wrong_without_a_hook() -> None:
    """So it says nothing of the hook."""
    habits = [habit for habit in all_habits() if "not DDP" in habit.needs and not habit.apart]
    plain_ddp = replace(FLAT, name="DDP", loop=PlainDdp)
    row = run_matrix([plain_ddp], habits)["DDP"]
    assert [*row] == [habit.name for habit in habits]
    assert {name for name, verdict in row.items() if verdict.outcome != "wrong"} == set()


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_found(two: Ranks, name: str) -> None:
    technique, outcome, text = FAULTY[name]
    (verdict,) = run_row(two, technique, all_habits()[:1]).values()
    assert verdict.outcome == outcome
    assert text in verdict.text
