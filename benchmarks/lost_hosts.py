"""Four hosts lose one to each fault in turn: who is named, when do they go on, to the same bits?

    python -m benchmarks.lost_hosts --json benchmarks/results/lost-hosts.json

`lost_training` trains on four emulated hosts, first undisturbed, then with a fault every 25
updates. `slipstream launch --max-restarts` starts the ranks again; where it cannot, the command is
given anew, as its user would. Every loss of every life of a rank, and the parameters at the end,
must be those of the undisturbed run. A fifth host keeps the last one's store.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from benchmarks.record import finish
from slipstream.testbed import Node, Testbed

HOSTS, KEEPER = 4, 4
"""Hosts that train, and the index of the one that keeps a store after the first host was lost."""
FIRST, APART = 18, 25
"""The update at which the first fault strikes, and updates from one to the next."""
CUT_SECONDS = 15.0
TOKEN = "a-word-that-all-hosts-have"
LOGS = "logs"
LIMIT = 600.0
"""Seconds for any one thing to happen."""
CUT = "the link is cut for 15 s"
LOST, FIRST_LOST = "the host is lost", "the first host is lost, with the store"
KEPT = "the first host is lost, the store is not"
FAULTS = {
    "kill -9": 1,
    "SIGSTOP": 2,
    "a sleep without end": 3,
    "an exception": 0,
    "exit(0)": 1,
    "NaN in the gradients": 2,
    "a full disk": 3,
    CUT: 1,
    LOST: 2,
    FIRST_LOST: 0,
    KEPT: 0,
}
"""What strikes, and on which host."""


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        update: before which it struck.
        to_error: seconds until a launcher said something.
        to_training: seconds until the next update.
        again: updates that were done twice.
        anew: on which hosts the command was given anew.
        said: by each host's launcher, line by line.
    """

    fault: str
    host: str
    update: int
    to_error: float
    to_training: float
    again: int
    anew: list[str]
    said: dict[str, list[str]]


@dataclass
class Session:
    """The hosts, what runs on them, and the folder they share."""

    bed: Testbed
    folder: Path
    updates: int
    console: Console
    endpoint: str = "node0:29500"
    launchers: dict[int, subprocess.Popen[Any]] = field(default_factory=dict)

    @property
    def hosts(self) -> tuple[Node, ...]:
        """Those that train."""
        return self.bed.nodes[:HOSTS]

    @property
    def command(self) -> list[str]:
        """What is typed on each host."""
        words = f"launch --nnodes {HOSTS} --rdzv-endpoint {self.endpoint} --max-restarts 20"
        options = [*words.split(), "--log-dir", LOGS]
        return ["slipstream", *options, "train.py", "shared", str(self.updates)]

    def prepare(self, faults: Iterable[tuple[str, str, int]]) -> None:
        """Fill the folder."""
        (self.folder / "shared" / "disk").mkdir(parents=True)
        script = Path(__file__).with_name("lost_training.py")
        shutil.copy(script, self.folder / "train.py")
        (self.folder / "shared" / "faults.json").write_text(json.dumps([*faults]))
        disk = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "shared/disk"]
        assert self.bed.popen(self.bed.nodes[0], disk, cwd=self.folder).wait() == 0

    def type_command(self, host: Node) -> None:
        """Give the command on a host."""
        _, *words = self.command
        self.launchers[host.index] = self.bed.popen(
            host,
            [sys.executable, "-m", "slipstream", *words],
            {"SLIPSTREAM_TOKEN": TOKEN, "COLUMNS": "100"},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=self._file(host, "stdout"),
            stderr=self._file(host, "stderr"),
        )

    def _file(self, host: Node, stream: str) -> IO[bytes]:
        return (self.folder / f"{host.name} {stream}").open("ab")

    def said(self, host: Node, since: int = 0) -> str:
        """What its launchers have written to stderr after so many characters."""
        path = self.folder / f"{host.name} stderr"
        return path.read_text()[since:] if path.exists() else ""

    def wait(self, what: str, happened: Callable[[], bool]) -> float:
        """Wait until something has happened; returns the time.

        Raises:
            SystemExit: it has not; what the hosts said is printed.
        """
        until = time.monotonic() + LIMIT
        while not happened():
            if time.monotonic() > until:
                for host in self.hosts:
                    self.console.print(
                        f"{host.name} said:\n{self.said(host)[-3000:]}", markup=False
                    )
                    for log in sorted((self.folder / LOGS).glob(f"rank{host.index}.*log")):
                        self.console.print(log.name, log.read_text()[-1500:], markup=False)
                raise SystemExit(f"not within {LIMIT:.0f} s: {what}")
            time.sleep(0.05)
        return time.time()

    def lives(self, rank: int) -> list[tuple[int, list[tuple[int, str, float]], float]]:
        """Of one rank: from which update each life went on, its updates with loss and time, and
        when it began."""
        path = self.folder / "shared" / f"losses {rank}"
        found: list[tuple[int, list[tuple[int, str, float]], float]] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            first, *rest = line.split()
            if first == "from":
                found.append((int(rest[0]), [], float(rest[1])))
            elif len(rest) == 2:  # whole
                found[-1][1].append((int(first), rest[0], float(rest[1])))
        return found

    def ended(self) -> bool:
        """Whether all launchers have."""
        return all(launcher.poll() is not None for launcher in self.launchers.values())

    def digests(self) -> set[str]:
        """Of the parameters, by all ranks."""
        return {(self.folder / "shared" / f"digest {rank}").read_text() for rank in range(HOSTS)}

    def losses(self) -> list[dict[int, set[str]]]:
        """Of each rank, what all of its lives computed for each update."""
        found: list[dict[int, set[str]]] = [{} for _ in range(HOSTS)]
        for rank, by_update in enumerate(found):
            for _, life, _ in self.lives(rank):
                for update, loss, _ in life:
                    if float.fromhex(loss) == float.fromhex(loss):
                        by_update.setdefault(update, set()).add(loss)
        return found

    def survive(self, fault: str, index: int, update: int) -> Row:
        """Wait for a fault to strike, do from outside what belongs to it, and wait for training."""
        host, shared = self.hosts[index], self.folder / "shared"
        mark = shared / f"struck {fault}"
        self.wait(f"{fault} strikes", lambda: mark.exists() and mark.read_text() != "")
        struck, lives = float(mark.read_text()), len(self.lives(0))
        heard = {one: len(self.said(one)) for one in self.hosts}
        reached = max(done for rank in range(HOSTS) for done, _, _ in self.lives(rank)[-1][1])
        anew = [host] if fault in (LOST, FIRST_LOST, KEPT) else []
        if anew:
            struck = time.time()
            self.launchers[index].kill()
        elif fault == CUT:
            struck = time.time()
            self._link(host, "down")
            (shared / f"done {fault}").touch()
        others = [one for one in self.hosts if one not in anew]
        error = self.wait("error", lambda: any(self.said(one, heard[one]) for one in others))
        if fault == CUT:
            time.sleep(max(0.0, struck + CUT_SECONDS - time.time()))
            self._link(host, "up")
        elif fault == FIRST_LOST:  # and with it the store
            self.wait("all launchers have ended", self.ended)
            anew = [*self.hosts]
            self.keep_store()
        for one in anew:
            self.type_command(one)
        self.wait("training goes on", lambda: any(life[1] for life in self.lives(0)[lives:]))
        start, done, _ = self.lives(0)[-1]
        return Row(
            fault,
            host.name,
            update,
            round(error - struck, 1),
            round(done[0][2] - struck, 1),
            reached - start,
            [one.name for one in anew],
            {one.name: self._lines(self.said(one, heard[one])) for one in self.hosts},
        )

    def keep_store(self) -> None:
        """From now on hosts meet at a fifth one."""
        keeper = self.bed.nodes[KEEPER]
        self.endpoint = f"{keeper.name}:29500"
        words = ["-m", "slipstream", "store", "--host", keeper.name, "--port", "29500"]
        store = self.bed.popen(
            keeper,
            [sys.executable, *words],
            {"SLIPSTREAM_TOKEN": TOKEN, "COLUMNS": "100"},
            stdout=self._file(keeper, "stdout"),
            stderr=self._file(keeper, "stderr"),
        )
        self.wait("the store listens", lambda: "listens" in self.said(keeper))
        assert store.poll() is None

    def _link(self, host: Node, order: str) -> None:
        argv = ["ip", "link", "set", host.interface, order]
        assert self.bed.popen(host, argv).wait() == 0

    def _lines(self, text: str) -> list[str]:
        """Without the panel of a start and the frames of others, with paths from the folder on."""
        text = re.sub(r"(?s)╭─ distributed environment.*?╯\n", "", text)
        text = text.replace(f"{self.folder}/", "")
        lines = (re.sub(r"^[│╭╰ ]*[─ ]*|[─│╮╯ ]*$", "", line) for line in text.splitlines())
        return [line for line in lines if line]


@dataclass(frozen=True)
class Trained:
    """A run that has ended.

    Attributes:
        digests: of the parameters at the end, of all ranks.
        losses: of each rank, what all of its lives computed for each update.
        commands: as given, in order.
    """

    digests: set[str]
    losses: list[dict[int, set[str]]]
    rows: list[Row]
    commands: list[str]


def train(updates: int, faults: dict[str, int], console: Console) -> Trained:
    """One run on hosts of its own; ends when all launchers have."""
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        bed = stack.enter_context(Testbed(nodes=HOSTS + 1, rate="1gbit"))
        session = Session(bed, folder, updates, console)
        at = {name: FIRST + APART * number for number, name in enumerate(faults)}
        session.prepare((name, f"node{host}", at[name]) for name, host in faults.items())
        if KEPT in faults and FIRST_LOST not in faults:
            session.keep_store()
        commands = [shlex.join(session.command)]
        for host in session.hosts:
            session.type_command(host)
        for name, index in faults.items():
            row = session.survive(name, index, at[name])
            rows.append(row)
            took = f"an error after {row.to_error} s, training after {row.to_training} s"
            console.print(f"{name}: {took}", highlight=False)
        session.wait("the end", session.ended)
        codes = [launcher.returncode for launcher in session.launchers.values()]
        if any(codes):
            words = "\n".join(session.said(host)[-2000:] for host in session.hosts)
            raise SystemExit(f"launchers ended with {codes}:\n{words}")
        commands.append(shlex.join(session.command))
        return Trained(session.digests(), session.losses(), rows, commands)


def main() -> None:
    """Both runs, and their comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    console, faults = Console(stderr=True), {name: FAULTS[name] for name in args.faults}
    updates = FIRST + APART * len(faults)
    undisturbed, disturbed = train(updates, {}, console), train(updates, faults, console)
    losses = [len(values) for rank in disturbed.losses for values in rank.values()]
    entry = {
        "hosts": HOSTS,
        "updates": updates,
        "commands": list(dict.fromkeys(disturbed.commands)),
        "digests": [sorted(undisturbed.digests), sorted(disturbed.digests)],
        "losses": len(losses),
        "same_losses": disturbed.losses == undisturbed.losses,
        "rows": [asdict(row) for row in disturbed.rows],
    }
    finish(args.json, "lost_hosts", entry)


if __name__ == "__main__":
    main()
