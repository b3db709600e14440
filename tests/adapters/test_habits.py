"""Habits of users beside the adapters: some cells of the page, which has them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.page import COMMAND, FRAMEWORKS, PAGE, read, render
from tests.adapters.test_loops import pytestmark as needs_frameworks
from tests.adapters.verdicts import habits, verdict
from tests.conformance.page import words_of
from tests.harness.ranks import Ranks

pytestmark = needs_frameworks

IN_SUITE = {
    "Accelerate": (
        "a communication hook by DistributedDataParallelKwargs",
        "uneven rows, even_batches off, join_uneven_inputs",
        "broadcast_buffers off, with batch norm",
        "a checkpoint inside an accumulation window",
        "the state of a plain run loaded",
        "objects of the script in a checkpoint",
        "save_state, load_state and skip_first_batches in mid-epoch",
        "find_executable_batch_size",
        "two models with one optimizer, accumulated, clipped, saved and loaded",
    ),
    "Trainer": (
        "accumulate: the last window is partial",
        "evaluate() before train()",
        "out of memory in a window, then auto_find_batch_size",
        "enable_jit_checkpoint, asked for between two passes of an update",
    ),
    "Lightning": ("BackboneFinetuning",),
    "Fabric": ("mark_forward_method, mixed precision bf16", "a closure given to AdamW.step()"),
}
"""What an adapter does by itself; what a session does is tried in tests/conformance."""


def test_the_page_has_every_habit_and_none_is_wrong() -> None:
    found = read()
    of = habits()
    assert {(f, name) for f in FRAMEWORKS for name in of[f]} == {*found}, f"run {COMMAND}"
    assert [cell for cell, one in found.items() if one.outcome == "wrong"] == []
    assert render(found) == PAGE.read_text()


@pytest.mark.parametrize(
    ("framework", "name"), [(f, name) for f, names in IN_SUITE.items() for name in names]
)
def test_a_cell_is_as_the_page_says(two: Ranks, framework: str, name: str, tmp_path: Path) -> None:
    shown, found = read()[framework, name], verdict(two, framework, name, tmp_path)
    assert (found.outcome, words_of(found.text)) == (shown.outcome, shown.text)
