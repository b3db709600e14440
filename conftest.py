"""Tests leave no variable, thread or process group behind, and are marked by what they start."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

from tests.harness import marks

# Programs: importing them runs them, and they have no doctests.
collect_ignore = ["src/slipstream/__main__.py", "src/slipstream/cluster/_rank.py"]
collect_ignore_glob = ["src/slipstream/testbed/_*.py"]

_NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KMP_")
"""Set by pytest, and by torch where it is imported or compiles."""

# Before torch is imported, as the conftest.py of a folder that pytest is called with does. Threads
# that wait for work spin: two a process, with several workers and their ranks on two cores, took
# most of the time of the suite.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure() -> None:
    # A shell's background jobs ignore Ctrl-C, and so would all that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A busy machine draws examples slowly; that says nothing of the code.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
    marks.watch()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    variables, threads = _variables(), set(threading.enumerate())
    yield
    left = []
    if changed := dict(_variables().items() ^ variables.items()):
        left.append(f"environment variables {sorted(changed)}")
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update(variables)
    if new := [t.name for t in set(threading.enumerate()) - threads if not t.daemon]:
        left.append(f"threads {sorted(new)}")
    distributed = sys.modules.get("torch.distributed")  # a test without torch stays without
    if distributed is not None and distributed.is_initialized():
        left.append("a process group")
        distributed.destroy_process_group()
    if left:
        pytest.fail(f"the test leaves behind {', '.join(left)}")
    kinds = marks.started()
    if kinds and not any(map(request.node.get_closest_marker, marks.MARKS)):
        kind = min(kinds)
        pytest.fail(f"`make quick` would run it, and it starts: {kind}; add @pytest.mark.{kind}")


def pytest_collectstart() -> None:
    gc.disable()  # until the collection ends: what it imports and makes stays


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[Any], list[Any]]:
    """Leave out the search for docstrings with examples in files that have none: it costs as much
    as their import."""
    found = yield
    kept = [each for each in found if not isinstance(each, DoctestModule)]
    return found if kept == found or ">>> " in file_path.read_text() else kept


# First: -m, which leaves tests out by their marks, runs in this hook too.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks.started()  # what importing the tests started is no test's
    of_file: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        found = marks.marks_of(item)
        of_file[item.path] |= found
        for mark in sorted(found):
            item.add_marker(mark)
    turns = _turns(of_file)
    items.sort(key=lambda item: turns[item.path])
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _turns(of_file: Mapping[Path, set[str]]) -> dict[Path, int]:
    """When a file's turn is. Files whose processes wait alternate with those whose ranks compute,
    so that no core is idle; those that start nothing are short, and fill the end."""
    turns = dict.fromkeys(of_file, 1.0)
    waiting = [path for path, found in of_file.items() if found - {"ranks"}]
    computing = [path for path, found in of_file.items() if found == {"ranks"}]
    for paths in (waiting, computing):
        turns |= {path: number / len(paths) for number, path in enumerate(paths)}
    return {path: turn for turn, path in enumerate(sorted(turns, key=turns.__getitem__))}


def pytest_collection_finish() -> None:
    # All that the imports and the collection made stays: nothing need look through it again, and
    # not now for garbage either, which took every worker a tenth of its collection.
    gc.freeze()
    gc.enable()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _variables() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if not n.startswith(_NOT_OURS)}
