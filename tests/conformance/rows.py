"""Runs the cells of a row on ranks: all in the same processes, and dangerous ones in forks.

Ranks tell each other after every cell how it ended, over a socket: after one that did not end
well on all of them, they make a new process group. A rank that waits longer ends the other.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import Empty, Queue
from unittest import mock

from slipstream.checks import heartbeat
from tests.conformance.applies import not_applicable
from tests.conformance.cell import RANKS, Verdict, judge
from tests.conformance.habit import Habit, all_habits
from tests.conformance.techniques import TECHNIQUES, Technique
from tests.harness.ranks import RankFailure, Ranks

PATIENCE = 100.0
"""Seconds that a rank may take longer than the other for a cell."""

Outcomes = dict[str, dict[str, Verdict]]
"""By technique and habit."""


def run_matrix(
    techniques: Sequence[Technique] = TECHNIQUES,
    habits: Sequence[Habit] | None = None,
    pools: int = 3,
    on_row: Callable[[str, dict[str, Verdict]], None] = lambda name, row: None,
) -> Outcomes:
    """Every cell of these rows and columns. Several pools of ranks work side by side, since ranks
    wait for each other more than they compute."""
    habits = all_habits() if habits is None else habits
    todo: Queue[Technique] = Queue()
    for technique in techniques:
        todo.put(technique)
    outcomes: Outcomes = {}

    def work() -> None:
        with Ranks(RANKS) as ranks:
            while True:
                try:
                    technique = todo.get_nowait()
                except Empty:
                    return
                outcomes[technique.name] = run_row(ranks, technique, habits)
                on_row(technique.name, outcomes[technique.name])

    threads = [threading.Thread(target=work) for _ in range(min(pools, len(techniques)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {t.name: outcomes[t.name] for t in techniques}


def run_row(ranks: Ranks, technique: Technique, habits: Sequence[Habit]) -> dict[str, Verdict]:
    found: dict[str, Verdict] = {}
    waiting = []
    for habit in habits:
        if reason := not_applicable(technique, habit):
            found[habit.name] = Verdict("not applicable", reason)
        else:
            waiting.append(habit)
    waiting.sort(key=lambda habit: not habit.apart)  # forks come before there are threads
    while waiting:
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            names = [habit.name for habit in waiting]
            problem = ""
            try:
                ranks.run(serve, technique, names, folder, connect=False, timeout=3600)
            except RankFailure as failure:
                problem = " | ".join(
                    e if isinstance(e, str) else f"{type(e).__name__}: {e}"
                    for e in failure.errors.values()
                )
            files = [Path(folder, f"rank{rank}") for rank in range(RANKS)]
            each = [
                [Verdict(*json.loads(line)) for line in file.read_text().splitlines()]
                if file.exists()
                else []
                for file in files
            ]
        done = min(map(len, each))
        for habit, *verdicts in zip(waiting, *each, strict=False):
            found[habit.name] = joined(verdicts)
        if done < len(waiting):
            found[waiting[done].name] = Verdict("wrong", f"hangs or dies: {problem[:200]}")
        waiting = waiting[done + 1 :]
    return {habit.name: found[habit.name] for habit in habits}


def joined(verdicts: Sequence[Verdict]) -> Verdict:
    """What became of a cell on all ranks."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if wrong := [v for v in verdicts if v.outcome == "wrong"]:
        return wrong[0]
    if outcomes == {"equal"}:
        if len({verdict.digest for verdict in verdicts}) > 1:
            return Verdict("wrong", "the ranks' models differ")
        return Verdict("equal")
    if outcomes == {"refused"}:
        first = next((v for v in verdicts if not v.follows), None)
        if first is None:
            return Verdict("wrong", f"no rank says why: {verdicts[0].text}")
        return Verdict("refused", first.text)
    return Verdict(
        "wrong", "one rank refuses, the other goes on: " + " | ".join(v.text for v in verdicts)
    )


# In a rank.


def serve(technique: Technique, habit_names: Sequence[str], folder: str) -> None:
    """The cells of a row, each verdict a line in a file: what is there survives a rank's death."""
    rank = int(os.environ["RANK"])
    by_name = {habit.name: habit for habit in all_habits()}
    store = f"{folder}/store"
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # loaders have workers
    gc.freeze()  # what is there stays; collecting is cheap
    with (
        mock.patch.object(heartbeat, "ANSWER_SECONDS", 0.5),  # where nobody answers
        _peer(rank, f"{folder}/socket") as peer,
        open(f"{folder}/rank{rank}", "a") as file,
        technique.around(),
    ):
        technique.run_in_one_process()
        group = 0
        for number, habit in enumerate(by_name[name] for name in habit_names):
            if habit.apart:
                verdict = _forked(technique, habit, rank, f"{store}-apart{number}")
                clean = True
            else:
                if not group:
                    group = number + 1
                    _connect(rank, f"{store}{group}")
                faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)
                verdict = judge(technique, habit, rank)
                faulthandler.cancel_dump_traceback_later()
                clean = verdict.outcome == "equal"
            if not clean:
                _disconnect()
            file.write(json.dumps(verdict) + "\n")
            file.flush()
            if not _agree(peer, clean):
                _disconnect()
                group = 0
        _disconnect()


def _connect(rank: int, path: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=PATIENCE),
    )
    dist.barrier()


def _disconnect() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
        gc.freeze()  # plain sides, and what was imported: none of it need be looked through again


def _agree(peer: Connection, clean: bool) -> bool:
    """Whether the cell ended well on all ranks; ends a rank that does not come."""
    peer.send((clean, os.getpid()))
    if not peer.poll(PATIENCE):
        raise TimeoutError("the other rank does not come back from this cell")
    theirs, _ = peer.recv()
    return clean and bool(theirs)


@contextlib.contextmanager
def _peer(rank: int, address: str) -> Iterator[Connection]:
    if rank == 0:
        with Listener(address, "AF_UNIX") as listener, listener.accept() as connection:
            yield connection
        return
    for _ in range(1000):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            with Client(address, "AF_UNIX") as connection:
                yield connection
            return
        time.sleep(0.01)
    raise TimeoutError("the first rank is not there")


def _forked(technique: Technique, habit: Habit, rank: int, path: str) -> Verdict:
    """The cell in a process of its own, whose end closes all its connections."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            _connect(rank, path)
            verdict = judge(technique, habit, rank)
            os.write(writing, json.dumps(verdict).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, _ = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.005)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    return Verdict(*json.loads(answer)) if answer else Verdict("wrong", "hangs or dies")


def every(outcomes: Outcomes) -> Iterator[tuple[str, str, Verdict]]:
    for technique, row in outcomes.items():
        for habit, verdict in row.items():
            yield technique, habit, verdict
