"""No test leaves anything behind: a variable, a thread, a process group; no GPU, no GPU tests."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

_NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_")  # pytest's, and what importing torch sets


def pytest_configure() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would all that tests start and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _variables() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if not n.startswith(_NOT_OURS)}
