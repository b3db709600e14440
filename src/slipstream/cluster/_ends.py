"""The end of each rank of this node, noted beside its log at once.

The elastic agent looks at its ranks now and then, and a rank that ends with code 0 is no failure to
it, even if the others still train and fail for want of it; of others it tells the whole second. So
a thread waits for the ends. Ending takes long enough for peers to notice, fail and end first, so a
rank also notes when it begins to.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from slipstream.files.write import write_whole

LEAVING = "SLIPSTREAM_LEAVING"
"""The variable with the file in which a rank notes when it begins to end by itself."""
SETTLE_SECONDS = 30.0
"""For the notes of ranks that have ended, at most: a process may hang in the kernel."""
LOOK_INTERVAL = 0.02
"""Seconds between two looks for notes that are not written yet."""


@dataclass(frozen=True)
class End:
    """The end of one rank; a ``returncode`` of -n means signal n, ``time`` is that of its host."""

    rank: int
    local_rank: int
    host: str
    returncode: int
    time: float
    log: str

    @classmethod
    def read(cls, folder: Path) -> list[End]:
        """Read the ends that a folder of logs has so far.

        A rank that is still ending, or was stopped while it was, counts as one that left.
        """
        found = []
        for path in (*folder.glob("rank*.exit"), *folder.glob("rank*.leaving")):
            with suppress(OSError, ValueError, TypeError):  # being written, or just removed
                found.append(cls(**json.loads(path.read_text())))
        return found


def note_leaving(rank: int, local_rank: int, host: str) -> None:
    """Note when this process begins to end, if `slipstream launch` asks for it."""
    path = os.environ.get(LEAVING)
    if path is None or path in _noting:  # once is enough
        return
    _noting.add(path)
    log = str(Path(path).with_suffix(".log"))

    def note() -> None:
        end = End(rank, local_rank, host, 0, time.time(), log)
        with suppress(OSError):  # the folder is gone
            write_whole(path, json.dumps(asdict(end)), durable=False)

    atexit.register(note)


_noting: set[str] = set()


class Ends:
    """Notes the ends of ranks as ``rank<r>.exit`` beside the log of each."""

    def __init__(self) -> None:
        self._notes: list[Path] = []
        self._expected: dict[int, tuple[int, Path]] = {}  # by local rank: rank, log
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def expect(self, envs: Mapping[int, dict[str, str]], logs: Mapping[int, Path]) -> None:
        """Prepare for these ranks, which are about to be started.

        Args:
            envs: their variables, by local rank; gets one more.
            logs: their logs, by rank.
        """
        self._settle()
        self._expected = {}
        for local_rank, env in envs.items():
            log = logs[int(env["RANK"])]
            self._expected[local_rank] = int(env["RANK"]), log
            _forget_others(log.parent, int(env["WORLD_SIZE"]))
            for suffix in ("exit", "leaving"):
                for earlier in log.parent.glob(f"rank{env['RANK']}.*{suffix}"):  # run, or restart
                    earlier.unlink(missing_ok=True)
                self._notes.append(log.with_suffix(f".{suffix}"))
            env[LEAVING] = str(log.with_suffix(".leaving").resolve())

    def follow(self, processes: Mapping[int, Popen[Any]]) -> None:
        """Note the ends of the ranks' processes, by local rank, for which nobody has waited yet."""
        running = {
            os.pidfd_open(process.pid): (local_rank, process)
            for local_rank, process in processes.items()
        }
        where = dict(self._expected)
        self._thread = threading.Thread(target=self._wait, args=(running, where), daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> bool:
        """Whether some end is not noted yet."""
        return self._thread is not None and self._thread.is_alive()

    def close(self, forget: bool) -> None:
        """Stop waiting; with ``forget``, once all ranks have ended, remove the notes."""
        if forget:
            self._settle()
        self._closed.set()
        for note in self._notes if forget else ():
            note.unlink(missing_ok=True)

    def _settle(self) -> None:
        """Wait for the notes of ranks that have ended: none comes later."""
        if self._thread is not None:
            self._thread.join(SETTLE_SECONDS)

    def _wait(
        self,
        running: dict[int, tuple[int, Popen[Any]]],
        where: Mapping[int, tuple[int, Path]],
    ) -> None:
        ends = select.poll()
        for fd in running:
            ends.register(fd, select.POLLIN)
        while running and not self._closed.is_set():
            for fd, _ in ends.poll(200):
                local_rank, process = running.pop(fd)
                ends.unregister(fd)
                os.close(fd)
                rank, log = where[local_rank]
                _note(rank, local_rank, process, log)
        for fd in running:
            os.close(fd)


def _forget_others(folder: Path, world_size: int) -> None:
    """Remove the notes of an earlier run on more ranks."""
    for note in folder.glob("rank*"):
        match = _NOTE.fullmatch(note.name)
        if match and int(match[1]) >= world_size:
            note.unlink(missing_ok=True)


_NOTE = re.compile(r"rank(\d+)\.(?:.*\.)?(?:exit|leaving)")


def _note(rank: int, local_rank: int, process: Popen[Any], log: Path) -> None:
    """Write how a process ended."""
    ended = time.time()
    end = End(rank, local_rank, socket.gethostname(), _code_of(process), ended, str(log))
    with suppress(OSError):  # the folder is gone
        write_whole(log.with_suffix(".exit"), json.dumps(asdict(end)), durable=False)


def _code_of(process: Popen[Any]) -> int:
    """The code of a process that has ended. It stays for the agent to be waited for, which may be
    about to signal it: its number must not be another's."""
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # the agent was faster, and knows it
        return process.wait()
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
