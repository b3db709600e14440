"""What this machine offers for emulating hosts: its tools, and namespaces as root or as anyone.

Never changes anything: it tries things out in namespaces that end with the attempt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from slipstream.errors import TestbedError
from slipstream.testbed.network import shape

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "util-linux"}
_NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child")
_AS_ROOT = ("--user", "--map-root-user")


@dataclass(frozen=True)
class Machine:
    """Paths of the tools by name, and the command that starts a program in new namespaces."""

    tools: dict[str, str]
    unshare: tuple[str, ...]


def unavailable() -> str | None:
    """Why hosts cannot be emulated on this machine, in one line; None where they can."""
    try:
        find_machine()
    except TestbedError as error:
        return str(error)
    return None


def find_machine() -> Machine:
    """The tools, and how this user gets namespaces: as root, or inside a user namespace of its own.

    Raises:
        TestbedError: not Linux, no such tool, namespaces are refused, or the kernel lacks ``tbf``.
    """
    if not sys.platform.startswith("linux"):
        raise TestbedError(f"hosts are emulated on Linux only; this is {sys.platform}")
    tools = _find_tools()
    for extra in ((), _AS_ROOT):
        unshare = (tools["unshare"], *extra, *_NAMESPACES)
        if _works([*unshare, tools["mount"], "-t", "proc", "proc", "/proc"]):
            break
    else:
        raise TestbedError(
            "this user may not create network namespaces: run as root, or allow user namespaces "
            "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
        )
    if not _works([*unshare, tools["tc"], *shape("lo", 10**6).split()]):
        raise TestbedError(
            "the kernel cannot shape links: load its module sch_tbf (modprobe sch_tbf)"
        )
    return Machine(tools, unshare)


def _find_tools() -> dict[str, str]:
    path = os.environ.get("PATH", "")
    tools = {tool: shutil.which(tool, path=path) for tool in _PACKAGES}
    if tools["ip"]:  # Debian keeps tc where ordinary users do not look
        tools["tc"] = tools["tc"] or shutil.which("tc", path="/usr/sbin:/sbin")
    found = {tool: where for tool, where in tools.items() if where}
    if missing := [tool for tool in tools if tool not in found]:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in missing}))
        raise TestbedError(f"no program {' or '.join(missing)} on this machine: install {packages}")
    return found


def _works(argv: list[str]) -> bool:
    return subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
