"""The same script goes on after a restart: of ranks, and of nodes, the first one among them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slipstream.cli.store import open_store

LAUNCH = [sys.executable, "-c", "from slipstream.cli.main import main; main()", "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

TRAIN = """
import os, signal, sys, time
import torch, slipstream

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
saved = slipstream.Checkpoints("saved")
with slipstream.accelerate(model, optimizer) as session:
    start = saved.restore(session)
    print("from", start, flush=True)
    for update in range(start + 1, 11):
        if update == 8 and start == 0:
            saved.wait()
            if "lost" in sys.argv:
                open("ready", "a").close()
                time.sleep(60)
            if session.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.arange(8.0).reshape(2, 4) + session.rank + update
        session.backward(session.model(batch / 16).square().mean())
        session.step()
        saved.step(session, every=3)
    with open("end", "a") as file:
        file.write(f"{start} {model.weight.detach().double().sum().item().hex()}\\n")
"""


def undisturbed() -> str:
    """The end of one that nobody kills, in this process: gradients are means of two ranks."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for update in range(1, 11):
        for rank in range(2):
            batch = torch.arange(8.0).reshape(2, 4) + rank + update
            (model(batch / 16).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().double().sum().item().hex()


@pytest.mark.parametrize("command", [LAUNCH, TORCHRUN], ids=["slipstream launch", "torchrun"])
def test_a_killed_rank_is_restarted_and_goes_on(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ranks = ["--nproc" if command is LAUNCH else "--nproc-per-node", "2", "--max-restarts", "1"]
    run = subprocess.run(
        [*command, *ranks, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stdout + run.stderr
    starts, ends = zip(*map(str.split, (tmp_path / "end").read_text().splitlines()), strict=True)
    assert starts == ("6", "6")
    assert {*ends} == {undisturbed()}


def node(folder: Path, port: int, name: str) -> subprocess.Popen[bytes]:
    """One of two nodes that meet at a store outside of both."""
    options = ["--nnodes", "2", "--nproc", "1", "--max-restarts", "3", "--log-dir", name]
    where = ["--rdzv-endpoint", f"127.0.0.1:{port}", "train.py", "lost"]
    with (folder / f"{name}.out").open("wb") as out:
        return subprocess.Popen([*LAUNCH, *options, *where], cwd=folder, stdout=out, stderr=out)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a node with all that it has started, as a power cut does."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                os.kill(child.pid, signal.SIGKILL)
    process.kill()
    process.wait()


@pytest.mark.process
def test_a_lost_first_node_is_replaced_where_the_store_outlives_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = open_store(port)
    nodes = [node(tmp_path, port, name) for name in ("a", "b")]
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        first = next(i for i in range(2) if (tmp_path / "ab"[i] / "rank0.log").exists())
        kill(nodes[first])
        nodes[first] = node(tmp_path, port, "c")
        for process in nodes:
            assert process.wait(400) == 0, [p.read_text() for p in tmp_path.glob("*.out")]
        ends = (tmp_path / "end").read_text().splitlines()
        assert ends == [f"6 {undisturbed()}"] * 2
    finally:
        for process in nodes:
            kill(process)
        del store
