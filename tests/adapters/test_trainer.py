"""Hugging Face's Trainer: a session in place of DDP changes no bit on two ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.harness.ranks import Ranks

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
INT8 = {"gradients": {"codec": {"kind": "int8", "error_feedback": True}}}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def tokens() -> list[dict[str, torch.Tensor]]:
    rows = [torch.randint(50, (8,), generator=torch.Generator().manual_seed(i)) for i in range(48)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(
    strategy: dict[str, Any] | None, folder: str, resume: str | None = None
) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Eight updates of two batches each, a checkpoint after the fourth: the log, the parameters."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=8,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=8, save_steps=4, logging_steps=1, learning_rate=0.01,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    named = {
        "model": transformers.GPT2LMHeadModel(config), "args": arguments, "train_dataset": tokens()
    }  # fmt: skip
    if strategy is None:
        trainer = transformers.Trainer(**named)
    else:
        ours = importlib.import_module("slipstream.adapters.trainer")
        trainer = ours.SessionTrainer(strategy=strategy, **named)
    trainer.train(resume_from_checkpoint=resume)
    if strategy is not None:
        assert trainer.accelerator.session.updates == 8
        trainer.accelerator.free_memory()
    logged = [e for e in trainer.state.log_history if "grad_norm" in e]
    return logged, [p.detach().clone() for p in trainer.model.parameters()]


def as_under_ddp(strategy: dict[str, Any], folder: str) -> tuple[bool, float]:
    (ours, ended), (plain, expected) = train(strategy, folder + "/a"), train(None, folder + "/b")
    assert len(ours) == len(plain) == 8
    same = all(map(torch.equal, ended, expected))
    return same, max(abs(a["grad_norm"] - b["grad_norm"]) for a, b in zip(ours, plain, strict=True))


def test_it_trains_as_under_ddp(two: Ranks, tmp_path: Path) -> None:
    assert two.run(as_under_ddp, {}, str(tmp_path)) == [(True, 0.0)] * 2


def goes_on(strategy: dict[str, Any], folder: str) -> bool:
    _, whole = train(strategy, folder + "/whole")
    _, rest = train(strategy, folder + "/rest", resume=folder + "/whole/checkpoint-4")
    return all(map(torch.equal, whole, rest))


@pytest.mark.parametrize(
    "strategy", [INT8, {"gradients": {"transport": "sharded"}}], ids=["int8", "sharded"]
)
def test_it_goes_on_from_its_checkpoint_bit_for_bit(
    two: Ranks, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    assert two.run(goes_on, strategy, str(tmp_path)) == [True, True]
