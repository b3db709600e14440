"""Signs of life: of real processes, and of tables as kernels write them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from slipstream.checks.own_view import OwnView, UpdateCount
from slipstream.checks.stacks import Frame, all_stacks, main_place, place_of
from slipstream.checks.vitals import Vitals, state, unsent, vitals

ASLEEP = "import sys, time; print(flush=True); time.sleep(1000)"
BUSY = "print(flush=True)\nwhile True: sum(range(1000))"
WRITING = """
import time
print(flush=True)
with open('/dev/null', 'wb', buffering=0) as file:
    while True:
        file.write(bytes(1 << 20)), time.sleep(0.2)
"""
WITH_A_BUSY_CHILD = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', {BUSY!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(flush=True)
try:
    time.sleep(1000)
finally:
    child.kill()
"""
RECEIVING = """
import socket, threading, time
ours, theirs = socket.socketpair()
def send():
    while True:
        theirs.send(b'x'), time.sleep(0.02)
threading.Thread(target=send, daemon=True).start()
print(flush=True)
while True:
    ours.recv(1)
"""


@pytest.mark.parametrize(
    ("script", "lives"),
    [
        (ASLEEP, False),
        (BUSY, True),
        (WRITING, True),
        (WITH_A_BUSY_CHILD, True),
        (RECEIVING, True),
    ],
    ids=["asleep", "busy", "writing", "with a busy child", "receiving"],
)
def test_a_process_shows_life_or_does_not(script, lives):
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before, began = vitals(process.pid), time.monotonic()
        shown = False
        while time.monotonic() - began < (30 if lives else 2) and shown != lives:
            time.sleep(0.5)
            seconds = time.monotonic() - began
            shown = vitals(process.pid).show_life_since(before, seconds)
        process.send_signal(signal.SIGINT)
        process.wait(90)
    assert shown == lives


def test_the_thread_that_looks_does_not_count():
    before = vitals(os.getpid(), threading.get_native_id())
    began = time.thread_time()
    while time.thread_time() < began + 0.3:
        pass
    now = vitals(os.getpid(), threading.get_native_id())
    assert now.cpu - before.cpu < 0.2


@pytest.mark.process
def test_children_that_have_ended_count():
    child = os.fork()
    if not child:
        while time.process_time() < 0.5:
            pass
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and is there
    before = vitals(os.getpid())
    os.waitpid(child, 0)
    assert vitals(os.getpid()).cpu >= before.cpu


def test_a_process_that_is_gone_shows_nothing(tmp_path):
    assert vitals(1, proc=tmp_path) == Vitals()
    assert state(1, proc=tmp_path) is None


def test_a_stopped_process_is_seen():
    with subprocess.Popen([sys.executable, "-c", ASLEEP], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        while state(process.pid) != "T":
            time.sleep(0.01)
        process.kill()


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 0300000A:C350 01 000002A0:00000000 01:00000030 00000004     0        0 1
   1: 0100007F:1F90 0400000A:C350 01 00000000:00000000 00:00000000 00000000     0        0 1
"""
TABLE6 = """\
  sl  local_address rem_address st tx_queue rx_queue tr tm->when retrnsmt
   0: {0}:1F90 0000000000000000FFFF00000500000A:C350 01 00000001:00000000 01:00000001 00000003 0
   1: {0}:1F90 000080FE000000000000000001000000:C350 01 00000001:00000000 01:00000001 00000003 0
""".format("0" * 32)


def test_what_is_not_confirmed_is_named(tmp_path):
    folder = tmp_path / "self/net"
    folder.mkdir(parents=True)
    (folder / "tcp").write_text(TABLE)
    (folder / "tcp6").write_text(TABLE6)
    assert unsent(tmp_path) == ["10.0.0.3", "10.0.0.5", "fe80::1"]


SCRIPT = Frame("/home/me/train.py", 3, "main")
PYTHON = "/usr/lib/python3.11/"


@pytest.mark.parametrize(
    ("innermost_first", "asks"),
    [
        (["/opt/x/site-packages/torch/distributed/distributed_c10d.py", SCRIPT], False),
        ([PYTHON + "cmd.py", PYTHON + "pdb.py", PYTHON + "bdb.py", SCRIPT], True),
        ([SCRIPT, PYTHON + "bdb.py", PYTHON + "pdb.py"], False),  # python -m pdb train.py
        (["/opt/x/site-packages/IPython/terminal/embed.py", SCRIPT], True),
        (["/tmp/ipykernel_7/1.py", "/opt/x/site-packages/IPython/core/interactiveshell.py"], False),
        ([PYTHON + "threading.py", "/ext/libs/debugpy/_vendored/pydevd/pydevd.py", SCRIPT], True),
        (["/home/me/code.py"], False),
        (["/opt/x/site-packages/proteins/pdb.py", SCRIPT], False),
    ],
)
def test_a_debugger_asks_where_the_script_has_called_it(innermost_first, asks):
    frames = [Frame(one, 1, "f") if isinstance(one, str) else one for one in innermost_first]
    place = place_of(frames)
    assert place.asking == asks
    assert "pydevd" not in place.line


@pytest.mark.parametrize("what", ["updates", "passes"])
def test_an_update_is_a_sign_of_life(what):
    """A script that waits in one line, and makes an update between two looks, does not hang."""
    progress, start, found = UpdateCount(), time.monotonic(), []
    view = OwnView(0, "here", progress, spins=False, window=1.0)
    for seconds, done in ((0, 0), (1000, 0), (2000, 1), (3000, 1)):
        setattr(progress, what, done)
        found.append(view.state(start + seconds).still)
    assert found == [0, 1000, 0, 1000]


def test_the_line_of_the_script_is_found():
    seen: list[Any] = []

    def look():
        seen.extend([main_place(), all_stacks()])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    place, stacks = seen
    assert place.line.startswith("test_vitals.py:")
    assert place.line.endswith("in test_the_line_of_the_script_is_found")
    assert not place.exchanging
    assert not place.asking
    assert "test_vitals.py" in "\n".join(stacks["MainThread"])
