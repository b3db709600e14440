"""Free space of the host, of a cgroup that allows less, of a disk."""

from __future__ import annotations

import pytest

from slipstream.errors import OffloadError
from slipstream.memory.offload.free_space import free_disk_bytes, free_host_bytes, share

GIB = 2**30


def host(tmp_path, cgroup="", files=()):
    """A host with 8 GiB available, and these files below the cgroups' root."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in dict(files).items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return free_host_bytes(proc, tmp_path / "sys")


def test_a_host_without_cgroups(tmp_path):
    assert host(tmp_path) == 8 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [(5 * GIB, 2 * GIB, 3 * GIB), ("max", 2 * GIB, 8 * GIB), (GIB, 2 * GIB, 0)],
)
def test_a_cgroup_of_version_2(tmp_path, limit, used, free):
    files = {"job/memory.max": limit, "job/memory.current": used}
    assert host(tmp_path, "0::/job/step\n", files) == free


def test_a_cgroup_of_version_1(tmp_path):
    folder = "memory/job"
    files = {f"{folder}/memory.limit_in_bytes": 3 * GIB, f"{folder}/memory.usage_in_bytes": GIB}
    lines = "9:cpu,cpuacct:/\n4:memory:/job\n"
    assert host(tmp_path, lines, files) == 2 * GIB


def test_a_share_leaves_a_reserve():
    assert share(100, local_ranks=3) == 30


def test_a_folder_that_is_not_there(tmp_path):
    assert free_disk_bytes(tmp_path) > 0
    with pytest.raises(OffloadError, match=r"memory.offload.folder .*: No such file"):
        free_disk_bytes(tmp_path / "no")
