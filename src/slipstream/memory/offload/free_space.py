"""Free memory and disk of this host, for all of its ranks together."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from slipstream.errors import OffloadError

RESERVE = 0.1
"""Fraction of the free space that stays free."""

_CGROUP_FILES = (  # limit and usage, in versions 2 and 1
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that this process can still take, within the limits of its cgroups.

    Example:
        >>> free_host_bytes() > 0
        True
    """
    free = [_available(proc)]
    for folder in _cgroup_folders(proc, cgroups):
        for limit_file, usage_file in _CGROUP_FILES:
            try:
                limit, usage = (folder / limit_file).read_text(), (folder / usage_file).read_text()
            except OSError:
                continue
            if limit.strip() != "max":
                free.append(int(limit) - int(usage))
    return max(min(free), 0)


def free_disk_bytes(folder: str | Path | None = None) -> int:
    """Bytes that a user can still write to the disk of ``folder``.

    Args:
        folder: None: the system's folder for temporary files.

    Raises:
        OffloadError: the folder does not exist.
    """
    place = Path(tempfile.gettempdir() if folder is None else folder)
    try:
        return shutil.disk_usage(place).free
    except OSError as error:
        raise OffloadError(
            f"memory.offload.folder {place}: {error.strerror}; name an existing folder"
        ) from error


def share(free: int, local_ranks: int) -> int:
    """Bytes that each rank of a host may take of the ``free`` bytes there."""
    return int(free * (1 - RESERVE)) // local_ranks


def _available(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line}
    return sizes["MemAvailable"]


def _cgroup_folders(proc: Path, cgroups: Path) -> list[Path]:
    """Folders of the cgroup of this process and of its parents, in versions 1 and 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = cgroups / controllers
        own = root / path.lstrip("/")
        folders += [f for f in (own, *own.parents) if f == root or root in f.parents]
    return folders
