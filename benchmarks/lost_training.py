"""A small training on handwritten digits in which faults strike, each of them once.

    slipstream launch ... benchmarks/lost_training.py FOLDER UPDATES

`lost_hosts` starts it on each host. FOLDER is shared: ``faults.json`` says what strikes which host
at which update; ``disk`` is a small file system for the checkpoints. A fault leaves a file, so that
it does not strike again after the restart.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slipstream

STRATEGY = {
    "gradients": {"codec": "int8"},
    "checks": {"timeout": "10s", "folder": "slipstream-autopsy"},
}
EVERY = 10
"""Updates from one checkpoint to the next."""
HOST = socket.gethostname()


class Faults:
    """What is to strike on this host.

    Args:
        folder: that all hosts share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        every = json.loads((folder / "faults.json").read_text())
        self.mine = {at: name for name, host, at in every if host == HOST}
        (folder / "disk" / "filler").unlink(missing_ok=True)

    def strike(self, update: int) -> float:
        """Do what is due before this update; returns a factor for its loss."""
        name = self.mine.get(update)
        if name is None or (mark := self.folder / f"struck {name}").exists():
            return 1.0
        mark.write_text(str(time.time()))
        if name == "kill -9":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name == "a sleep without end":
            time.sleep(10**6)
        elif name == "an exception":
            raise ValueError("sample 1234 has no label")
        elif name == "exit(0)":
            os._exit(0)
        elif name == "NaN in the gradients":
            return float("nan")
        elif name == "a full disk":
            with suppress(OSError), (self.folder / "disk" / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(2**20))
                    filler.flush()
        else:  # of the host or its link: from outside, while this rank waits for it
            while not (self.folder / f"done {name}").exists():
                time.sleep(0.02)
        return 1.0


def share() -> TensorDataset:
    """This rank's part of the digits."""
    rank, ranks = slipstream.data_share()
    pixels, targets = load_digits(return_X_y=True)
    mine = slice(rank, None, ranks)
    return TensorDataset(torch.tensor(pixels[mine] / 16).float(), torch.tensor(targets[mine]))


def main() -> None:
    """Train from the newest checkpoint to the last update."""
    folder, updates = Path(sys.argv[1]), int(sys.argv[2])
    faults = Faults(folder)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.ReLU(),
        nn.Dropout(0.2), nn.Linear(512, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    saved = slipstream.Checkpoints(folder / "disk" / "checkpoints")
    loader = DataLoader(share(), batch_size=32, shuffle=True)
    with (
        slipstream.accelerate(model, optimizer, loader, STRATEGY) as session,
        (folder / f"losses {session.rank}").open("a", buffering=1) as losses,
    ):
        if not saved.restore(session):
            torch.manual_seed(1 + session.rank)  # dropout and the order of samples
        print(f"{HOST} trains on after update {session.updates}", flush=True)
        losses.write(f"from {session.updates} {time.time()}\n")
        while session.updates < updates:
            for pixels, targets in session.loader:
                factor = faults.strike(session.updates + 1)
                loss = nn.functional.cross_entropy(session.model(pixels), targets)
                session.backward(loss * factor)
                session.step()
                losses.write(f"{session.updates} {float(loss.detach()).hex()} {time.time()}\n")
                saved.step(session, every=EVERY)
                if session.updates == updates:
                    break
    bits = hashlib.sha256()
    for parameter in model.parameters():
        bits.update(parameter.detach().numpy().tobytes())
    (folder / f"digest {session.rank}").write_text(bits.hexdigest())


if __name__ == "__main__":
    main()
