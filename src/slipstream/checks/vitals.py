"""Signs of life of a process, read from outside of it: computing, moving bytes, waking up.

Reads ``/proc`` and changes nothing; on a system without it a process shows no signs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from os import sysconf
from pathlib import Path

from slipstream.health.network import readable_address

PROC = Path("/proc")
_TICKS = sysconf("SC_CLK_TCK")

CPU_SHARE, CPU_TICKS = 0.02, 0.05
"""Of one core, and seconds beside it: a process that computes less is still."""
BYTES_PER_SECOND = 32 * 1024
"""Read and written: a process that moves fewer is still."""
SWITCHES_PER_SECOND = 5.0
"""Of the thread that trains: one that wakes up less often waits for one thing."""

STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "D": "waits for a disk"}
"""States of a process that say why it is still."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """Sums since the start of a process: its CPU seconds and bytes moved, those of its descendants
    (workers that load data, compilers) included, also once they have ended, and how often the
    thread that trains has waited."""

    cpu: float = 0.0
    moved: int = 0
    switches: int = 0

    def show_life_since(self, earlier: Vitals, seconds: float, *, computing: bool = True) -> bool:
        """Tell whether the process has done anything for ``seconds``.

        Args:
            earlier: what it had done before.
            seconds: between the two.
            computing: whether computing is a sign of life; not of a thread that spins.

        Example:
            >>> Vitals(cpu=3.0).show_life_since(Vitals(cpu=2.0), 1.0)
            True
            >>> Vitals(cpu=2.05).show_life_since(Vitals(cpu=2.0), 1.0)
            False
        """
        return (
            (computing and self.cpu - earlier.cpu > CPU_SHARE * seconds + CPU_TICKS)
            or self.moved - earlier.moved > BYTES_PER_SECOND * (seconds + 1)
            or self.switches - earlier.switches > SWITCHES_PER_SECOND * (seconds + 1)
        )


def vitals(
    pid: int, without: int | None = None, proc: Path = PROC, *, trains: int | None = None
) -> Vitals:
    """Read what the process ``pid`` has done so far, but for its thread ``without``, which looks at
    it here; nothing where it is gone. Its thread ``trains`` is by default the main one."""
    ticks, moved = 0, 0
    for process in (pid, *descendants(pid, proc)):
        used = _used(proc / str(process), reaped=True)
        ticks, moved = ticks + used[0], moved + used[1]
    if without is not None:
        used = _used(proc / f"{pid}/task/{without}")
        ticks, moved = ticks - used[0], moved - used[1]
    switches = 0
    with suppress(OSError, ValueError):
        switches = _value(proc / f"{pid}/task/{trains or pid}/status", "voluntary_ctxt_switches")
    return Vitals(ticks / _TICKS, moved, switches)


def state(pid: int, proc: Path = PROC) -> str | None:
    """The letter by which the kernel names the state of a process; None: there is no such one."""
    try:
        return (proc / f"{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def in_words(pid: int) -> str:
    """The state of a process that gives no answer."""
    letter = state(pid)
    if letter is None:
        return "its process is gone"
    words = STATES.get(letter)
    return f"its process is {words}" if words else "its process lives, and does not answer"


def process_table() -> str:
    """Name the processes among which this one has its number: those of a host since its boot, or of
    a container; empty: they cannot be told apart."""
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(PROC / 'self/ns/pid').readlink()}"
    return ""


def children(pid: int, proc: Path = PROC) -> list[int]:
    """The processes that a process has started, or inherited, and that are not gone."""
    found: list[int] = []
    for listed in proc.glob(f"{pid}/task/*/children"):
        with suppress(OSError, ValueError):
            found += map(int, listed.read_text().split())
    return found


def descendants(pid: int, proc: Path = PROC) -> list[int]:
    """The processes below a process, parents before their children."""
    found = []
    for child in children(pid, proc):
        found += [child, *descendants(child, proc)]
    return found


def unsent(proc: Path = PROC) -> list[str]:
    """Addresses to which this host sends again and again what nobody confirms."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError, ValueError, IndexError):
            for line in (proc / f"self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                waiting, attempts = int(fields[4].partition(":")[0], 16), int(fields[6], 16)
                if waiting and attempts >= 2:
                    found.add(readable_address(fields[2].partition(":")[0]))
    return sorted(found)


def _used(folder: Path, *, reaped: bool = False) -> tuple[int, int]:
    """CPU ticks and bytes moved of a process or thread. The bytes of a process are also those of
    the children that it has reaped, whose ticks the kernel keeps apart."""
    with suppress(OSError, ValueError, IndexError):
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = sum(map(int, fields[11 : 15 if reaped else 13]))
        return ticks, sum(_value(folder / "io", key) for key in ("rchar", "wchar"))
    return 0, 0


def _value(path: Path, key: str) -> int:
    """The number in the line ``key: number`` of a file; 0: there is no such line."""
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return next((int(value) for name, _, value in lines if name == key), 0)
