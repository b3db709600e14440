"""The memory that one way to train needs at most, alone in a process of its own.

Linux only. Never measures time.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch._dynamo  # noqa: F401 (every optimizer imports it, and so would each child)
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks.iteration import Iterate, this_module

ITERATIONS = 2
SAMPLED = 2e-3
"""Seconds between two looks at the system's cache of files."""


class Growth(NamedTuple):
    """Bytes by which a process grows at most, and with what the system caches of files beside."""

    process: int
    with_files: int


def growth(work: Callable[[], object]) -> Growth:
    """By how much this process, and the cache of files, grow at most while it works."""
    release()
    before, cached = _resident("VmRSS"), _cached()
    most, ended = before + cached, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(SAMPLED):
            most = max(most, _resident("VmRSS") + _cached())

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    watcher = threading.Thread(target=look)
    watcher.start()
    work()
    ended.set()
    watcher.join()
    process = _resident("VmHWM") - before
    return Growth(process, max(process, most - before - cached))


def growth_apart(job: object) -> Growth:
    """What this module prints last with ``--peak JOB``, in a process that gives back what it
    frees."""
    told = subprocess.run(
        [sys.executable, "-m", this_module(), "--peak", json.dumps(job)],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)},
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return Growth(*map(int, told.stdout.split()[-2:]))


def _resident(name: str) -> int:
    return 1024 * _field(Path("/proc/self/status"), name)


def _cached() -> int:
    return 1024 * _field(Path("/proc/meminfo"), "Cached")


def peak_rss(build: Callable[[], Iterate], turn: int) -> int:
    """Bytes resident at most in iterations of what ``build`` makes; all ranks call it together.

    Before this rank joins a process group or starts a thread: it forks, and the child joins a group
    of its own, the ``turn``-th. Building and the first iterations, which are dearer, do not count.

    Raises:
        SystemExit: the child failed; its traceback is on stderr.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(_measure(build, turn)).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not text:
        raise SystemExit(f"peak memory: the rank's child ended with status {status}")
    return int(text)


def free_bytes() -> int:
    """Memory that this machine can still give away."""
    return 1024 * _field(Path("/proc/meminfo"), "MemAvailable")


def release() -> None:
    """Give memory that is not in use back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _measure(build: Callable[[], Iterate], turn: int) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own store
    port = int(os.environ["MASTER_PORT"]) + (0 if has_agent else 1 + turn)
    is_master = rank == 0 and not has_agent
    limit = timedelta(minutes=3)
    store = TCPStore(os.environ["MASTER_ADDR"], port, world, is_master, timeout=limit)
    group_store = PrefixStore(f"peak memory {turn}", store)
    dist.init_process_group("gloo", store=group_store, rank=rank, world_size=world, timeout=limit)
    iterate = build()
    for _ in range(ITERATIONS):
        iterate()
    release()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(ITERATIONS):
        iterate()
    peak = _resident("VmHWM")
    dist.barrier()
    if is_master:  # the last to go, as it keeps the store
        group_store.wait([f"left {other}" for other in range(1, world)])
    else:
        group_store.set(f"left {rank}", "")
    return peak


def _field(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
