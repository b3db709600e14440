"""A training without end on one emulated host: ``python on_hosts.py FOLDER TIMEOUT``.

It sleeps in each update, to leave the cores to others.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import slipstream


def main() -> None:
    folder, timeout = Path(sys.argv[1]), float(sys.argv[2])
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    checks = {"timeout": timeout, "folder": str(folder / f"autopsy{rank}")}
    with slipstream.accelerate(model, optimizer, strategy={"checks": checks}) as session:
        while True:
            session.backward(session.model(torch.ones(4, 64)).square().mean())
            session.step()
            time.sleep(0.05)
            if session.updates % 5 == 0:
                (folder / f"trains{rank}").touch()


if __name__ == "__main__":
    main()
