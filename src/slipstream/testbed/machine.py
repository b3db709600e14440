"""Find out whether this machine can emulate hosts: its tools, its namespaces, its traffic shaping.

Changes nothing: each attempt runs in a namespace that ends with it.
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
    """The tools, and how this user gets namespaces: as root, or inside a user namespace.

    Raises:
        TestbedError: not Linux, a tool is missing, namespaces are refused, or no ``tbf``.
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
    if tools["ip"]:  # Debian installs tc in a folder that is not on an ordinary user's PATH
        tools["tc"] = tools["tc"] or shutil.which("tc", path="/usr/sbin:/sbin")
    if missing := [tool for tool, path in tools.items() if path is None]:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in missing}))
        raise TestbedError(f"no program {' or '.join(missing)} on this machine: install {packages}")
    return {tool: path for tool, path in tools.items() if path is not None}


def _works(argv: list[str]) -> bool:
    return subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
