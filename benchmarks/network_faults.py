"""Faults of the network again and again: who is named, and who trains on.

    python -m benchmarks.network_faults --setups 'DDP, watch' --json network-faults.json

Three emulated hosts train (``faulty_training``), a rank each; a fourth keeps their store. A run has
two lives. In the first the link of one host is cut for a moment, then all links lose 99 % of their
rate, then that link is cut for good; in the second the store ends. How seconds are counted and
what is right: `benchmarks.faults`. Nobody has to end where a link comes back, where all are slow,
and where ranks under accelerate() lose their store: such a run is right where every rank trains on
and none is named. torchrun ends its ranks once its store is gone, with an error of its own: there
no rank may be named either. What a wrong run printed is shown.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.faults import (
    ACCELERATE,
    LIMIT,
    SCRIPT,
    SETUPS,
    Outcome,
    Started,
    left_of,
    named,
    row_of,
    told,
)
from benchmarks.faulty_training import BAD, LINKS, RANKS, STORE, TIMEOUT
from benchmarks.record import finish
from slipstream.testbed import Node, Testbed
from slipstream.testbed.network import shape

CUT, SLOW, GONE, LOST = (
    "link cut for 5 s", "rate dropped to 1 %", "link cut for good", "store gone"
)  # fmt: skip
FAULTS = {"links": (CUT, SLOW, GONE), "store": (LOST,)}
ERROR = re.compile(r"\b\w+Error: .*$", re.MULTILINE)
RATE = 1_000_000_000
STORE_PORT, MEETING_PORT = 29500, 29700
CUT_SECONDS, ALARM_SECONDS = 5.0, 35.0
"""Of the short cut, and after which a false alarm would have been given."""
KEEPER = f"""
import sys, time
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], {STORE_PORT}, is_master=True, wait_for_workers=False)
print("listens", flush=True)
time.sleep(1e6)
"""


@dataclass
class Life:
    """Hosts that train, from their start until all of them have ended."""

    setup: str
    bed: Testbed
    folder: Path
    run: str
    hosts: list[Started]
    keeper: subprocess.Popen[str]

    @property
    def others(self) -> list[Started]:
        """The hosts whose link is never cut."""
        return [one for host, one in enumerate(self.hosts) if host != BAD]

    def outcome(self, since: float, right: bool, ended: bool = False) -> Outcome:
        """What has happened since a fault."""
        printed = "\n".join(f"host {n}:\n{one.text}" for n, one in enumerate(self.hosts))
        seconds = max(one.ended for one in self.hosts) - since if ended else None
        left = len(left_of(self.run, set())) if ended else 0
        return Outcome(seconds, right, left, told(self.others[0].text), printed)

    def trains_on(self, for_seconds: float) -> Outcome:
        """Wait; right where every rank makes updates at the end, and none was named."""
        begun = time.time()
        time.sleep(for_seconds)
        until = time.time() + ALARM_SECONDS
        seen = [updates_of(one) for one in self.hosts]
        while time.time() < until:
            if all(updates_of(one) > before for one, before in zip(self.hosts, seen, strict=True)):
                return self.outcome(begun, not any(named(one.text) for one in self.hosts))
            time.sleep(0.2)
        return self.outcome(begun, False)

    def wait_for_end(self) -> None:
        """Until every host has ended, or the time of a run is over."""
        until = time.time() + LIMIT
        while time.time() < until and not all(one.ended for one in self.hosts):
            time.sleep(0.02)

    def link(self, order: str) -> None:
        """Set the link of the bad host ``up`` or ``down``."""
        node = self.bed.nodes[BAD]
        self._do(node, ["ip", "link", "set", node.interface, order])

    def rate(self, bits: int) -> None:
        """Give the links of all hosts another rate."""
        for node in self.bed.nodes:
            self._do(
                node, ["tc", *shape(node.interface, bits).replace(" add ", " change ").split()]
            )

    def _do(self, node: Node, argv: list[str]) -> None:
        if self.bed.popen(node, argv).wait():
            raise ChildProcessError(" ".join(argv))


def updates_of(host: Started) -> int:
    """How many updates a rank has last said."""
    return max((int(n) for n in re.findall(r"^update (\d+)", host.text, re.MULTILINE)), default=0)


@contextmanager
def life(setup: str, fault: str) -> Iterator[Life]:
    """Start every host; yields once all ranks train."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name, Testbed(RANKS + 1, "1gbit") as bed:
        *places, last = bed.nodes
        argv = [sys.executable, "-c", KEEPER, last.address]
        keeper = bed.popen(last, argv, stdout=subprocess.PIPE, text=True)
        assert keeper.stdout is not None
        keeper.stdout.readline()
        run = uuid.uuid4().hex
        hosts = [start(bed, node, setup, fault, run, Path(name)) for node in places]
        alive = Life(setup, bed, Path(name), run, hosts, keeper)
        until = time.time() + LIMIT
        while not all(map(updates_of, hosts)):
            if time.time() > until or any(one.ended for one in hosts):
                raise TimeoutError(alive.outcome(until, False).printed)
            time.sleep(0.05)
        try:
            yield alive
        finally:
            bed.__exit__()  # idempotent; ends what still runs
            for one in hosts:
                one.join()


def start(bed: Testbed, node: Node, setup: str, fault: str, run: str, folder: Path) -> Started:
    """The rank of a host, or a watch that starts it."""
    autopsy = folder / f"host{node.index}"
    autopsy.mkdir()
    env = {"FAULTS_RUN": run, "FAULTS_FOLDER": str(autopsy), "COLUMNS": "2000"}
    env |= {"MASTER_ADDR": bed.nodes[-1].address, "MASTER_PORT": str(STORE_PORT)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    script = [SCRIPT, setup, fault]
    if setup == ACCELERATE:
        env |= {"RANK": str(node.index), "WORLD_SIZE": str(RANKS)}
        env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        argv = [sys.executable, *script]
    else:
        meet = ["--meet", f"{bed.nodes[0].address}:{MEETING_PORT}", "--hosts", str(RANKS)]
        meet += ["--host-rank", str(node.index), "--folder", str(autopsy / "autopsy")]
        watch = [sys.executable, "-m", "slipstream", "watch", "--timeout", TIMEOUT, *meet, "--"]
        place = ["--nnodes", str(RANKS), "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        place += ["--rdzv-endpoint", f"{bed.nodes[-1].address}:{STORE_PORT}", "--rdzv-id", "faults"]
        place += ["--rdzv-conf", "is_host=0", "--local-addr", node.address]
        argv = [*watch, sys.executable, "-m", "torch.distributed.run", *place, *script]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = bed.popen(node, argv, env, **pipe, text=True, errors="replace")
    assert process.stdout is not None
    return Started(process, process.stdout)


def lose_links(setup: str) -> dict[str, Outcome]:
    """The first life: a link that comes back, slow links, and one that does not come back."""
    with life(setup, LINKS) as alive:
        alive.link("down")
        time.sleep(CUT_SECONDS)
        alive.link("up")
        outcomes = {CUT: alive.trains_on(ALARM_SECONDS)}
        alive.rate(RATE // 100)
        outcomes[SLOW] = alive.trains_on(ALARM_SECONDS)
        alive.rate(RATE)
        begun = time.time()
        alive.link("down")
        alive.wait_for_end()
        right = all(named(one.text) == {BAD} and one.code for one in alive.others)
        outcomes[GONE] = alive.outcome(begun, right and bool(alive.hosts[BAD].code), ended=True)
    return outcomes


def lose_store(setup: str) -> dict[str, Outcome]:
    """The second life: the store ends, and the training goes on to its own end."""
    with life(setup, STORE) as alive:
        begun = time.time()
        alive.keeper.kill()
        alive.wait_for_end()
        goes_on = setup == ACCELERATE
        right = all(not named(one.text) and (one.code == 0) is goes_on for one in alive.hosts)
        outcome = alive.outcome(begun, right, ended=True)
    if goes_on:
        return {LOST: replace(outcome, seconds=None)}
    return {LOST: replace(outcome, says=(ERROR.findall(outcome.printed) or [""])[-1])}


LIVES: dict[str, Callable[[str], dict[str, Outcome]]] = {"links": lose_links, "store": lose_store}


def lived(name: str, setup: str) -> dict[str, Outcome]:
    """The outcomes of a life; one in which ranks did not come to train is wrong in all."""
    try:
        return LIVES[name](setup)
    except TimeoutError as error:
        return {fault: Outcome(None, False, 0, "", str(error)) for fault in FAULTS[name]}


def kind_of(setup: str, fault: str) -> str:
    """Whether a fault is to end the run."""
    ends = fault == GONE or (fault == LOST and setup != ACCELERATE)
    return "named" if ends else "harmless"


def main() -> None:
    """Live both lives in every setup."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=SETUPS)
    parser.add_argument("--lives", nargs="+", choices=LIVES, default=LIVES)
    parser.add_argument("--at-once", type=int, default=4, help="runs that go on at a time")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    console, rows = Console(stderr=True), []
    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(args.at_once) as pool:
        for setup in args.setups:
            for name in args.lives:
                runs = pool.map(lived, [name] * args.runs, [setup] * args.runs)
                lives = [*track(runs, f"{setup}, {name}", total=args.runs, console=console)]
                for fault in FAULTS[name]:
                    outcomes = [one[fault] for one in lives]
                    for one in outcomes:
                        if not one.right or one.left:
                            console.print(f"{fault}: wrong, {one.left} left:", style="red")
                            console.print(one.printed, markup=False, highlight=False)
                    rows.append(row_of(setup, fault, kind_of(setup, fault), outcomes))
                    console.print(rows[-1])
    entry = {"at_once": args.at_once, "rows": [asdict(row) for row in rows]}
    finish(args.json, "network_faults", entry)


if __name__ == "__main__":
    main()
