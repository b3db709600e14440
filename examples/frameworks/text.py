"""What the scripts share: a small GPT-2, the source text of Python's standard library, a meter."""

from __future__ import annotations

import os
import sysconfig
import time
from pathlib import Path
from statistics import mean

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH = 64
UPDATES = int(os.environ.get("UPDATES", "40"))
torch.set_num_threads(1)


class Source(Dataset[dict[str, torch.Tensor]]):
    """Rows of bytes."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: 4000 * LENGTH]
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).view(-1, LENGTH).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def gpt2() -> GPT2LMHeadModel:
    """3.2 million parameters."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_head=4, n_embd=256, vocab_size=256, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Meter:
    """The time between updates, and the loss."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []

    def update(self, loss: torch.Tensor | float) -> None:
        """An update is done."""
        self.times.append(time.perf_counter())
        self.losses.append(float(loss))

    def report(self) -> None:
        """Say what was measured, on the first rank."""
        if os.environ.get("RANK", "0") == "0":
            first = min(5, len(self.times) - 2)  # those before it warm up
            seconds = (self.times[-1] - self.times[first]) / (len(self.times) - 1 - first)
            print(
                f"after {len(self.times)} updates: loss {mean(self.losses[-5:]):.3f}, "
                f"{seconds:.3f} s an update",
                flush=True,
            )
