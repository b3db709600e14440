"""What can be said without starting a rank: wrong specifications, causes, tracebacks in logs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from slipstream.cluster import _agent, launcher
from slipstream.cluster._ends import End, Ends
from slipstream.cluster._logs import LONGEST_START, RankLogs, _Tail, last_traceback
from slipstream.cluster.launcher import LaunchSpec, RankFailure, blame
from slipstream.errors import LaunchError
from tests.harness.ranks import free_port

ROOT = Path(__file__).parents[2]
TWO_NODES = {"nnodes": 2, "rdzv_endpoint": "node0:29500"}

WRONG = {
    "no ranks": ({"nproc": 0}, "--nproc 0"),
    "no nodes": ({"nnodes": 0}, "--nnodes 0"),
    "restarts": ({"max_restarts": -1}, "--max-restarts -1"),
    "nowhere to meet": ({"nnodes": 2}, "--nnodes 2 needs --rdzv-endpoint"),
    "node rank": (TWO_NODES | {"node_rank": 2}, "--node-rank 2 with --nnodes 2.*0..1"),
    "node rank of one": ({"node_rank": 1}, "--node-rank 1 with --nnodes 1.*0..0"),
    "no port": (TWO_NODES | {"rdzv_endpoint": "node0"}, "'node0' is not HOST:PORT"),
    "no host": (TWO_NODES | {"rdzv_endpoint": ":29500"}, "':29500' is not HOST:PORT"),
    "a URL": (
        TWO_NODES | {"rdzv_endpoint": "tcp://node0:29500"},
        "'tcp://node0:29500' is not HOST",
    ),
    "port": (TWO_NODES | {"rdzv_endpoint": "node0:70000"}, "'node0:70000' is not HOST:PORT"),
    "fixed and restarted": (TWO_NODES | {"node_rank": 0, "max_restarts": 1}, "leave out one"),
    "no script": ({"script": "nowhere.py"}, "'nowhere.py' does not exist"),
    "a strategy": (
        {"script": str(ROOT / "mkdocs.yml")},
        "mkdocs.yml' is no Python file; a strategy goes before the script: --strategy FILE",
    ),
    "a folder": ({"script": "."}, "'.' is not a file"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_specification_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        LaunchSpec(**({"script": __file__, "log_dir": Path("unused")} | changes))


def test_a_module_is_not_looked_up_as_a_file() -> None:
    assert LaunchSpec(script="a.module", module=True, log_dir=Path("unused")).module


@pytest.mark.parametrize(
    ("returncode", "exit_code", "cause"),
    [
        (3, 3, "exited with code 3"),
        (-9, 137, "was killed by SIGKILL (maybe out of memory)"),
        (-11, 139, "was killed by SIGSEGV"),
        (-40, 168, "was killed by signal 40"),
    ],
)
def test_exit_codes_are_those_of_a_shell(returncode: int, exit_code: int, cause: str) -> None:
    failure = RankFailure(1, 1, "here", returncode, Path("rank1.log"))
    assert (failure.exit_code, failure.cause) == (exit_code, cause)


def test_an_excerpt_is_the_traceback_of_an_error_and_the_end_of_a_killed_log(
    tmp_path: Path,
) -> None:
    log = tmp_path / "rank1.log"
    log.write_text("x" * 100_000 + f"\n{FIRST}" + "".join(f"step {n}\n" for n in range(30)))
    assert RankFailure(1, 1, "here", 1, log).excerpt().startswith("Traceback")
    killed = RankFailure(1, 1, "here", -9, log).excerpt().splitlines()
    assert killed == [f"step {n}" for n in range(10, 30)]


FIRST = "Traceback (most recent call last):\n  File 'a', line 1\nKeyError: 1\n"
SECOND = "Traceback (most recent call last):\n  File 'b', line 2\nValueError: two\nlines\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
GROUP = "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: both\n"
PREFIXED = "".join(f"[rank1]: {line}\n" if line else "[rank1]:\n" for line in SECOND.splitlines())

LOGS = {
    "one": (f"step 1\n{FIRST}", FIRST),
    "the last of two": (f"{FIRST}handled\n{SECOND}", SECOND),
    "caused by": (f"step 1\n{FIRST}{CAUSE}{SECOND}", f"{FIRST}{CAUSE}{SECOND}"),
    "in the handling of": (f"{FIRST}{CONTEXT}{SECOND}", f"{FIRST}{CONTEXT}{SECOND}"),
    "an unrelated one before a chain": (f"{SECOND}{FIRST}{CAUSE}{SECOND}", FIRST + CAUSE + SECOND),
    "a group": (f"step 1\n{GROUP}", GROUP),
    "prefixed by torch": (f"step 1\n{PREFIXED}", SECOND),
    "none": ("step 1\nSyntaxError: invalid\n\n", "step 1\nSyntaxError: invalid"),
    "empty": ("", ""),
}


@pytest.mark.parametrize(("log", "expected"), LOGS.values(), ids=LOGS)
def test_the_last_traceback_with_its_chain_is_found(log: str, expected: str) -> None:
    assert last_traceback(log) == expected.rstrip()


PEER_LEFT = (
    "Traceback (most recent call last):\n  File 'a', line 1\n"
    "slipstream.errors.ExchangeError: rank 0, step 3: the exchange of segment 1 of 2 failed.\n"
    "[W1122] a warning of the backend at its end\n"
)
ABORTED = "terminate called after throwing an instance of 'gloo::IoException'\n  by peer\n"
Ended = tuple[int, int, float, str]
"""Rank, code, time, log."""
BLAMED: dict[str, tuple[list[Ended], int, int, bool]] = {
    "an error of its own": ([(0, 1, 1.0, PEER_LEFT), (1, 1, 2.0, FIRST)], 1, 1, False),
    "the earliest of two": ([(0, 1, 2.0, FIRST), (1, 1, 1.0, SECOND)], 1, 1, False),
    "a kill": ([(0, 1, 1.0, PEER_LEFT), (2, -9, 1.5, "")], 2, 137, False),
    "a code without an error": ([(0, 1, 1.0, PEER_LEFT), (1, 3, 2.0, "bye\n")], 1, 3, False),
    "who left with code 0": ([(0, 1, 2.0, PEER_LEFT), (1, 0, 1.0, "")], 1, 1, False),
    "not who was done": ([(0, 1, 2.0, FIRST), (1, 0, 1.0, "")], 0, 1, False),
    "not who was stopped": ([(0, -15, 1.0, ""), (1, 1, 2.0, FIRST)], 1, 1, False),
    "not who was aborted for it": ([(0, -6, 1.0, ABORTED), (1, -9, 1.1, "")], 1, 137, False),
    "an abort of its own": ([(0, -6, 1.1, "free(): bad"), (1, 1, 1.0, PEER_LEFT)], 0, 134, False),
    "who was stopped while leaving": (
        [(0, 1, 1.0, PEER_LEFT), (1, -15, 2.0, ""), (1, 0, 1.5, "")],
        *(1, 1, False),
    ),
    "who was stopped, not who was done": ([(0, 0, 1.0, ""), (1, -15, 2.0, "")], 1, 143, False),
    "not who left for it": ([(0, 1, 1.0, PEER_LEFT), (1, 0, 1.5, PEER_LEFT)], 0, 1, True),
    "nobody here": ([(0, 1, 2.0, PEER_LEFT), (1, 1, 1.0, PEER_LEFT)], 1, 1, True),
}


@pytest.mark.parametrize(("ends", "rank", "code", "missing"), BLAMED.values(), ids=BLAMED)
def test_who_began_it_is_blamed(
    ends: list[Ended], rank: int, code: int, missing: bool, tmp_path: Path
) -> None:
    noted = []
    for number, returncode, at, text in ends:
        log = tmp_path / f"rank{number}.log"
        log.write_text(f"step 1\n{text}")
        noted.append(End(number, number, "here", returncode, at, str(log)))
    failure = blame(noted)
    assert (failure.rank, failure.exit_code, failure.missing) == (rank, code, missing)
    assert ("misses another rank" in failure.cause) == missing
    assert ("while the others were still training" in failure.cause) == (failure.returncode == 0)


def test_notes_of_an_earlier_run_on_more_ranks_go(tmp_path: Path) -> None:
    kept = ["rank1.log", "rank3.log", "rank3.json"]
    for name in (*kept, "rank0.exit", "rank1.exit", "rank3.exit", "rank12.restart1.leaving"):
        (tmp_path / name).write_text("")
    ends = Ends()
    env = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
    ends.expect({0: env}, {0: tmp_path / "rank0.log"})
    ends.close(forget=False)
    # that of rank 1 is for its own launcher to remove
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "rank1.exit"])


Process = subprocess.Popen[bytes]


@contextmanager
def two_ranks(folder: Path) -> Iterator[tuple[RankLogs, list[Process]]]:
    """Processes that stand for ranks, whose ends are noted; each lives until its input ends."""
    logs = RankLogs(folder, {})
    common = {"WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
    logs.paths = {rank: folder / f"rank{rank}.log" for rank in range(2)}
    for log in logs.paths.values():
        log.write_text("")
    logs.ends.expect({rank: {"RANK": f"{rank}", **common} for rank in range(2)}, logs.paths)
    ranks = [subprocess.Popen(["sh", "-c", "read a; exit $a"], stdin=-1) for _ in range(2)]
    try:
        logs.ends.follow(dict(enumerate(ranks)))
        yield logs, ranks
    finally:
        for rank in ranks:
            rank.communicate()


@pytest.mark.parametrize("code", [0, 3])
def test_an_end_is_noted_also_where_the_agent_is_faster(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = os.waitid

    def late(kind: int, pid: int, options: int) -> Any:
        next(rank for rank in ranks if rank.pid == pid).wait()
        return look(kind, pid, options)

    with two_ranks(tmp_path) as (logs, ranks):
        monkeypatch.setattr(os, "waitid", late)
        for rank, number in zip(ranks, (1, code), strict=True):
            rank.communicate(b"%d\n" % number)
        failure = ProcessFailure(0, ranks[0].pid, 1, os.devnull)
        logs.paths[0].write_text(PEER_LEFT)
        found = launcher._first_failure({0: failure}, logs, several=False)
    assert found is not None
    assert (found.rank, found.returncode) == (1, code)
    logs.ends.close(forget=True)
    assert not [*tmp_path.glob("*.exit")]


def test_of_two_that_fail_within_a_second_the_first_is_blamed(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (logs, ranks):
        for rank in (1, 0):
            ranks[rank].communicate(b"3\n")
            while not (tmp_path / f"rank{rank}.exit").exists():
                time.sleep(0.01)
        failures = {rank: ProcessFailure(rank, ranks[rank].pid, 3, os.devnull) for rank in range(2)}
        found = launcher._first_failure(failures, logs, several=False)
    assert found is not None
    assert found.rank == 1


def test_a_line_without_an_end_is_copied_and_not_kept(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    tail = _Tail(tmp_path / "rank0.log")
    bar = b"\r" + 30 * b"#"
    try:
        for _ in range(100):
            tail._take(bar)
            assert len(tail._line) <= LONGEST_START
        for piece in (b"\n[rank0]: Trace", b"back (most recent call last):\n", b"  ..."):
            tail._take(piece)
    finally:
        tail.stop(failed=True)
    assert capsysbinary.readouterr().out == 100 * bar + b"\n[rank0]: Trace"


def test_ranks_go_on_where_stdout_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does
    with os.fdopen(writer, "w") as nobody_reads:
        monkeypatch.setattr(sys, "stdout", nobody_reads)
        tail = _Tail(tmp_path / "rank0.log")
        for line in (b"one\n", b"two\n"):
            tail._take(line)
        tail.stop(failed=False)
    said = f"slipstream: stdout: Broken pipe: rank 0 goes on, and what it prints is in {tmp_path}"
    assert capsys.readouterr().err == f"{said}/rank0.log\n"


def test_nothing_is_copied_to_a_stdout_that_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    tail = _Tail(tmp_path / "rank0.log")
    tail._take(b"one\n")
    tail.stop(failed=False)


def test_what_a_pipe_takes_later_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent has made its pipe non-blocking, which is full for a while."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    taken: list[bytes] = []

    def read() -> None:
        time.sleep(0.3)  # until the pipe is full
        while piece := os.read(reader, 4096):
            taken.append(piece)

    lines = [f"line {number:04}\n".encode() * 400 for number in range(60)]
    thread = threading.Thread(target=read)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        tail = _Tail(tmp_path / "rank0.log")
        thread.start()
        for line in lines:
            tail._take(line)
        tail.stop(failed=False)
    thread.join()
    os.close(reader)
    assert b"".join(taken) == b"".join(lines)


def test_a_node_that_is_one_too_many_is_told_that_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Agent:
        def run(self) -> None:
            """Returns nothing, as torch's does for a node that was one too many (2.13)."""

    class Meeting:
        def shutdown(self) -> None:
            pass

    monkeypatch.setattr(_agent, "NodeMeeting", lambda *_: Meeting())
    monkeypatch.setattr(_agent, "_agent", lambda *_: Agent())
    (tmp_path / "train.py").touch()
    spec = LaunchSpec(
        script=str(tmp_path / "train.py"),
        nnodes=2,
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        log_dir=tmp_path / "logs",
    )
    with pytest.raises(LaunchError, match="has ended"):
        launcher.run(spec)
