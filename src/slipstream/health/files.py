"""The files and commands of a host, as probes read them: its own, or a tree that holds them."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path("/")
COMMANDS = "commands"
"""The folder of a tree with the outputs of commands; the name of a file is the command."""
PATIENCE = 10.0
"""Seconds that a command may take: ``lspci`` of a large host takes one or two."""
LONGEST = 2**20
"""Bytes that are read of a file."""


def output_of(command: str) -> str | None:
    """Run a command of this host that only reads; None: there is none, or it failed."""
    try:
        ran = subprocess.run(
            shlex.split(command),
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if ran.returncode else ran.stdout.decode(errors="replace")


@dataclass(frozen=True)
class HostFiles:
    """Files and commands of a host, to be read alone.

    Args:
        root: the folder that stands for ``/``. In another one than ``/`` the output of commands is
            read from ``commands/COMMAND``.
        run: returns the output of a command; None: it could not be run.
        wait: lets seconds pass between two looks at a counter.

    Attributes:
        denied: paths that may not be read, as far as they have been asked for.
    """

    root: Path = ROOT
    run: Callable[[str], str | None] = output_of
    wait: Callable[[float], None] = time.sleep
    denied: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> HostFiles:
        """This host's own for ``/``, else a tree with the output of its commands."""
        if root == ROOT:
            return cls()
        tree = cls(root, run=lambda command: None, wait=lambda seconds: None)
        return cls(root, lambda command: tree.text(f"{COMMANDS}/{command}") or None, tree.wait)

    @property
    def is_here(self) -> bool:
        """Whether these are the files of this process's own host."""
        return self.root == ROOT

    def text(self, path: str) -> str:
        """Read a file; empty: there is none, or it may not be read (then it is in ``denied``)."""
        try:
            with (self.root / path).open("rb") as file:
                return file.read(LONGEST).decode(errors="replace").strip()
        except PermissionError:
            self.denied.append(f"/{path}")
        except OSError:  # some files of /sys exist, and refuse to be read while a link is down
            pass
        return ""

    def number(self, path: str) -> int | None:
        """Read a file that holds one integer; None: it does not."""
        try:
            return int(self.text(path), 0)
        except ValueError:
            return None

    def names(self, path: str) -> list[str]:
        """List a folder in order; empty: there is none."""
        try:
            return sorted(os.listdir(self.root / path))
        except PermissionError:
            self.denied.append(f"/{path}")
        except OSError:
            pass
        return []

    def exists(self, path: str) -> bool:
        """Tell whether there is such a file or folder."""
        return os.path.exists(self.root / path)
