"""Short trainings that are killed and go on; each update leaves a line of its loss."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import slipstream
from slipstream.checkpoint import Checkpoints

UPDATES = 20
WORDS, WIDTH = 23, 12


class Net(nn.Module):
    """Tied weights, a tensor that is stored by itself, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, 100)
        self.drop = nn.Dropout(0.1)
        self.outer = nn.Linear(100, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = x + self.outer(self.drop(torch.tanh(self.inner(x))))
        out: Tensor = self.head(self.norm(x))
        return out


class Lengths(Dataset[Tensor]):
    """Sequences that say how long they are."""

    def __init__(self) -> None:
        self.lengths = [3 + 7 * i % 11 for i in range(97)]
        seed = torch.Generator().manual_seed(2)
        self.rows = [torch.randint(WORDS, (n + 1,), generator=seed) for n in self.lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Turned(Dataset[Tensor]):
    """Rows that Python's and NumPy's random numbers change each time they are read."""

    def __init__(self) -> None:
        seed = torch.Generator().manual_seed(1)
        self.rows = torch.randint(WORDS, (60, 6), generator=seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        row = self.rows[index].roll(random.randrange(6))
        return row.flip(0) if np.random.rand() < 0.5 else row


def fixed() -> Any:
    """Shuffled by torch's default generator, from which dropout draws, too."""
    return DataLoader(Turned(), batch_size=4, shuffle=True)


def spread() -> Any:
    rank, ranks = slipstream.data_share()
    sampler: Any = DistributedSampler(Lengths(), ranks, rank)
    return DataLoader(Lengths(), batch_size=4, sampler=sampler, collate_fn=padded)


@dataclass(frozen=True)
class Setting:
    """A strategy with the loader it trains from."""

    strategy: dict[str, Any]
    loader: Callable[[], Iterable[Tensor]] = fixed
    optimizer: dict[str, Any] = field(default_factory=lambda: {"lr": 0.02})


SCALE = {"kind": "dynamic", "init": 2.0**17, "incr_every_n": 4}
"""Overflows in the first updates, then grows."""
SETTINGS = {
    "plain": Setting({}),
    "codec, sharded, accumulation, loss scale": Setting(
        {
            "gradients": {"codec": "int8", "transport": "sharded", "accumulate": 2},
            "precision": {
                "kind": "autocast",
                "dtype": "fp16",
                "loss_scale": SCALE,
                "emulate": True,
            },
        }
    ),
    "half weights, sharded": Setting(
        {
            "gradients": {"transport": "sharded"},
            "precision": {
                "kind": "half_weights",
                "dtype": "fp16",
                "loss_scale": SCALE,
                "emulate": True,
            },
        }
    ),
    "powersgd": Setting({"gradients": {"codec": {"kind": "powersgd", "start_step": 0}}}),
    "local": Setting(
        {"local": {"steps": 6, "fragments": 3, "delay": 2, "mix": 0.25, "codec": "int4"}}
    ),
    "balanced data": Setting({"data": {"balance": {}}}, spread),
}


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


@dataclass
class Curve:
    """The losses of a rank by update, each exact; a file, which outlives the process."""

    path: Path

    def add(self, update: int, loss: Tensor) -> None:
        with self.path.open("a") as file:
            file.write(f"{update} {loss.double().item().hex()}\n")

    def read(self) -> dict[int, set[str]]:
        """What was computed for each update, in all lives."""
        found: dict[int, set[str]] = {}
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in lines:
            update, loss = line.split()
            found.setdefault(int(update), set()).add(loss)
        return found


def train(
    name: str,
    folder: str,
    *,
    updates: int = UPDATES,
    every: int = 1,
    begins: Callable[[int], object] = lambda update: None,
    **options: Any,
) -> Tensor:
    """Train to the end, from the newest checkpoint; returns the parameters.

    Args:
        name: of the setting.
        folder: of checkpoints and curves; a new process may go on.
        updates: at the end.
        every: updates from one checkpoint to the next.
        begins: called with the number of each update before it.
        options: of the checkpoints.
    """
    setting = SETTINGS[name]
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), **setting.optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    saved = Checkpoints(Path(folder) / "saved", also={"scheduler": scheduler}, **options)
    loader = setting.loader()
    with slipstream.accelerate(model, optimizer, loader, setting.strategy) as session:
        saved.restore(session)
        if session.updates == 0:
            seed_all(session.rank)
        curve = Curve(Path(folder) / f"curve-{session.rank}")
        done = session.updates
        first = session.state_dict()["data"].get("epoch", 0)
        for epoch in itertools.count(first):
            if done >= updates:  # killed after the last one
                return flat(session.checkpoint("model")["model"])
            if isinstance(sampler := getattr(loader, "sampler", None), DistributedSampler):
                sampler.set_epoch(epoch)
            losses: list[Tensor] = []
            for words in session.loader:
                if not losses:
                    begins(done + 1)
                loss = loss_of(session.model, words)
                session.backward(loss)
                losses.append(loss.detach())
                skipped = session.skipped
                if session.step():
                    done = session.updates
                    curve.add(done, torch.stack(losses).sum())
                    scheduler.step()
                    losses.clear()
                elif session.skipped > skipped:  # a life may begin behind it
                    losses.clear()
                saved.step(session, every=every)
                if done >= updates:
                    return flat(session.checkpoint("model")["model"])
            if session.flush():
                scheduler.step()
    raise AssertionError


def seed_all(number: int) -> None:
    """Seed torch, Python and NumPy."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(number)


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1).clone() for value in state.values()])


def part(name: str, folder: str, updates: int) -> Tensor:
    """Train until so many updates."""
    return train(name, folder, updates=updates)
