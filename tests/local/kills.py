"""Ranks that are killed at random moments, and go on from the last checkpoint of all.

python -m tests.local.kills 100
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from torch import Tensor

import slipstream
from tests.harness.ranks import RankFailure, Ranks
from tests.local.reference import flat
from tests.local.test_training import adamw, build, loss_of

SETTINGS: dict[str, Any] = {
    "steps": 6, "fragments": 3, "delay": 2, "mix": 0.25, "warm_up": 2, "codec": "int4"
}  # fmt: skip
"""A fragment is on its way at every update."""
UPDATES = 24
LATEST = 0.03
"""Seconds at most from the beginning of an update to the kill: some updates further."""


def life(folder: str, killed: int | None, after: int, delay: float) -> Tensor:
    """Train from the last whole checkpoint; rank ``killed`` dies some updates on."""
    model = build()
    session = slipstream.accelerate(model, adamw(model), None, {"local": SETTINGS})
    done = last_whole(Path(folder), session.world_size)
    if done:
        paths = [path_of(Path(folder), done, rank) for rank in range(session.world_size)]
        session.restore([torch.load(path, weights_only=True) for path in paths])
    end = Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
    for update in range(done + 1, UPDATES + 1):
        if session.rank == killed and update == done + 1 + after:
            end.start()
        session.backward(loss_of(model, session.rank, update))
        session.step()
        path = path_of(Path(folder), update, session.rank)
        torch.save(session.checkpoint(sharded=True), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    session.close()
    end.cancel()  # else it hits the next life, or the time between the two
    if end.is_alive():
        end.join()
    return flat(model.parameters())


def path_of(folder: Path, update: int, rank: int) -> Path:
    return folder / f"{update}-{rank}.pt"


def last_whole(folder: Path, ranks: int) -> int:
    """The last update of which every rank has written its part."""
    every = [
        {int(path.stem.partition("-")[0]) for path in folder.glob(f"*-{rank}.pt")}
        for rank in range(ranks)
    ]
    return max(set.intersection(*every), default=0)


def survive(ranks: Ranks, kills: int, seed: int) -> list[int]:
    """Kill until so many have hit; the updates that were whole then. Every run that ends must have
    the parameters of one that nobody disturbed."""
    chance, hit = random.Random(seed), list[int]()
    with tempfile.TemporaryDirectory() as folder:
        expected = ranks.run(life, folder, None, 0, 0.0)
    while len(hit) < kills:
        with tempfile.TemporaryDirectory() as folder:
            found: list[Tensor] = []
            while not found:
                victim = chance.randrange(ranks.size) if len(hit) < kills else None
                with suppress(RankFailure):
                    found = ranks.run(
                        life, folder, victim, chance.randrange(6), LATEST * chance.random()
                    )
                    continue
                hit.append(last_whole(Path(folder), ranks.size))
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), f"after kills at {hit}"
    return hit


if __name__ == "__main__":
    with Ranks(2) as two:
        print("killed after updates", survive(two, int(sys.argv[1]), seed=0))
