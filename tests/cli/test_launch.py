"""``slipstream launch`` as its users run it: real processes, real signals, real logs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slipstream.cli import main
from slipstream.cli.launch import options_behind
from tests.harness.command_line import COMMAND_LINE
from tests.harness.ranks import free_port
from tests.harness.scripts import Script

SLIPSTREAM = [sys.executable, "-c", "from slipstream.cli.main import main; main()"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

TELL = """
import json, os, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print("up")
    if os.environ["RANK"] == "1":
        open("rank1.spoke", "w").close()
        time.sleep(60)
    while not os.path.exists("rank1.spoke"):
        time.sleep(0.05)
    sys.exit(5)
if os.environ["RANK"] == "0":
    print(json.dumps(sys.argv[1:]))
    print("progress 1\\rprogress 2", file=sys.stderr)
else:
    time.sleep(0.3)  # the launch waits for the last one
    print(os.environ["SLIPSTREAM_STRATEGY"], os.environ["OMP_NUM_THREADS"])
"""
FAIL = """
import os, sys, time, traceback
print("rank", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "0":
    open("rank0.spoke", "w").close()
if os.environ["RANK"] == "1":
    while not os.path.exists("rank0.spoke"):  # on a busy machine it may come later
        time.sleep(0.05)
    try:
        raise RuntimeError("the [first] failure")
    except RuntimeError:
        traceback.print_exc()
        sys.exit(3)
time.sleep(60)
"""
SLEEP = """
import os, pathlib, time
pathlib.Path("pid" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(60)
"""
TRAIN = """
import os, sys, torch, slipstream
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = slipstream.accelerate(model, optimizer)
for step in range(40):
    if step == 20 and os.environ["RANK"] == "1":
        sys.exit(0)
    session.backward(model(torch.randn(8, 64)).square().mean())
    session.step()
"""
IN_TORCH = """
import os, signal, sys, traceback, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("still well")
try:
    for step in range(40):
        if step == 20 and dist.get_rank() == 1:
            FAULT
        dist.all_reduce(torch.ones(64))
except BaseException as error:  # gloo's threads may abort an interpreter that ends before them
    if not isinstance(error, SystemExit):
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(error.code if isinstance(error, SystemExit) else 1)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FAULTS = {
    "kill": (KILL, r"was killed by SIGKILL \(maybe out of memory\)", 137),
    "exception": ("raise ValueError('a bad sample')", "ValueError: a bad sample", 1),
    # or it is stopped while it ends, and its code is not known
    "exit 3": ("sys.exit(3)", "(exited with code 3|left while the others)", 3),
}
SUM = """
import os, torch, torch.distributed as dist
from slipstream.cluster.connect import connect, from_environ
cluster = connect(from_environ(), "cpu")
total = torch.tensor([cluster.rank + 1.0])
if cluster.world is not None:
    dist.all_reduce(total, group=cluster.world)
said = (cluster.rank, cluster.world_size, cluster.environment.node_rank, total.item())
os.write(1, (" ".join(map(str, said)) + "\\n").encode())  # at once: ranks may share the terminal
cluster.close()
"""


UNSET = ("SLIPSTREAM_STRATEGY", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
OWN = {"GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}


def start(command: list[str], folder: Path, script: str) -> subprocess.Popen[str]:
    """``command`` in ``folder``, where ``script`` is script.py."""
    (folder / "script.py").write_text(script)
    environ = {name: value for name, value in os.environ.items() if name not in UNSET}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environ | OWN,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def launches(folder: Path, script: str, *options: str, name: str = "said") -> Script:
    """``slipstream launch OPTIONS``, logging to ``folder/logs``; what it says itself goes to
    ``folder/NAME.out`` and ``NAME.err``."""
    (folder / "script.py").write_text(script)
    words = ["launch", "--log-dir", "logs", *options]
    files = {"log": folder / f"{name}.out", "errors": folder / f"{name}.err"}
    return Script(COMMAND_LINE, *words, **files, env=dict.fromkeys(UNSET) | OWN, folder=folder)


def launch(folder: Path, script: str, *options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of it."""
    code = launches(folder, script, *options).wait(150)
    return code, *((folder / f"said.{stream}").read_text() for stream in ("out", "err"))


def logs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "logs").iterdir())}


def test_ranks_get_arguments_untouched_variables_and_a_log_each_also_once_restarted(
    tmp_path: Path,
) -> None:
    arguments = ["--help", "--nproc", "7", "--", "${local_rank}", "a$$b", "-m", "", "two words"]
    (tmp_path / "config.yaml").write_text("gradients: {overlap: false}\n")
    options = ["--nproc", "2", "--max-restarts", "1", "--strategy", "config.yaml"]
    code, out, err = launch(tmp_path, TELL, *options, "script.py", *arguments)
    assert code == 0
    again = json.dumps(arguments) + "\nprogress 1\nprogress 2\n"  # text mode: \r -> \n
    assert out == "up\n" + again
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert logs(tmp_path) == {
        "rank0.log": "up\n",
        "rank0.restart1.log": again,
        "rank1.log": "up\n",
        "rank1.restart1.log": f"{tmp_path / 'config.yaml'} {threads}\n",
    }
    for shown in (
        "world size",
        "c10d at a free local port",
        "strategy: config.yaml",
        f"logs: {tmp_path}/logs",
        "exited with code 5; all ranks start again",
    ):
        assert shown in err


def test_the_first_failing_rank_is_shown_and_its_code_returned(tmp_path: Path) -> None:
    code, out, err = launch(tmp_path, FAIL, "--nproc", "3", "script.py")
    assert code == 3
    assert out == "rank 0\n"  # nothing of the others
    assert f"rank 1 (local rank 1) on host {socket.gethostname()} exited with code 3" in err
    assert "Traceback (most recent call last)" in err
    assert "RuntimeError: the [first] failure" in err
    assert "log: logs/rank1.log" in err
    assert "ChildFailedError" not in err


@pytest.mark.parametrize(("fault", "says", "expected"), FAULTS.values(), ids=FAULTS)
def test_the_rank_that_began_it_is_named(
    fault: str, says: str, expected: int, tmp_path: Path, forks: str
) -> None:
    script = IN_TORCH.replace("FAULT", fault)
    code, _, err = launch(tmp_path, script, "--nproc", "2", "-m", "script")
    assert code in (expected, 1)
    assert "rank 1 failed first" in err
    assert re.search(says, " ".join(err.split()))
    if fault == KILL:
        assert code == expected
        assert "still well" in err  # the end of its log


def test_a_rank_that_leaves_a_training_is_named(tmp_path: Path, forks: str) -> None:
    code, _, err = launch(tmp_path, TRAIN, "--nproc", "2", "script.py")
    assert code == 1
    assert "rank 1 failed first" in err
    assert "left while the others were still training" in " ".join(err.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    command = ["nohup", *SLIPSTREAM, "launch", "--nproc", "2", "script.py"]
    launcher = start(command, tmp_path, SLEEP)
    paths = [tmp_path / "pid0", tmp_path / "pid1"]
    while not all(path.exists() and path.read_text() for path in paths):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.02)
    ranks = [psutil.Process(int(path.read_text())) for path in paths]
    status = Path(f"/proc/{launcher.pid}/status").read_text()
    (ignored,) = re.findall(r"^SigIgn:\s+(\w+)$", status, re.MULTILINE)
    assert int(ignored, 16) & 1 << (signal.SIGHUP - 1)  # as nohup wants
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=60)
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert (len(gone), alive) == (2, [])
    if number is signal.SIGKILL:
        assert launcher.returncode == -number
    else:
        assert launcher.returncode == 128 + number
        assert "no rank is left running" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.py"], "'nowhere.py' does not exist"),
        (["--nproc", "0", "script.py"], "--nproc 0"),
        (["--nproc", "many", "script.py"], "--nproc 'many'"),
        (["--strategy", "wrong.yaml", "script.py"], "overlapp"),
        (["--strategy", "apart.yaml", "script.py"], "local with gradients.codec"),
        (
            ["--log-dir", "script.py", "script.py"],
            "log folder script.py cannot be created: File exists; choose",
        ),
        (["--islands", "2", "nowhere.py"], "'nowhere.py' does not exist"),
        (["--islands", "2", "--nproc", "2", "script.py"], "--islands with --nproc 2: an island"),
        (
            ["--islands", "2", "--node-rank", "0", "--rdzv-endpoint", "a:1", "script.py"],
            "--islands with --node-rank 0 --rdzv-endpoint a:1",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_before_anything_starts(
    tmp_path: Path, monkeypatch, capfd, options: list[str], message: str
) -> None:
    (tmp_path / "wrong.yaml").write_text("gradients: {overlapp: true}\n")
    (tmp_path / "apart.yaml").write_text("local: {steps: 16}\ngradients: {codec: int8}\n")
    (tmp_path / "script.py").write_text(SLEEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["slipstream", "launch", "--log-dir", "logs", *options])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in err
    assert not list(tmp_path.glob("pid*"))


def test_two_nodes_meet_and_only_the_first_prints(tmp_path: Path, forks: str) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes", "2", "--rdzv-endpoint", endpoint]
    nodes = [
        launches(tmp_path, SUM, *options, "--node-rank", rank, "script.py", name=rank)
        for rank in ("0", "1")
    ]
    try:
        codes = [node.wait(90) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    out, err, *others = (
        tmp_path.joinpath(f"{n}.{s}").read_text() for n in "01" for s in ("out", "err")
    )
    assert codes == [0, 0], (out, err, others)
    assert out == "0 2 0 3.0\n"
    assert f"static at {endpoint}" in err
    assert [text.partition("nanobind: ")[0] for text in others] == ["", ""]  # see scripts.py
    assert logs(tmp_path) == {"rank0.log": "0 2 0 3.0\n", "rank1.log": "1 2 1 3.0\n"}


def test_a_node_that_waits_for_the_others_can_be_interrupted(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        options = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", endpoint]
        node = start([*SLIPSTREAM, "launch", *options, "script.py"], tmp_path, SLEEP)
        silent.settimeout(120)
        with silent.accept()[0]:  # it has come, and waits for an answer
            node.send_signal(signal.SIGINT)
            node.communicate(timeout=60)
    assert node.returncode == -signal.SIGINT
    assert not list(tmp_path.glob("pid*"))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([*TORCHRUN, "--standalone", "--nproc-per-node", "2"], ["0 2 0 3.0", "1 2 0 3.0"]),
        ([sys.executable], ["0 1 0 1.0"]),
    ],
    ids=["torchrun", "python"],
)
def test_the_same_script_runs_without_the_launcher(
    tmp_path: Path, command: list[str], said: list[str]
) -> None:
    process = start([*command, "script.py"], tmp_path, SUM)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == said


@pytest.mark.parametrize(
    ("text", "late"),
    [("import torch\n", ["--nproc", "--strategy"]), ("add_argument('--strategy')\n", ["--nproc"])],
)
def test_options_behind_a_script_that_does_not_know_them_are_named(
    tmp_path: Path, text: str, late: list[str]
) -> None:
    """It would train on one rank, or under the defaults."""
    script = tmp_path / "train.py"
    script.write_text(text)
    words = ["--nproc=2", "--strategy", "exact", "--epochs", "3"]
    assert options_behind(str(script), words) == late
