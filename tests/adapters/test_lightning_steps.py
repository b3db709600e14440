"""Lightning and Fabric: steps in place of a forward, optimizers that are set up anew, averages."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.adapters.habits.fabric import Script
from tests.adapters.habits.habit import Given
from tests.adapters.habits.lightning import called, trained, without_norm
from tests.adapters.test_loops import pytestmark as needs_frameworks
from tests.harness.ranks import Ranks

pytestmark = needs_frameworks

AUTOCAST = {"precision": {"kind": "autocast", "dtype": "bf16"}}


def types_in_step(folder: Path) -> set[torch.dtype]:
    seen = set()

    def step(self: Any, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        seen.add(self.net[0](x).dtype)
        return mse_loss(self.net(x), y)

    trained(Given(AUTOCAST, folder), methods={"training_step": step}, max_epochs=1)
    return seen


def test_a_training_step_that_calls_no_forward_runs_in_autocast(two: Ranks, tmp_path: Path) -> None:
    assert two.run(types_in_step, tmp_path) == [{torch.bfloat16}] * 2


def notes_of(step: str, folder: Path) -> list[str]:
    def calls(self: Any, batch: Any, index: int) -> Any:
        return mse_loss(self(batch[0]), batch[1])

    other = {"validation_step": "training_step", "training_step": "validation_step"}[step]
    try:
        trained(Given({"precision": "half_weights"}, folder), methods={other: calls}, max_epochs=1)
    except RuntimeError as error:
        return error.__notes__
    return []


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_a_step_that_calls_parts_of_a_module_with_16_bit_weights_is_explained(
    two: Ranks, step: str, tmp_path: Path
) -> None:
    for (note,) in two.run(notes_of, step, tmp_path):
        assert f"{step}() calls self(...)" in note


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = without_norm(), set[torch.dtype]()

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.add(self.net[0](x).dtype)
        return mse_loss(self(x), y)


def types_in_marked_method(folder: Path) -> set[torch.dtype]:
    model = Scored()
    script = Script(Given(AUTOCAST, folder), model)
    script.model.mark_forward_method("loss_of")
    script.loss = lambda batch: script.model.loss_of(*batch)  # type: ignore[method-assign]
    script.epoch().end()
    seen = {*model.seen}
    script.model.loss_of(torch.ones(2, 8), torch.ones(2, 1))
    for _ in range(sys.getrecursionlimit()):  # no call wraps the one before
        script.model(torch.ones(2, 8))
    return seen


def test_a_method_that_is_marked_as_forward_runs_in_autocast(two: Ranks, tmp_path: Path) -> None:
    assert two.run(types_in_marked_method, tmp_path) == [{torch.bfloat16}] * 2


def rate_saved(folder: Path) -> float:
    """The rate in a checkpoint behind an epoch that another optimizer has begun."""

    def begins(self: Any) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 0.02)]

    def saves(given: Given) -> Any:
        return called("ModelCheckpoint")(given.folder, filename="saved")

    own = {"enable_checkpointing": True, "max_epochs": 1}
    methods = {"on_train_epoch_start": begins}
    trained(Given({}, folder), methods=methods, callbacks=[saves], **own)
    state = torch.load(folder / "saved.ckpt", weights_only=False)
    return float(state["optimizer_states"][0]["param_groups"][0]["lr"])


def test_a_checkpoint_has_the_optimizer_that_was_set_up_anew(two: Ranks, tmp_path: Path) -> None:
    assert two.run(rate_saved, tmp_path) == [0.02, 0.02]


def validated_with_an_average(folder: Path, swaps: bool) -> tuple[list[torch.Tensor], list[bool]]:
    """The trained parameters, and whether each validation saw those that a callback puts in."""
    callback: Any = importlib.import_module("lightning.pytorch").Callback
    seen = []

    class Average(callback):  # type: ignore[misc]
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self.own = [p.detach().clone() for p in module.parameters()]
            for parameter in module.parameters():
                parameter.data.fill_(0.5)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            for parameter, own in zip(module.parameters(), self.own, strict=True):
                parameter.data.copy_(own)

    def looks(self: Any, batch: Any, index: int) -> None:
        seen.append(all(bool((p == 0.5).all()) for p in self.parameters()))

    made: list[Any] = [lambda given: Average()] if swaps else []
    methods = {"validation_step": looks}
    found = trained(Given({"local": {"steps": 3}}, folder), methods=methods, callbacks=made)
    return found, seen


def test_a_callback_validates_its_average_and_changes_no_training(
    two: Ranks, tmp_path: Path
) -> None:
    expected = two.run(validated_with_an_average, tmp_path, False)
    found = two.run(validated_with_an_average, tmp_path, True)
    for (values, seen), (plain, _) in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))
        assert seen
        assert all(seen)


def statistics_of_averages(folder: Path, validated: int | None) -> list[torch.Tensor]:
    """Running statistics that an epoch without backward has made, as fit() leaves them."""
    kept: list[torch.Tensor] = []

    def with_norm() -> nn.Module:
        model = without_norm()
        model.insert(1, nn.BatchNorm1d(16))  # type: ignore[operator]
        return model

    trained(
        Given({}, folder), model=with_norm, max_epochs=2, limit_val_batches=validated,
        callbacks=[lambda _: called("StochasticWeightAveraging")(0.01, 1)],
        after=lambda trainer: kept.extend(trainer.lightning_module.buffers()),
    )  # fmt: skip
    return kept


@pytest.mark.parametrize("validated", [None, 0])
def test_ranks_have_the_first_ones_statistics_of_an_epoch_without_backward(
    two: Ranks, validated: int | None, tmp_path: Path
) -> None:
    first, second = two.run(statistics_of_averages, tmp_path, validated)
    assert first
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


OF_THE_OTHER_PACKAGE = """
import pytorch_lightning
import torch
from slipstream.adapters.lightning import SessionStrategy

class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        assert self.trainer.strategy.session is not None
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = pytorch_lightning.Trainer(
    strategy=SessionStrategy({}), accelerator="cpu", devices=1, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, gradient_clip_val=1.0,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 2)))
print(trainer.global_step, "updates")
"""


def test_a_script_of_pytorch_lightning_gets_a_strategy_of_that_package() -> None:
    """Its Trainer takes none of ``lightning.pytorch``."""
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", OF_THE_OTHER_PACKAGE]
    ended = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    assert "4 updates" in ended.stdout, ended.stderr
