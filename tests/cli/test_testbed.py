"""``slipstream testbed`` as its users run it: real hosts, real launches, real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from slipstream.cli import main as cli, testbed
from slipstream.testbed import unavailable
from tests.testbed.traces import wait_for_marked

_reason = unavailable()
needs_hosts = pytest.mark.skipif(_reason is not None, reason=str(_reason))
SLIPSTREAM = [sys.executable, "-m", "slipstream"]
# Without torch, which each rank would import for seconds: `doctor --nodes` launches ranks in the
# same way, and its test has them reduce.
MEET = """
import os, socket, sys
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
print(socket.gethostname(), *place, sys.argv[1:])
"""
FAIL = """
import os, time
assert os.environ["RANK"] == "0", "not on this rank"
time.sleep(60)
"""


@pytest.fixture
def slipstream(monkeypatch, capfd):
    """Run a command line in this process: its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code or 0, *capfd.readouterr())

    return run


@needs_hosts
def test_run_launches_the_script_on_every_host(slipstream, forks, tmp_path) -> None:
    script, logs = tmp_path / "meet.py", tmp_path / "logs"
    script.write_text(MEET)
    options = ["--nodes", "2", "--ranks-per-node", "2", "--log-dir", str(logs)]
    code, out, err = slipstream("testbed", "run", *options, "--", str(script), "--steps", "3")

    assert code == 0, err
    assert out == "node0 0 4 0 ['--steps', '3']\n"
    assert "links of 1 Gbit/s" in err
    assert "198.18.0.2" in err
    for rank, place in enumerate(["node0 0 4 0", "node0 1 4 1", "node1 2 4 0", "node1 3 4 1"]):
        assert (logs / f"rank{rank}.log").read_text() == f"{place} ['--steps', '3']\n"


@needs_hosts
def test_a_rank_that_fails_ends_the_run_with_its_code_and_traceback(
    slipstream, forks, tmp_path
) -> None:
    script = tmp_path / "fail.py"
    script.write_text(FAIL)
    options = ["--nodes", "2", "--log-dir", str(tmp_path / "logs")]
    code, out, err = slipstream("testbed", "run", *options, str(script))
    assert (code, out) == (1, "")
    assert "node1 ended with code 1" in err
    assert "rank 1 (local rank 0) on host node1 exited with code 1" in err
    assert "AssertionError: not on this rank" in err


WRONG = {
    "no script": (["run", "nope.py"], "'nope.py' does not exist"),
    "no rate": (["run", "--rate", "fast", __file__], "'fast' is not a link rate"),
    "no nodes": (["run", "--nodes", "0", __file__], "0 nodes: a testbed"),
    "no ranks": (["run", "--ranks-per-node", "0", __file__], "--ranks-per-node"),
    "no strategy": (["run", "--strategy", "nope.yaml", __file__], "nope.yaml"),
    "no tools": (["check"], "install iproute2"),
}


@pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=WRONG)
def test_mistakes_are_reported_before_a_host_is_built(
    slipstream, monkeypatch, words: list[str], said: str
) -> None:
    monkeypatch.setenv("PATH", "")  # so that building would say that there are no tools
    code, out, err = slipstream("testbed", *words)
    assert code == 2
    assert out == ""
    assert said in err
    assert err.count("install iproute2") == (words == ["check"])


@needs_hosts
def test_check_draws_the_links_and_warns_of_those_that_are_off(slipstream, monkeypatch) -> None:
    monkeypatch.setattr(testbed, "TOLERANCE", 0.0)  # headers alone take more
    code, out, err = slipstream("testbed", "check", "--nodes", "2", "--rate", "300mbit")
    assert (code, out) == (0, "")
    assert "node1" in err
    assert "warning: the link to node1 misses the rate by" in err


@needs_hosts
def test_interrupting_a_run_leaves_nothing(tmp_path: Path) -> None:
    marker = f"marker-{uuid.uuid4()}"
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(60)")
    argv = [*SLIPSTREAM, "testbed", "run", "--nodes", "2", str(script), marker]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL, cwd=tmp_path) as run:
        # The command; on each host what entered it, the launcher and the rank.
        assert len(wait_for_marked(marker, 7)) == 7
        run.send_signal(signal.SIGINT)
        assert run.wait(90) == 130
    assert wait_for_marked(marker, 0) == []
