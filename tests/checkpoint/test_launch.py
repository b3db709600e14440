"""The same script goes on after a restart of its ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.command_line import COMMAND_LINE
from tests.harness.scripts import Script

TRAIN = """
import os, signal
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


@pytest.mark.parametrize("launcher", ["slipstream launch", "torchrun"])
def test_a_killed_rank_is_restarted_and_goes_on(launcher: str, tmp_path: Path, forks: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words, log = ["--max-restarts", "1", "train.py"], tmp_path / "log"
    if launcher == "torchrun":
        with log.open("w") as said:
            torchrun = [forks, "-m", "torch.distributed.run", "--standalone"]
            run = [*torchrun, "--nproc-per-node", "2", *words]
            code = subprocess.call(run, cwd=tmp_path, stdout=said, stderr=said, timeout=170)
    else:
        run = ["launch", "--nproc", "2", *words]
        code = Script(COMMAND_LINE, *run, log=log, folder=tmp_path).wait(170)
    assert code == 0, log.read_text()
    starts, ends = zip(*map(str.split, (tmp_path / "end").read_text().splitlines()), strict=True)
    assert starts == ("6", "6")
    assert {*ends} == {undisturbed()}
