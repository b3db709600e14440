"""``slipstream watch`` around scripts that do not know slipstream: runs that hang end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from slipstream.checks import watched_host
from slipstream.checks.autopsy import Autopsy
from slipstream.checks.dumps import Dumps, records_collectives
from slipstream.checks.processes import ranks_below, uses_device
from slipstream.checks.watched_host import WatchedHost
from slipstream.cli import main, watch as command
from slipstream.cli.watch import _connect, _running, _watched
from slipstream.cluster import listen
from slipstream.errors import ClusterError, LaunchError
from tests.harness.command_line import COMMAND_LINE
from tests.harness.ranks import free_port
from tests.harness.scripts import Script

HERE = Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PLAIN = [str(HERE / "two_ranks.py")]  # costs an import of torch less
WATCH = [sys.executable, "-m", "slipstream", "watch"]


class Run(NamedTuple):
    code: int
    stdout: str
    stderr: str


def watched(folder: Path, launcher: list[str], *words: str) -> Run:
    """Run the faulty training under the watch."""
    command = [sys.executable, *launcher, str(HERE / "faulty.py"), *words]
    options = ["--timeout", "8s", "--folder", str(folder / "autopsy")]
    environ = {"COLUMNS": "400", "WATCHED_BY": str(folder), "MASTER_PORT": str(free_port())}
    files = folder / "stdout", folder / "stderr"
    watch = Script(
        COMMAND_LINE, "watch", *options, "--", *command, log=files[0], errors=files[1], env=environ
    )
    return Run(watch.wait(170), *(file.read_text() for file in files))


def left_of(folder: Path) -> list[int]:
    """Processes of a run that still live."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"WATCHED_BY={folder}\0".encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
        except OSError:
            pass
    return found


@pytest.mark.parametrize(
    ("launcher", "words", "blamed", "said"),
    [
        (
            TORCHRUN,
            ["sleep", "ddp"],
            (1,),
            "rank 1 (host {host}) never entered backward: it waits in faul",
        ),
        (PLAIN, ["load"], (1,), "never entered all_reduce: it waits for data in faulty.py:"),
        (
            PLAIN,
            ["stop"],
            (1,),
            "rank 1 (host {host}) is silent: its process is stopped; rank 0 wa",
        ),
        (PLAIN, ["order"], None, "they will never meet"),
        (PLAIN, ["sleep", "sharded"], (1,), "rank 1 (host {host}) never entered FSDP's "),
    ],
    ids=["sleep", "load", "stop", "order", "sharded"],
)
def test_a_run_that_hangs_ends_and_names_the_rank(tmp_path, launcher, words, blamed, said):
    run = watched(tmp_path, launcher, *words)
    assert run.code == 75, run.stderr
    autopsy = Autopsy.read(tmp_path / "autopsy")
    assert said.format(host=os.uname().nodename) in autopsy.verdict
    assert blamed in (None, autopsy.blamed)
    assert autopsy.verdict in run.stderr
    assert f"(slipstream autopsy {tmp_path / 'autopsy'})" in run.stderr
    assert run.stderr.count("HangError") == 1
    tells = records_collectives(torch.__version__)
    seen = "stacks and torch's flight recorder" if tells else "stacks alone"
    assert f"collectives are seen from {seen}" in run.stderr
    assert left_of(tmp_path) == []
    if words == ["order"]:
        given = " of 3 float" if tells else ""
        assert f"is in broadcast{given} (waits in faulty.py:" in autopsy.verdict
        assert f"rank 1 in all_reduce{given} (waits in faulty.py:" in autopsy.verdict
        assert all(bool(case.collectives) == bool(given) for case in autopsy.cases.values())


def test_a_rank_that_ends_before_the_others_fail_is_named(tmp_path):
    run = watched(tmp_path, PLAIN, "exit")
    assert run.code == 1, run.stderr
    host = os.uname().nodename
    told = re.search("slipstream watch: (.* ended first, .*)", run.stderr)
    assert told, run.stderr
    assert told[1].startswith(f"rank 1 (host {host}) ended first, with code 0; rank 0 "), run.stderr
    assert left_of(tmp_path) == []


def test_ranks_that_all_sleep_on_purpose_do_not_hang(tmp_path):
    run = watched(tmp_path, PLAIN, "pause")  # for longer than the timeout
    assert run.code == 0, run.stderr
    assert run.stdout.count("is done") == 2
    assert "HangError" not in run.stderr
    assert not (tmp_path / "autopsy").exists()


def test_a_command_that_fails_keeps_its_code(tmp_path):
    code = "import os, sys; print(os.getpid()); print('why', file=sys.stderr); sys.exit(9)"
    argv = [*WATCH, "--folder", str(tmp_path / "autopsy"), "--", sys.executable, "-c", code]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert run.returncode == 9
    assert int(run.stdout)
    assert run.stderr.endswith("why\n")
    assert not (tmp_path / "autopsy").exists()


def test_a_signal_is_passed_on():
    code = "print('begun', flush=True); import time; time.sleep(1000)"
    argv = [*WATCH, "--", sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"begun\n"
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--timeout", "30"], "--timeout '30': must be a time with its unit"),
        (["--folder", __file__], "test_watch.py: cannot be written; choose another place"),
        (["--folder", f"{__file__}/autopsy"], "autopsy: cannot be written; choose another place"),
        (["--hosts", "2"], "need --meet HOST:PORT"),
        (["--hosts", "2", "--host-rank", "2", "--meet", "a:1"], "must be 0..1"),
        (["--hosts", "2", "--meet", "node0"], "'node0' is not HOST:PORT"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(words, problem):
    result = CliRunner().invoke(main.app, ["watch", *words, "--", "no-such-program"])
    assert isinstance(result.exception, LaunchError)
    assert problem in str(result.exception)


# Ranks among processes.

TORCH = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1"}
SLURM |= {"SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "a"}


def fake(proc: Path, pid: int, children: list[int], **environ: str) -> None:
    (proc / f"{pid}/task/{pid}").mkdir(parents=True)
    (proc / f"{pid}/task/{pid}/children").write_text(" ".join(map(str, children)))
    (proc / f"{pid}/environ").write_text("\0".join(f"{k}={v}" for k, v in environ.items()))


def test_ranks_are_the_topmost_processes_with_their_variables(tmp_path):
    fake(tmp_path, 1, [2], RANK="7", **TORCH)  # the watch itself
    fake(tmp_path, 2, [3, 4, 5], **SLURM)  # torchrun, in a step
    fake(tmp_path, 3, [6], RANK="0", **TORCH, **SLURM)
    fake(tmp_path, 4, [7], RANK="1", **TORCH, **SLURM)  # a shell
    fake(tmp_path, 5, [], RANK="1")  # half a description
    fake(tmp_path, 6, [], RANK="0", **TORCH, **SLURM)  # loads data
    fake(tmp_path, 7, [], RANK="1", **TORCH, **SLURM)
    found = ranks_below(1, lambda pid: pid != 4, tmp_path)
    assert {rank: process.pid for rank, process in found.items()} == {0: 3, 1: 7}
    assert found[1].environment.world_size == 2


def test_without_torchrun_the_tasks_of_a_step_are_ranks(tmp_path):
    fake(tmp_path, 1, [2])
    fake(tmp_path, 2, [3], **SLURM)
    fake(tmp_path, 3, [], **SLURM)
    assert ranks_below(1, lambda pid: True, tmp_path)[0].pid == 2
    assert ranks_below(3, lambda pid: True, tmp_path) == {}


def test_a_process_that_uses_a_device_is_seen(tmp_path):
    (tmp_path / "2/fd").mkdir(parents=True)
    (tmp_path / "2/fd/0").symlink_to("/dev/null")
    assert not uses_device(2, tmp_path)
    (tmp_path / "2/fd/1").symlink_to("/dev/nvidia0")
    assert uses_device(2, tmp_path)


SPINS = "print(flush=True)\nwhile True: pass"
MOVES = """
from time import sleep
print(flush=True)
def one(): sleep(0.1)
def other(): sleep(0.1)
while True: one(), other()
"""


@pytest.mark.parametrize(("code", "lives"), [(SPINS, False), (MOVES, True)], ids=["spins", "moves"])
def test_on_a_device_moving_on_is_the_sign_of_life(tmp_path, monkeypatch, code, lives):
    monkeypatch.setattr(watched_host, "uses_device", lambda *_: True)
    dumps = Dumps(tmp_path)
    environ = dumps.environment({**os.environ, "RANK": "0", **TORCH, "WORLD_SIZE": "1"})
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # it is where it stays
        assert dumps.knows(process.pid)
        host = WatchedHost(os.getpid(), "here", dumps, 0.05)
        host.look(began := time.monotonic())
        looks = moved = 0
        while time.monotonic() - began < 60 and (moved < 3 if lives else looks < 10):
            time.sleep(0.17)  # not in step with MOVES
            (state,) = host.look(time.monotonic()).ranks
            looks, moved = looks + 1, moved + (state.still == 0)
        process.kill()
    assert moved >= 3 if lives else not moved
    process.wait()
    assert host.look(time.monotonic()).ranks[0].ended == "ended its process"


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As SIGHUP is under nohup; the command has inherited that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _running(["true"], os.environ) as (child, passed_on):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
            child.wait()
        assert passed_on == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_comes_as_the_command_starts_reaches_it(monkeypatch) -> None:
    start = command._start

    def slow(*words):
        signal.raise_signal(signal.SIGUSR1)
        return start(*words)

    monkeypatch.setattr(command, "_start", slow)
    with _running(["sleep", "1000"], os.environ) as (child, _):
        assert child.wait(60) == -signal.SIGUSR1


class Broken:
    """A watch that fails."""

    interval = 0.01

    def beat(self, now: float) -> None:
        raise OSError("too many open files")


def test_a_watch_that_fails_leaves_the_command_alone(capsys) -> None:
    with _running(["sleep", "0.3"], os.environ) as (child, _):
        assert _watched(child, Broken(), None, None) is None
        assert child.returncode == 0
    assert "has failed, and watches no more: OSError: too many open" in capsys.readouterr().err


def test_a_watch_of_another_version_is_told(monkeypatch) -> None:
    monkeypatch.delenv(listen.TOKEN, raising=False)
    keeper = listen.open_store("127.0.0.1", 0)
    keeper.set("watch/version", "9.9")
    with pytest.raises(ClusterError, match=r"host 0 is of slipstream 9\.9, this one of .*install"):
        _connect("127.0.0.1", keeper.port, "watch")
