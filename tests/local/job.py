"""A job that comes and goes: python -m tests.local.job STORE FOLDER UPDATES [SECONDS] [SETTINGS].

Ends after UPDATES, or after as many as the file ``end`` in FOLDER says. Trains the next byte of
text; writes its held-out loss, and the outer parameters, into FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import slipstream
from tests.local.reference import flat

WIDTH = 16
LR = 0.01
COOL_DOWN = 100
"""Last updates, over which the learning rate goes to 0: runs of unlike orders end alike."""
TEXT = ("the quick brown fox jumps over the lazy dog, and the dog does not mind; " * 40).encode()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(128, WIDTH), nn.Flatten(), nn.Linear(4 * WIDTH, 64), nn.ReLU(),
        nn.Linear(64, 128),
    )  # fmt: skip


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Four bytes each, and the next one."""
    random = torch.Generator().manual_seed(seed)
    text = torch.tensor(list(TEXT))
    at = torch.randint(len(text) - 4, (16,), generator=random)
    return torch.stack([text[at + i] for i in range(4)], 1), text[at + 4]


def loss_of(model: nn.Module, seed: int) -> Tensor:
    inputs, target = batch(seed)
    return nn.functional.cross_entropy(model(inputs), target)


def cool_down(optimizer: torch.optim.Optimizer, left: int) -> None:
    """Set the learning rate of an update, of so many that are left."""
    optimizer.param_groups[0]["lr"] = LR * min(left / COOL_DOWN, 1.0)


def last_update(folder: Path, updates: int) -> int:
    end = folder / "end"
    return int(end.read_text()) if end.exists() else updates


def main() -> None:
    """Train from where the run is to its end."""
    store, folder, updates = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    settings = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    torch.set_num_threads(1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rendezvous = {"store": store, "at_least": 2, "timeout": 60, **settings.pop("rendezvous", {})}
    local = {"steps": 4, "rendezvous": rendezvous, **settings}
    longest, part = 0.0, folder / f"{os.getpid()}.part"
    with slipstream.accelerate(model, optimizer, None, {"local": local}) as session:
        begun = session.updates
        print(f"begins at {begun} with share {session.data_rank}", flush=True)
        # one that joins again goes on where the others are
        while (update := session.common_updates) < last_update(folder, updates):
            before = time.monotonic()
            cool_down(optimizer, last_update(folder, updates) - update)
            session.backward(loss_of(model, 1000 * update + session.data_rank))
            session.step()
            longest = max(longest, time.monotonic() - before)
            time.sleep(seconds)
            part.write_text(str(update + 1))
            part.rename(folder / f"{os.getpid()}.updates")  # whole, whenever it is read
    found = {
        "begun": begun,
        "loss": torch.stack([loss_of(model, -seed) for seed in range(1, 9)]).mean().item(),
        "parameters": flat(model.parameters()).double().sum().item(),
        "longest": longest,
    }
    (folder / f"{os.getpid()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
