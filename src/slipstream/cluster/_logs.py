"""The log files of the ranks: their paths, rank 0's copied to stdout, and tracebacks in them."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from slipstream.cluster._ends import Ends
from slipstream.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest

ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*$", re.M)
"""The line of a traceback that names the error."""
PEER_IS_GONE = re.compile(
    r"\bExchangeError\b|\bHangError\b|\bDist\w*Error\b|/gloo/|gloo::|\bNCCL\b|remote process"
)
"""In the line of an error that says no more than that another rank has left."""
EXCERPT_BYTES = 64 * 1024
TRACEBACK = re.compile(r"^(  \+ Exception Group )?Traceback \(most recent call last\):", re.M)
TRACEBACK_OF_RANK = re.compile(
    rb"^(?:\[rank\d+\]: ?)?(?:  \+ Exception Group )?Traceback \(most", re.M
)
LONGEST_START = 64
"""Bytes; of a line that is longer, such as a progress bar, the rest begins no traceback."""
HELD_SECONDS = 5.0
CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


def last_traceback(text: str) -> str:
    """The last Python traceback of a log, chained exceptions included; else its last lines.

    Example:
        >>> log = "step 1\\nTraceback (most recent call last):\\n  ...\\nKeyError: 3\\n"
        >>> print(last_traceback(log))
        Traceback (most recent call last):
          ...
        KeyError: 3
    """
    text = re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.M)  # torch adds this prefix
    starts = [match.start() for match in TRACEBACK.finditer(text)]
    while len(starts) > 1 and text[: starts[-1]].rstrip().endswith(CHAINED):
        starts.pop()
    return last_lines(text[starts[-1] :], 80) if starts else last_lines(text)


def last_lines(text: str, count: int = 20) -> str:
    """The last ``count`` lines of a text, without blank ones at its end."""
    return "\n".join(text.rstrip().splitlines()[-count:])


def excerpt(log: Path, returncode: int) -> str:
    """The last traceback in a rank's log, or its last lines."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - EXCERPT_BYTES))
        text = file.read().decode(errors="replace")
    # A rank killed by a signal writes no traceback; one in its log belongs to a caught error.
    return last_traceback(text) if returncode > 0 else last_lines(text)


class RankLogs:
    """A log file for each rank: what the elastic agent expects of a ``LogsSpecs``.

    It is no subclass, since torch is imported only when ranks start.

    Args:
        folder: for the logs; created if it does not exist.
        variables: set for every rank, in addition to the agent's.

    Attributes:
        paths: of this start, by rank.
        restart: the number of this start, the same on all nodes; None: the agent's own count.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder, self.variables = folder, variables
        self.paths: dict[int, Path] = {}
        self.restart: int | None = None
        self.ends = Ends()
        self._tails: list[_Tail] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"the log folder {self.folder} cannot be created: {error.strerror}; choose another "
                "with --log-dir"
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise LaunchError(
                f"the log folder {folder} cannot be written; choose another with --log-dir"
            )

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of all local ranks; the agent calls this at each start of the ranks."""
        from torch.distributed.elastic.multiprocessing import LogsDest

        for env in envs.values():
            if self.restart is not None:
                env["TORCHELASTIC_RESTART_COUNT"] = str(self.restart)
            restart = int(env["TORCHELASTIC_RESTART_COUNT"])
            suffix = f".restart{restart}.log" if restart else ".log"
            self.paths[int(env["RANK"])] = self.folder / f"rank{env['RANK']}{suffix}"
            env.update(self.variables)
        self.ends.expect(envs, self.paths)
        if envs[0]["RANK"] == "0":
            self._tails.append(_Tail(self.paths[0]))
        return LogsDest(
            stdouts={local: str(self.paths[int(env["RANK"])]) for local, env in envs.items()},
            stderrs=dict.fromkeys(envs, ""),  # `_rank` sends stderr to stdout
            error_files=dict.fromkeys(envs, os.devnull),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Copy what rank 0 still wrote, and stop; a traceback only where nothing else shows it."""
        for tail in self._tails:
            tail.stop(failed=error[0] is not None)


class _Tail(threading.Thread):
    """Copies a growing file to stdout, byte for byte, until `stop`.

    A traceback waits for HELD_SECONDS: if the launch fails meanwhile, it is told which rank began
    it, and one that follows from that, or is the same, would only hide it. Where stdout takes no
    more, as behind ``| head``, the copy ends, and the ranks go on.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        path.write_bytes(b"")
        self._path, self._ended, self._failed = path, threading.Event(), False
        self._line = self._held = b""  # the start of the last line that was copied; what waits
        self._since = 0.0
        self.start()

    def run(self) -> None:
        with self._path.open("rb") as file:
            ended = False
            while not ended:
                ended = self._ended.wait(0.05)  # asked before the read, which then is complete
                while chunk := file.read(65536):
                    self._take(chunk)
                if self._held and time.monotonic() - self._since > HELD_SECONDS:
                    self._release()
        if not self._failed:
            self._release()

    def stop(self, *, failed: bool) -> None:
        self._failed = failed
        self._ended.set()
        self.join()

    def _take(self, chunk: bytes) -> None:
        if self._held:
            self._held += chunk
            return
        text = self._line + chunk
        start = TRACEBACK_OF_RANK.search(text)
        shown = len(text) if start is None else max(start.start(), len(self._line))
        self._copy(text[len(self._line) : shown])
        self._held, self._since = text[shown:], time.monotonic()
        self._line = text[:shown].rpartition(b"\n")[2][:LONGEST_START]

    def _release(self) -> None:
        held, self._held, self._line = self._held, b"", b""
        self._copy(held)

    def _copy(self, data: bytes) -> None:
        if sys.stdout is None:  # closed before this process began
            return
        try:
            try:
                sys.stdout.buffer.write(data)
            except BlockingIOError as error:  # a parent made it so
                os.set_blocking(sys.stdout.fileno(), True)
                sys.stdout.buffer.write(data[error.characters_written :])
            try:
                sys.stdout.buffer.flush()
            except BlockingIOError:  # which says of no byte whether it was written
                os.set_blocking(sys.stdout.fileno(), True)
                sys.stdout.buffer.flush()
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:  # what is left is not tried again at the end
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            said = f"{error.strerror}: rank 0 goes on, and what it prints is in {self._path}"
            with suppress(OSError, ValueError):  # stderr may be the same pipe
                print(f"slipstream: stdout: {said}", file=sys.stderr, flush=True)
