"""Trainings that are killed at random moments, and go on from the newest whole checkpoint."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Timer

import torch
from torch import Tensor

from slipstream.checkpoint.folder import Folder, updates_of
from tests.checkpoint.training import Curve, train
from tests.harness.ranks import RankFailure, Ranks

LATEST = 0.4
"""Seconds at most from the beginning of an update to the kill: into the next updates, or into the
writing of a checkpoint, which happens after each."""


def life(name: str, folder: str, killed: int | None, after: int, delay: float) -> Tensor:
    """Train to the end; rank ``killed`` dies some updates on."""
    count = 0
    end = Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))

    def begins(update: int) -> None:
        nonlocal count
        if int(os.environ["RANK"]) == killed and count == after:
            end.start()
        count += 1

    try:
        return train(name, folder, begins=begins)
    finally:
        end.cancel()  # else it hits the next life, or the time between the two
        if end.is_alive():
            end.join()


def survive(
    ranks: Ranks, name: str, kills: int, seed: int, struck: Callable[[], object] = lambda: None
) -> tuple[int, int]:
    """Kill until so many have hit; the kills, and those that left a checkpoint unfinished.

    ``struck`` is called after each.

    Every loss that any life has computed must be that of a run that nobody disturbed, and so must
    the parameters at the end.
    """
    chance, hit, unfinished = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        expected = ranks.run(life, name, folder, None, 0, 0.0)
        curves = [curve(folder, rank) for rank in range(ranks.size)]
    while hit < kills:
        with tempfile.TemporaryDirectory() as folder:
            found: list[Tensor] = []
            while not found:
                victim = chance.randrange(ranks.size) if hit < kills else None
                moment = chance.randrange(4), LATEST * chance.random()
                with suppress(RankFailure):
                    found = ranks.run(life, name, folder, victim, *moment)
                    continue
                hit += 1
                struck()
                unfinished += newest(folder) < max(curve(folder, 0), default=0)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), f"{name}: other parameters after {hit} kills"
            for rank in range(ranks.size):
                assert curve(folder, rank) == curves[rank], f"{name}: another curve, {hit} kills"
    return hit, unfinished


def newest(folder: str) -> int:
    """The updates of the newest checkpoint."""
    return max(map(updates_of, Folder(Path(folder) / "saved").complete()), default=0)


def curve(folder: str, rank: int) -> dict[int, set[str]]:
    """Losses of a rank, by update."""
    return Curve(Path(folder) / f"curve-{rank}").read()
