"""The script of docs/from-ddp.md, before and after: both run, and train the same."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import torch

from tests.harness.scripts import Script, torchrun

PAGE = Path(__file__).parents[1] / "docs/from-ddp.md"


def script(side: str) -> str:
    """The lines of one side of the diff."""
    [diff] = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return "".join(line[1:] + "\n" for line in diff.splitlines() if line[:1] in (side, " "))


def test_both_scripts_run_and_train_the_same(tmp_path: Path) -> None:
    running: dict[Path, list[Script]] = {}
    for name, side in {"before": "-", "after": "+"}.items():
        folder = tmp_path / name
        folder.mkdir()
        path, log = folder / "train.py", folder / "log"
        path.write_text(script(side))
        running[folder] = [Script(path, env=e, log=log, folder=folder) for e in torchrun(2)]
    codes = [rank.wait(120) for rank in chain(*running.values())]
    assert codes == [0] * 4, [(folder / "log").read_text() for folder in running]
    before, after = (torch.load(folder / "checkpoint.pt") for folder in running)
    torch.testing.assert_close(after["model"], before["model"])
    momenta = (state["optimizer"]["state"][0]["momentum_buffer"] for state in (after, before))
    torch.testing.assert_close(*momenta)
