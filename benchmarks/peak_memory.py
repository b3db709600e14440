"""The memory that a rank needs at most for one way to train, alone in a process of its own.

Linux only. Never measures time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from iteration import Iterate
from torch._C._distributed_c10d import PrefixStore, TCPStore

ITERATIONS = 2


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
    peak = 1024 * _field(Path("/proc/self/status"), "VmHWM")
    dist.barrier()
    if is_master:  # the last to go, as it keeps the store
        group_store.wait([f"left {other}" for other in range(1, world)])
    else:
        group_store.set(f"left {rank}", "")
    return peak


def _field(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
