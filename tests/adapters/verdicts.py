"""What becomes of a habit beside an adapter: equal bit for bit, or refused with which error."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import re
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slipstream.errors import SlipstreamError
from tests.adapters.habits.habit import HABITS, Given
from tests.harness.ranks import RankFailure, Ranks

MODULES = (
    *("accelerate_loop", "accelerate_models", "accelerate_loaders", "accelerate_state"),
    *("trainer_settings", "trainer_around", "lightning", "fabric"),
)
OF_OTHERS = re.compile("has no attribute '(module|no_sync)'|requires you to call `fabric.backward")
"""Errors of Python where a script uses DDP's wrapper, which is not there, and of Fabric."""


class Verdict(NamedTuple):
    """What became of a habit.

    Attributes:
        outcome: equal, refused, wrong, or fails: with the framework alone, too.
        text: of the error, or what is wrong.
    """

    outcome: str
    text: str = ""


class _End(NamedTuple):
    """How a habit ended on a rank."""

    noted: list[Any]
    error: str = ""
    ours: bool = False


def habits() -> dict[str, dict[str, Any]]:
    """Habits by framework and name."""
    for module in MODULES:
        importlib.import_module(f"tests.adapters.habits.{module}")
    return HABITS


def verdicts_of(
    frameworks: str, names: str, folder: Path, strategy: dict[str, Any] | None = None
) -> Iterator[tuple[str, str, Verdict]]:
    """Run habits whose framework and name have one of these parts."""
    with Ranks(2) as two:
        for framework, own in habits().items():
            for number, name in enumerate(own):
                if _has(framework, frameworks) and _has(name, names):
                    where = folder / str(number)
                    yield framework, name, verdict(two, framework, name, where, strategy)


def _has(name: str, parts: str) -> bool:
    return any(part in name for part in parts.split(","))


def verdict(
    two: Ranks, framework: str, name: str, folder: Path, strategy: dict[str, Any] | None = None
) -> Verdict:
    """Run a habit by the framework alone, and by the adapter."""
    theirs = _ends(two, framework, name, None, folder / f"{framework}-plain")
    ours = _ends(two, framework, name, strategy or {}, folder / f"{framework}-ours")
    errors = _errors(ours)
    if any(end.error for end in theirs):
        own = _errors(theirs)[0]
        if not errors:
            return Verdict("fails", f"with the framework alone: {own}")
        return Verdict("fails", f"with the framework alone: {own}; here: {errors[0]}")
    if errors:
        if all(end.ours or OF_OTHERS.search(end.error) for end in ours):
            return Verdict("refused", errors[0])
        return Verdict("wrong", " | ".join(end.error or "goes on" for end in ours))
    apart = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        if len(mine.noted) != len(other.noted):
            return Verdict("wrong", f"{len(mine.noted)} values noted, {len(other.noted)} alone")
        for a, b in zip(mine.noted, other.noted, strict=True):
            if a.shape != b.shape:
                return Verdict("wrong", f"shapes {a.shape} and {b.shape}")
            apart = max(apart, float(abs(a.astype(float) - b.astype(float)).max(initial=0)))
            if not (a == b).all():
                apart = max(apart, 1e-300)
    return Verdict("equal") if apart == 0 else Verdict("wrong", f"apart by {apart:.2e}")


def _errors(ends: list[_End]) -> list[str]:
    """Errors of ranks, those last that only follow from another's."""
    return sorted(
        (e.error for e in ends if e.error),
        key=lambda error: "another rank" in error or "closed by peer" in error,
    )


def _ends(two: Ranks, framework: str, name: str, strategy: Any, folder: Path) -> list[_End]:
    folder.mkdir(parents=True)
    try:
        return two.run(_run, framework, name, strategy, folder)
    except RankFailure as failure:
        return [_End([], f"hangs or dies: {e!r}"[:300]) for e in failure.errors.values()] * 2


def _run(framework: str, name: str, strategy: Any, folder: Path) -> _End:
    given = Given(strategy, folder)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            noted = habits()[framework][name](given)
        return _End([t.detach().float().numpy().copy() for t in noted])
    except Exception as error:
        places = traceback.extract_tb(error.__traceback__)[-1]
        where = f"({places.filename.rpartition('/')[2]}:{places.lineno})"
        ours = isinstance(error, SlipstreamError)
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return _End([], text if ours else f"{text} {where}", ours)
    finally:
        for close in given.close:
            close()
        gc.collect()
