"""Stacks of other processes: read from what they write, and asked of real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.checks.dumps import MAIN, SIGNAL, Dump, Dumps, exchange_of
from slipstream.checks.stacks import Frame
from tests.checks.test_flight_record import entry, record

LIB = "/opt/env/lib/python3.12/site-packages/torch"
DDP = f"""\
Thread 0x00007f1cfd13d6c0 (most recent call first):
  File "/opt/env/lib/python3.12/threading.py", line 982 in run
  File "/opt/env/lib/python3.12/threading.py", line 1002 in _bootstrap

Current thread 0x00007f1cfdc78b80 (most recent call first):
  File "{LIB}/autograd/graph.py", line 979 in _engine_run_backward
  File "{LIB}/autograd/__init__.py", line 395 in backward
  File "{LIB}/_tensor.py", line 623 in backward
  File "/home/me/train.py", line 63 in main
  File "/home/me/train.py", line 69 in <module>
"""


def test_a_dump_is_read():
    dump = Dump.parse(DDP)
    assert [*dump.threads] == ["thread 0x00007f1cfd13d6c0", MAIN]
    assert dump.place.line == "train.py:63 in main"
    assert dump.exchange == "backward"
    assert dump.stacks[MAIN][0] == "train.py:69 in <module>: "
    assert dump.stacks[MAIN][-1].startswith("torch/autograd/graph.py:979 in _engine_run_backward")
    moved = Dump.parse(DDP.replace("line 982", "line 983"))
    assert moved.key != dump.key == Dump.parse(DDP).key


def test_threads_with_names_and_without_a_current_one_are_read():
    named = DDP.replace("Current thread 0x00007f1cfdc78b80", "Thread 0x00007f1cfdc78b80 [python]")
    dump = Dump.parse(named.replace("6c0 (", "6c0 [loader] ("))
    assert [*dump.threads] == ["loader", MAIN]
    assert dump.exchange == "backward"


@pytest.mark.parametrize("text", ["", "\0\0", "Thread", '  File "a.py", line 3 in f'])
def test_what_is_no_dump_has_no_place(text):
    dump = Dump.parse(text)
    assert (dump.place.line, dump.exchange, dump.stacks) == ("", "", {})


def inner(*calls: str) -> list[Frame]:
    """Frames, the innermost first: ``FILE:NAME``; files of torch without its folder."""
    script = [Frame("/home/me/train.py", 1, "main")]
    named = [call.partition(":")[::2] for call in calls]
    return [Frame(file if file[0] == "/" else f"{LIB}/{file}", 1, f) for file, f in named] + script


@pytest.mark.parametrize(
    ("calls", "exchange"),
    [
        (["distributed/distributed_c10d.py:all_reduce"], "all_reduce"),
        (
            ["distributed/distributed_c10d.py:barrier", "distributed/c10d_logger.py:wrapper"],
            "barrier",
        ),
        (["_ops.py:__call__", "distributed/_functional_collectives.py:wait_tensor"], "wait_tensor"),
        (
            [
                "distributed/distributed_c10d.py:all_gather_into_tensor",
                "distributed/c10d_logger.py:wrapper",
                "distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_all_gather",
            ],
            "FSDP's all_gather_into_tensor",
        ),
        (["nn/parallel/distributed.py:_distributed_broadcast_coalesced"], "DistributedData"),
        # the user's own code, inside of torch's wrappers
        (["/home/me/model.py:forward", "nn/parallel/distributed.py:forward"], ""),
        (["/home/me/model.py:forward", "distributed/fsdp/fully_sharded_data_parallel.py:f"], ""),
        (["distributed/elastic/agent/server/api.py:_invoke_run"], ""),
        (["distributed/checkpoint/filesystem.py:write_data"], ""),
        (["utils/data/dataloader.py:_try_get_data"], ""),
        (["/opt/env/lib/python3.12/threading.py:wait"], ""),
        ([], ""),
    ],
)
def test_an_exchange_is_found_from_the_innermost_calls(calls, exchange):
    found = exchange_of(inner(*calls))
    assert found.startswith(exchange) if exchange else not found


def test_waiting_for_a_handle_is_an_exchange(tmp_path):
    (tmp_path / "train.py").write_text("handle.wait()\nhandle.launch()\n")
    waits, launches = (Frame(str(tmp_path / "train.py"), line, "main") for line in (1, 2))
    assert exchange_of([waits])
    assert not exchange_of([launches])


# Real processes.

ASLEEP = "import time; print(flush=True); time.sleep(1000)"
HOLDS_THE_GIL = "import re; print(flush=True); re.match('(a+)+b', 'a' * 60)"
FORKED = """
import os, time
if os.fork():
    os.wait()
print(os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("code", "inner"),
    [(ASLEEP, "<module>"), (HOLDS_THE_GIL, "match"), (FORKED, "<module>")],
    ids=["asleep", "holds the GIL", "forked"],
)
def test_a_process_writes_its_stacks(tmp_path, code, inner):
    dumps = Dumps(tmp_path)
    environ = dumps.environment(os.environ)
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE) as process:
        pid = process.pid
        try:
            pid = int(process.stdout.readline().strip() or pid)
            while dumps.of([pid])[pid].threads[MAIN][0].name != inner:  # on its way there
                assert process.poll() is None
            found = dumps.of([pid])[pid]  # does not begin with the one before
            assert found.threads[MAIN][0].name == inner
            assert process.poll() is None
        finally:
            os.kill(pid, signal.SIGKILL)
            process.kill()


def test_the_users_own_sitecustomize_runs_and_others_are_never_asked(tmp_path):
    for name in ("dumps", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("import sys\nsys.own = 'ran'\n")
    dumps = Dumps(tmp_path / "dumps")
    environ = dumps.environment({**os.environ, "PYTHONPATH": str(tmp_path / "own")})
    code = "import sys; print(sys.own, sys.modules['sitecustomize'].__file__, sys.path)"
    argv = [sys.executable, "-c", code]
    said = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.startswith(f"ran {tmp_path}/own/sitecustomize.py")
    assert str(tmp_path / "dumps") not in said.stdout
    assert said.stderr == ""
    assert dumps.of([os.getpid()]) == {}  # this process would end of the signal


def test_a_broken_sitecustomize_of_the_user_is_told_as_ever(tmp_path):
    for name in ("dumps", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("import not_there\n")
    environ = Dumps(tmp_path / "dumps").environment({"PYTHONPATH": str(tmp_path / "own")})
    argv = [sys.executable, "-c", "print('goes on')"]
    said = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    assert said.stdout == "goes on\n"
    assert "No module named 'not_there'" in said.stderr


def test_the_folder_may_be_gone(tmp_path: Path):
    dumps = Dumps(tmp_path)
    environ = dumps.environment({})
    tmp_path.chmod(0o500)
    argv = [sys.executable, "-c", "print('goes on')"]
    said = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    tmp_path.chmod(0o700)
    assert (said.stdout, said.stderr) == ("goes on\n", "")


def test_a_process_that_is_asked_as_it_ends_still_ends_well(tmp_path: Path):
    """Its interpreter is gone, and with it the handler; only libc still runs."""
    code = """
import ctypes

libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.__cxa_atexit(libc.sleep, ctypes.c_void_p(2), None)
libc.__cxa_atexit(libc.perror, ctypes.c_void_p(libc.strdup(b"gone")), None)
"""
    environ = Dumps(tmp_path).environment(os.environ)
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE) as process:
        assert process.stderr.readline().startswith(b"gone")
        os.kill(process.pid, SIGNAL)
    assert process.returncode == 0


# Collectives, of torch's flight recorder.

TELLS = """
import sys, types, time
c10d = sys.modules["torch._C._distributed_c10d"] = types.ModuleType("c10d")  # torch < 2.15 has none
def dump(backend):
    if backend != "gloo":
        raise RuntimeError("no such backend")
    return b'%s'
c10d._dump_fr_trace_json = dump
print(flush=True)
time.sleep(1000)
"""


def test_a_rank_tells_its_collectives_as_often_as_it_is_asked(tmp_path: Path):
    dumps = Dumps(tmp_path, tells=True)
    environ = {**dumps.environment(os.environ), "RANK": "0"}
    argv = [sys.executable, "-c", TELLS % json.dumps(record(entry(3)))]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            for _ in range(3):
                while not (answers := dumps.collectives([process.pid])):  # it answers still
                    assert process.poll() is None
                [found] = answers[process.pid]
                assert (found.number, found.what) == (3, "all_reduce of 8 float")
            assert [*dumps.of([process.pid])[process.pid].threads] == [MAIN], "not its own"
        finally:
            process.kill()


def test_others_have_no_collectives_to_tell(tmp_path: Path):
    dumps = Dumps(tmp_path, tells=True)
    environ = dumps.environment({k: v for k, v in os.environ.items() if k != "RANK"})
    argv = [sys.executable, "-c", ASLEEP]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            assert dumps.collectives([process.pid, 0]) == {}
        finally:
            process.kill()
