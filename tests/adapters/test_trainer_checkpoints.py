"""Checkpoints of a SessionTrainer, as transformers reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.adapters.habits.habit import Given
from tests.adapters.habits.trainer_script import Script, gpt2, padded, sentences
from tests.adapters.test_loops import RESUMED, pytestmark as needs_frameworks
from tests.harness.ranks import Ranks

pytestmark = needs_frameworks

HALF = {
    "half weights": {"precision": "half_weights"},
    "sharded masters": RESUMED["sharded masters"],
}


def differs(strategy: str, folder: Path) -> tuple[torch.dtype, float]:
    """The type in which a checkpoint is read, and how far its weights are from those trained."""
    named = {"data_collator": padded, "num_train_epochs": 1, "save_strategy": "steps"}
    model = Script(Given(HALF[strategy], folder), gpt2(), sentences(), save_steps=4, **named)
    trained = model.train().t.model
    torch.distributed.barrier()
    read = type(trained).from_pretrained(folder / "checkpoint-4")
    pairs = zip(read.parameters(), trained.parameters(), strict=True)
    return read.dtype, max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("strategy", HALF)
def test_a_checkpoint_is_read_in_full_precision(two: Ranks, strategy: str, tmp_path: Path) -> None:
    assert two.run(differs, strategy, tmp_path) == [(torch.float32, 0.0)] * 2
