"""How much memory or disk is free on this host, for all of its ranks together.

Never asks other ranks: each may take its share of what it finds.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from slipstream.errors import OffloadError

RESERVE = 0.1
"""Share of what is free that is left to others."""

_CGROUPS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def free_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What processes here can still take of the host's memory, or of the limit of their cgroup.

    Example:
        >>> free_host_bytes() > 0
        True
    """
    free = [_available(proc)]
    for folder in _folders(proc, cgroups):
        for limit, used in _CGROUPS:
            try:
                most, now = (folder / limit).read_text(), (folder / used).read_text()
            except OSError:
                continue
            if most.strip() != "max":
                free.append(int(most) - int(now))
    return max(min(free), 0)


def free_disk_bytes(folder: str | Path | None = None) -> int:
    """What a user may still write to the disk of ``folder`` (None: that of temporary files).

    Raises:
        OffloadError: there is no such folder.
    """
    place = Path(tempfile.gettempdir() if folder is None else folder)
    try:
        return shutil.disk_usage(place).free
    except OSError as error:
        raise OffloadError(f"memory.offload.folder {place}: {error.strerror}") from error


def share(free: int, local_ranks: int) -> int:
    """What each rank of a host may take of what is free there."""
    return int(free * (1 - RESERVE)) // local_ranks


def _available(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:  # no Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line}
    return sizes["MemAvailable"]


def _folders(proc: Path, cgroups: Path) -> list[Path]:
    """The cgroup of this process and those around it, as both versions of cgroups mount them."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = cgroups / controllers
        inner = root / path.lstrip("/")
        found += [f for f in (inner, *inner.parents) if f == root or root in f.parents]
    return found
