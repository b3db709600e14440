"""What an adapter refuses, or says, of a framework's own settings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.adapters.opening import open_session
from slipstream.errors import ModelError, UsageError
from tests.adapters.habits.accelerate_script import Script as AccelerateScript, hf
from tests.adapters.habits.habit import Given
from tests.adapters.habits.lightning import trained
from tests.adapters.loops import adamw, adapter
from tests.adapters.test_loops import pytestmark as needs_frameworks
from tests.harness.ranks import Ranks

pytestmark = needs_frameworks


def counted_alone() -> str:
    """Accelerate itself counts one process, as it does on CPUs without ``cpu=True``."""
    state = hf("accelerate").state
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
    accelerator = adapter("accelerate").Accelerator(strategy={})
    model = nn.Linear(8, 1)
    try:
        accelerator.prepare(model, adamw(model))
    except UsageError as error:
        return str(error)
    finally:
        state.AcceleratorState._reset_state(True)
    return f"{accelerator.num_processes} processes"


def test_ranks_that_accelerate_does_not_count_are_refused(two: Ranks) -> None:
    for said in two.run(counted_alone):
        assert "Accelerate counts 1 process, and there are 2 ranks" in said
        assert "use_cpu=True" in said


SCALED: dict[str, Any] = {"framework": "Accelerate", "accumulation": "of it", "scaler": object()}


@pytest.mark.parametrize(
    ("strategy", "named", "words"),
    [
        ({"gradients": {"transport": "sharded"}}, {"precision": "fp16"}, "whose scaler reads all"),
        (
            {"precision": {"kind": "autocast", "dtype": "bf16"}},
            {"precision": None, "scaler": None, "compiled_copy": "use_regional_compilation"},
            "precision in the strategy and use_regional_compilation of Accelerate",
        ),
        (
            {"precision": {"kind": "autocast", "dtype": "bf16"}},
            {"precision": None, "scaler": None},
            "several models, .* let Accelerate choose the precision: mixed_precision='bf16'",
        ),
    ],
    ids=["a scaler and shards", "a compiled copy", "several models"],
)
def test_what_would_go_wrong_later_is_refused(strategy: Any, named: Any, words: str) -> None:
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    with pytest.raises(UsageError, match=words):
        open_session(model, torch.optim.SGD(model.parameters()), strategy, **SCALED | named)


def test_parameters_of_a_loss_are_refused_with_what_to_do_in_a_framework() -> None:
    model, loss = nn.Linear(2, 1), nn.Linear(1, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()])
    with pytest.raises(ModelError, match="not in the model") as raised:
        open_session(model, optimizer, {}, precision=None, **SCALED | {"scaler": None})
    assert "model.head = loss.classifier" in raised.value.__notes__[0]


def saved_after_fit(strategy: Any, folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(
            Given(strategy, folder),
            max_epochs=1,
            after=lambda trainer: trainer.save_checkpoint(folder / "last.ckpt"),
        )
    return [str(w.message) for w in caught if "is saved after fit()" in str(w.message)]


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [({"gradients": {"codec": "onebit"}}, ["codec onebit"]), ({"local": {}}, ["local"]), ({}, [])],
    ids=str,
)
def test_a_lightning_checkpoint_behind_fit_says_what_it_lacks(
    two: Ranks, strategy: Any, lost: list[str], tmp_path: Path
) -> None:
    for said in two.run(saved_after_fit, strategy, tmp_path):
        assert len(said) == len(lost)
        assert all(
            f"{name} would begin anew" in words for name, words in zip(lost, said, strict=True)
        )


def joined(folder: Path) -> str:
    script = AccelerateScript(Given({}, folder))
    loaders = hf("accelerate").utils.DataLoaderConfiguration(even_batches=False)
    script.prepare(dataloader_config=loaders)
    try:
        with script.a.join_uneven_inputs([script.model], even_batches=True):
            return "joined"
    except UsageError as error:
        return str(error)
    finally:
        script.a.end_training()


def test_uneven_loaders_are_not_joined_by_a_later_word(two: Ranks, tmp_path: Path) -> None:
    for said in two.run(joined, tmp_path):
        assert "even_batches=True of the Accelerator itself" in said
