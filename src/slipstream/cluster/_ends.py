"""The end of each rank of this node, noted beside its log at once.

The elastic agent looks at its ranks now and then, and a rank that ends with code 0 is no failure to
it, even if the others still train and fail for want of it. So a thread waits for the ends. Ending
takes long enough for peers to notice, fail and end first, so a rank also notes when it begins to.
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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.files.write import write_whole

LEAVING = "SLIPSTREAM_LEAVING"
"""The variable with the file in which a rank notes when it begins to end by itself."""
LOOK_INTERVAL = 0.02
"""Seconds between two looks for processes that have not been started, or notes not written, yet."""


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
        self._closed = threading.Event()

    def watch(self, envs: Mapping[int, dict[str, str]], logs: Mapping[int, Path]) -> None:
        """Wait for these ranks, which are about to be started.

        Args:
            envs: their variables, by local rank; gets one more.
            logs: their logs, by rank.
        """
        for env in envs.values():
            log = logs[int(env["RANK"])]
            _forget_others(log.parent, int(env["WORLD_SIZE"]))
            for suffix in ("exit", "leaving"):
                for earlier in log.parent.glob(f"rank{env['RANK']}.*{suffix}"):  # run, or restart
                    earlier.unlink(missing_ok=True)
                self._notes.append(log.with_suffix(f".{suffix}"))
            env[LEAVING] = str(log.with_suffix(".leaving").resolve())
        threading.Thread(target=self._wait, args=(envs, dict(logs)), daemon=True).start()

    def close(self, forget: bool) -> None:
        """Stop waiting; with ``forget`` remove the notes."""
        self._closed.set()
        for note in self._notes if forget else ():
            note.unlink(missing_ok=True)

    def _wait(self, envs: Mapping[int, Mapping[str, str]], logs: Mapping[int, Path]) -> None:
        """Find the processes of the ranks, then wait for each of them."""
        left = {(e["RANK"], e["TORCHELASTIC_RESTART_COUNT"]): n for n, e in envs.items()}
        running: dict[int, tuple[int, int, int]] = {}  # by file descriptor: rank, local rank, pid
        ends = select.poll()
        while (left or running) and not self._closed.is_set():
            for pid, key in _children():
                if key in left:
                    with suppress(OSError):  # it has ended, and the agent knows already
                        fd = os.pidfd_open(pid)
                        running[fd] = int(key[0]), left[key], pid
                        ends.register(fd, select.POLLIN)
                    del left[key]
            for fd, _ in ends.poll(1e3 * (LOOK_INTERVAL if left else 0.2)):
                rank, local_rank, pid = running.pop(fd)
                ends.unregister(fd)
                os.close(fd)
                _note(rank, local_rank, pid, logs[rank])
        for fd in running:
            os.close(fd)


def _forget_others(folder: Path, world_size: int) -> None:
    """Remove the notes of an earlier run on more ranks."""
    for note in folder.glob("rank*"):
        match = _NOTE.fullmatch(note.name)
        if match and int(match[1]) >= world_size:
            note.unlink(missing_ok=True)


_NOTE = re.compile(r"rank(\d+)\.(?:.*\.)?(?:exit|leaving)")


def _children() -> Iterator[tuple[int, tuple[str, str]]]:
    """Processes that this one has started: their rank, and which restart they belong to."""
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, listed.read_text().split()):
                with suppress(OSError):
                    lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                    env = dict(line.partition("=")[::2] for line in lines.split("\0"))
                    yield pid, (env.get("RANK", ""), env.get("TORCHELASTIC_RESTART_COUNT", ""))


def _note(rank: int, local_rank: int, pid: int, log: Path) -> None:
    """Write how a process ended, which stays for the agent to be waited for."""
    ended = time.time()
    with suppress(ChildProcessError):  # the agent was faster, and knows the code
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if status is not None:
            exited = status.si_code == os.CLD_EXITED
            code = status.si_status if exited else -status.si_status
            end = End(rank, local_rank, socket.gethostname(), code, ended, str(log))
            with suppress(OSError):  # the folder is gone
                write_whole(log.with_suffix(".exit"), json.dumps(asdict(end)), durable=False)
