"""The script of docs/from-ddp.md, before and after: both run, and train the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs/from-ddp.md"
LAUNCH = {
    "-": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "+": [sys.executable, "-m", "slipstream", "launch", "--nproc", "2"],
}


def script(side: str) -> str:
    """The lines of one side of the diff."""
    [diff] = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return "".join(line[1:] + "\n" for line in diff.splitlines() if line[:1] in (side, " "))


@pytest.mark.process
def test_both_scripts_run_and_train_the_same(tmp_path: Path) -> None:
    running = {}
    for name, (side, launch) in zip(("before", "after"), LAUNCH.items(), strict=True):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(script(side))
        running[folder] = subprocess.Popen([*launch, "train.py"], cwd=folder)
    assert [process.wait(120) for process in running.values()] == [0, 0]
    before, after = (torch.load(folder / "checkpoint.pt") for folder in running)
    torch.testing.assert_close(after["model"], before["model"])
    momenta = (state["optimizer"]["state"][0]["momentum_buffer"] for state in (after, before))
    torch.testing.assert_close(*momenta)
