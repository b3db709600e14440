"""Emulated hosts as they are: real namespaces, links, processes and signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from slipstream.errors import TestbedError
from slipstream.testbed import Distance, Testbed, parse_rate, testbed, unavailable
from slipstream.testbed.link_check import TOLERANCE
from slipstream.testbed.machine import find_machine
from slipstream.testbed.network import Namespace, NetworkPlan
from tests.testbed.traces import interfaces, marked, wait_for_marked

_reason = unavailable()
needs_hosts = pytest.mark.skipif(_reason is not None, reason=str(_reason))
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def three():
    if _reason:
        pytest.skip(_reason)
    with Testbed(nodes=3, rate="1gbit") as bed:
        yield bed


@pytest.fixture
def marker() -> str:
    """An argument by which a test finds its own processes, whatever else runs."""
    return f"marker-{uuid.uuid4()}"


def shell(*words: str) -> list[str]:
    return ["sh", "-c", *words]


@needs_hosts
@pytest.mark.parametrize("rate", ["200mbit", "1gbit"])
def test_links_carry_the_rate_asked_for(rate: str) -> None:
    with Testbed(nodes=3, rate=rate) as bed:
        assert bed.rate == parse_rate(rate)
        for _attempt in range(4):  # other work on the machine may spoil one
            checks = bed.check()
            if all(link.off(bed.rate) < TOLERANCE for link in checks):
                break
        else:
            pytest.fail(f"{checks}")
        assert [link.node for link in checks] == list(bed.nodes[1:])
        assert all(0 < link.round_trip < 1 for link in checks)


SENDS = """
import hashlib, random, socket, sys
content = random.Random(0).randbytes(2**20)
with socket.create_server(("198.18.0.1", 7000)) as listener:
    peer, _ = listener.accept()
    peer.sendall(content)
    print(hashlib.sha256(content).hexdigest() == peer.recv(64).decode())
"""
RECEIVES = """
import hashlib, socket, time
for _ in range(100):
    try:
        peer = socket.create_connection(("node0", 7000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
found = hashlib.sha256(peer.recv(2**20, socket.MSG_WAITALL))
peer.sendall(found.hexdigest().encode())
"""


@needs_hosts
def test_a_long_line_is_late_and_loses_packets(tmp_path: Path) -> None:
    distance = Distance(round_trip=0.06, loss=0.02)
    with Testbed(nodes=3, rate="200mbit", distance=distance) as bed:
        checks = bed.check()
        assert all(0.06 <= link.round_trip < 0.3 for link in checks)
        assert all(0 < max(link.there, link.back) < 1e8 for link in checks)
        programs = [[sys.executable, "-c", text] for text in (SENDS, RECEIVES, "")]
        log = tmp_path / "log"
        with log.open("w") as out:
            first = bed.popen(bed.nodes[0], programs[0], stdout=out)
            assert bed.popen(bed.nodes[1], programs[1]).wait(60) == 0
            assert first.wait(60) == 0
        assert log.read_text() == "True\n"


@pytest.mark.parametrize("wrong", [{"round_trip": 11.0}, {"loss": 1.0}, {"round_trip": -1.0}])
def test_a_line_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(TestbedError, match="allowed: 0 to"):
        Distance(**wrong)


@needs_hosts
def test_one_node_is_a_testbed_without_links() -> None:
    with Testbed(nodes=1) as bed:
        assert bed.check() == []
        assert bed.run([["true"]]) == 0


def test_each_node_has_its_name_and_address_and_nothing_of_the_machine(
    three, tmp_path, monkeypatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = interfaces()
    probe = "hostname; hostname -i; ls /sys/class/net | wc -l; getent hosts node2 | cut -d ' ' -f 1"
    script = shell(
        f"({probe}; ip -o link | wc -l; echo $GLOO_SOCKET_IFNAME $OMP_NUM_THREADS $A)"
        f" > {tmp_path}/$(hostname)"
    )
    assert three.run([script] * 3, {"A": "b"}) == 0
    for node in three.nodes:
        said = (tmp_path / node.name).read_text().split()
        assert said[:2] == [node.name, node.address]
        assert said[3:] == ["198.18.0.3", "2", "eth0", "1", "b"]  # lo and eth0
    assert interfaces() == before


CODES = {
    "all well": (["exit 0"] * 3, 0),
    "node 0 fails": (["exit 7", "sleep 60", "sleep 60"], 7),
    "another fails": (["sleep 60", "exit 3", "sleep 60"], 3),
    "the last to end fails": (["exit 0", "sleep 0.2; exit 4", "exit 0"], 4),
    "a signal": (["sleep 60", "sleep 60", "kill -KILL $$"], 137),
    "no such program": (["exec no-such-program", "sleep 60", "sleep 60"], 127),
}


@pytest.mark.parametrize(("scripts", "code"), CODES.values(), ids=CODES)
def test_run_returns_the_code_of_the_node_that_failed_first(three, scripts, code) -> None:
    assert three.run([shell(script) for script in scripts]) == code


def test_a_failing_node_stops_the_others(three, marker, tmp_path) -> None:
    polite = f"trap ': > {tmp_path}/polite; exit' TERM; sleep 60 & touch {tmp_path}/up; wait"
    failing = f"while [ ! -e {tmp_path}/up ]; do sleep 0.01; done; exit 3"
    stubborn = f"trap '' TERM; sleep 60; : {marker}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testbed, "GRACE_SECONDS", 1.0)
        assert three.run([shell(polite), shell(failing), shell(stubborn, marker)]) == 3
    assert (tmp_path / "polite").exists()
    assert wait_for_marked(marker, 0) == []


def test_output_is_shown_of_node_0_and_of_a_node_that_fails(three, capfd) -> None:
    assert three.run([shell("echo I am $(hostname); [ $(hostname) != node2 ] || exit 9")] * 3) == 9
    out, err = capfd.readouterr()
    assert out in ("I am node0\n", "")  # node 0 may have been stopped before it spoke
    assert err == "node2 ended with code 9; its output:\nI am node2\n"


def test_popen_is_like_a_local_one(three, tmp_path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    script = "read line; echo $line $A $(pwd)"
    process = three.popen(three.nodes[1], shell(script), env={"A": "b"}, **pipes)
    assert process.communicate("hello\n")[0].split() == ["hello", "b", str(tmp_path)]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_popen_passes_signals_on(three, name: str) -> None:
    script = f"import signal; signal.signal(signal.{name}, lambda *_: exit(9)); print(flush=True)"
    argv = [sys.executable, "-c", f"{script}; signal.pause()"]
    process = three.popen(three.nodes[2], argv, stdout=subprocess.PIPE)
    process.stdout.readline()
    process.send_signal(signal.Signals[name])
    assert process.wait(90) == 9
    process.stdout.close()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_popen_ends_by_the_signal_that_ends_the_program(three, marker, name: str) -> None:
    process = three.popen(three.nodes[2], shell("sleep 60; :", marker))
    assert len(wait_for_marked(marker, 2)) == 2  # the one that entered, and the program
    process.send_signal(signal.Signals[name])
    assert process.wait(90) == -signal.Signals[name]
    assert wait_for_marked(marker, 0) == []


@needs_hosts
def test_leaving_kills_all_that_runs(marker) -> None:
    with Testbed(nodes=2) as bed:
        started = [
            bed.popen(n, shell("setsid sh -c 'sleep 60; :' $0 & wait", marker)) for n in bed.nodes
        ]
        assert len(wait_for_marked(marker, 6)) == 6
    assert marked(marker) == []  # at once: leaving waits for the end
    assert all(process.returncode for process in started)


OWNER = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, as it should be
from slipstream.testbed import Testbed
with Testbed(nodes=2) as bed:
    for node in bed.nodes:
        bed.popen(node, ["sh", "-c", "setsid sh -c 'sleep 60; :' $0 & wait", sys.argv[1]])
    bed.run([["sh", "-c", "sleep 60; :", sys.argv[1]]] * 2)
"""
# The owner; on each node twice what entered it and what it runs, and the daemon of the first.
OWNED = 1 + 2 * (2 + 2 + 1)


@needs_hosts
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_nothing_outlives_the_owner(marker, name: str) -> None:
    before = interfaces()
    argv = [sys.executable, "-c", OWNER, marker]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as owner:
        assert len(wait_for_marked(marker, OWNED)) == OWNED
        owner.send_signal(signal.Signals[name])
        assert owner.wait(90) == -signal.Signals[name]
    assert wait_for_marked(marker, 0) == []
    assert interfaces() == before


@needs_hosts
def test_two_testbeds_have_separate_networks(three) -> None:
    connect = "import socket; socket.create_connection(('198.18.0.1', 7777), 5)"
    serve = "import socket; s = socket.create_server(('', 7777)); print(flush=True); s.accept()"
    server = three.popen(three.nodes[0], [sys.executable, "-c", serve], stdout=subprocess.PIPE)
    server.stdout.readline()
    with Testbed(nodes=2) as other:
        stranger = other.popen(
            other.nodes[1], [sys.executable, "-c", connect], stderr=subprocess.PIPE, text=True
        )
        assert "ConnectionRefusedError" in stranger.communicate()[1]
    assert three.popen(three.nodes[1], [sys.executable, "-c", connect]).wait() == 0
    assert server.wait(90) == 0
    server.stdout.close()


def test_an_ordinary_user_has_hosts_too(tmp_path) -> None:
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("only root with setpriv can act as another user")
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    script = (
        "from slipstream.testbed import *; print(unavailable(), flush=True)\n"
        "with Testbed(2) as bed: exit(bed.run([['true'], ['sh', '-c', 'exit 6']]))"
    )
    # The interpreter of the tests may be out of that user's reach; the testbed needs no packages.
    for python in (sys.executable, "/usr/bin/python3"):
        run = [*nobody, "env", f"PYTHONPATH={SOURCE}", "PYTHONDONTWRITEBYTECODE=1", python, "-c"]
        tried = [*run, "import sys, slipstream.testbed; assert sys.version_info >= (3, 11)"]
        if subprocess.run(tried, capture_output=True, cwd="/").returncode == 0:
            break
    else:
        pytest.skip("the user nobody can run no Python >= 3.11 with these sources")
    done = subprocess.run([*run, script], capture_output=True, text=True, cwd="/")
    if done.stdout.startswith("this user may not"):
        pytest.skip(done.stdout)
    assert done.returncode == 6, done.stderr


def test_a_testbed_that_cannot_be_built_says_why_and_leaves_nothing(monkeypatch) -> None:
    if _reason:
        pytest.skip(_reason)
    broken = Namespace("node0", ["link set no-such-interface up"], [], [])
    empty = Namespace("switch", [], [], [])
    monkeypatch.setattr(testbed, "plan", lambda *_: NetworkPlan([broken], empty, "", []))
    bed = Testbed(nodes=1)
    with pytest.raises(TestbedError, match=r"node0: .*ip -batch -: .*no-such-interface"), bed:
        pass
    assert bed._keeper is None


def test_wrong_use_is_an_error_with_the_fix(three) -> None:
    with pytest.raises(TestbedError, match="2 commands for 3 nodes"):
        three.run([["true"]] * 2)
    with pytest.raises(TestbedError, match="with Testbed"):
        Testbed().popen(three.nodes[0], ["true"])


def without(tool: str, folder: Path) -> str:
    """A PATH with the tools of this machine, but for ``tool``, which always fails."""
    for name, path in find_machine().tools.items():
        (folder / name).symlink_to(shutil.which("false") if name == tool else path)
    return str(folder)


@needs_hosts
@pytest.mark.parametrize(
    ("tool", "remedy"), [("unshare", "user.max_user_namespaces"), ("tc", "modprobe sch_tbf")]
)
def test_a_refusal_of_the_kernel_is_one_line_with_the_remedy(
    tmp_path, monkeypatch, tool: str, remedy: str
) -> None:
    monkeypatch.setenv("PATH", without(tool, tmp_path))
    reason = unavailable()
    assert remedy in reason
    assert "\n" not in reason


def test_a_missing_tool_is_one_line(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert unavailable() == (
        "no program ip or tc or unshare or mount on this machine: install iproute2 util-linux"
    )
    monkeypatch.setattr(sys, "platform", "darwin")
    assert unavailable() == "hosts are emulated on Linux only; this is darwin"
