"""What a testbed might leave behind: processes and interfaces on the machine."""

from __future__ import annotations

import socket
import time

import psutil


def marked(marker: str) -> list[str]:
    """Command lines of the running processes that have ``marker`` among their arguments."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if marker in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(words))
    return found


def wait_for_marked(marker: str, count: int, seconds: float = 120.0) -> list[str]:
    """``marked`` as soon as there are ``count`` of them, or as they are after ``seconds``."""
    deadline = time.monotonic() + seconds
    while len(found := marked(marker)) != count and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def interfaces() -> set[str]:
    """Names of the machine's own network interfaces."""
    return {name for _, name in socket.if_nameindex()}
