"""The Python of these pages runs as it is written: alone, and on ranks that have not met yet."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import slipstream
from tests.harness.ranks import Ranks

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = (
    *("README.md", "docs/data.md", "docs/how-do-i.md", "docs/optim.md", "docs/precision.md"),
    "docs/session.md",
)
SESSION = """
session = slipstream.accelerate(model, optimizer, DataLoader(torch.ones(8, 4), batch_size=4))
"""
SAVED = f"{SESSION}slipstream.write_checkpoint(session.checkpoint(), 'checkpoint.pt')\n"
BEFORE = {f"docs/session.md:{number}": SESSION for number in (1, 2, 3)} | {
    "docs/session.md:4": SAVED,
    "docs/how-do-i.md:0": SESSION,
}
"""What a block presumes of the one before it on its page."""
BLOCKS = {
    f"{name}:{number}": BEFORE.get(f"{name}:{number}", "") + block
    for name in PAGES
    for number, block in enumerate(BLOCK.findall((ROOT / name).read_text()))
}


class Row(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Rows(list[Row]):
    """Seven of them; takes a ``lengths``."""

    def __init__(self) -> None:
        super().__init__(Row(torch.full((4,), float(i)), torch.ones(1)) for i in range(7))


class Outputs(nn.Module):
    """Logits of a language model."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 5))


def mean_loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def what_a_page_presumes(text: str) -> dict[str, Any]:
    """The names that its blocks leave to the reader."""
    model, dataset = nn.Linear(4, 1), Rows()
    texts = ["a" * (1 + index % 4) for index in range(len(dataset))]
    names: dict[str, Any] = {
        "Augmented": lambda data: data,
        "DataLoader": DataLoader,
        "Decoded": lambda files: TensorDataset(torch.tensor(files)),
        "DistributedSampler": DistributedSampler,
        "collate": lambda rows: torch.stack([row.x for row in rows]),
        "dataset": dataset,
        "epochs": 2,
        "files": [1, 2, 3],
        "g": torch.Generator(),
        "lengths": list(map(len, texts)),
        "loss_fn": lambda out, target=None: (
            mean_loss(out) if target is None else mse_loss(out, target)
        ),
        "mean_loss": mean_loss,
        "mean_loss_per_token": lambda model, batch: model(batch).square().mean(),
        "model": Outputs() if "input_ids" in text else model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "per_token_losses": torch.zeros(1, 2048),
        "rank": 0,
        "ranks": 1,
        "sequences": [torch.tensor([1, 2, 3]), torch.tensor([4])],
        "slipstream": slipstream,
        "strategy": {"data": {"balance": {"mean": "tokens"}}},
        "texts": texts,
        "torch": torch,
        "validation": DataLoader(dataset, batch_size=4),  # type: ignore[arg-type]
    }
    if "loader =" not in text:
        names["loader"] = DataLoader(dataset, batch_size=4)  # type: ignore[arg-type]
    return names


def run(text: str) -> list[float]:
    """The parameters after it."""
    torch.manual_seed(0)
    names = what_a_page_presumes(text)
    model = names["model"]
    exec(compile(text, "block", "exec"), names)
    if "session" in names:
        names["session"].close()
    return [float(value) for p in model.parameters() for value in p.detach().flatten()]


def test_there_are_blocks() -> None:
    assert {"README.md:0", "docs/data.md:0", "docs/data.md:3"} <= set(BLOCKS)
    assert "DistributedSampler" in BLOCKS["README.md:0"]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs_as_it_is_written(two: Ranks, name: str, tmp_path: Path) -> None:
    if "cache" in BLOCKS[name]:
        pytest.importorskip("lmdb")
    text = BLOCKS[name].replace("workers=2", "threads=True")  # ranks of the tests start no process
    text = text.replace('"runs/a"', f'"{tmp_path}"').replace("checkpoint.pt", f"{tmp_path}/saved")
    text = text.replace("model.pt", f"{tmp_path}/model")
    text = text.replace("strategy.yaml", "exact").replace("GradScaler()", "GradScaler('cpu')")
    alone = run(text)
    first, second = two.run(run, text, connect=False)
    assert first == second
    if "backward(" in text:
        torch.manual_seed(0)
        before = [float(v) for p in nn.Linear(4, 1).parameters() for v in p.detach().flatten()]
        assert first != before
        assert alone != before
