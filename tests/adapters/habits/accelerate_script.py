"""What habits of scripts with Hugging Face Accelerate share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.adapters.habits.habit import Given, Noted, habits_of
from tests.adapters.loops import adamw, adapter, model_of_tests, parameters

habit = habits_of("Accelerate")
hf = importlib.import_module


def rows(count: int = 64) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


class Script:
    """A script whose first lines are the same in most habits."""

    def __init__(self, given: Given) -> None:
        self.given, self.folder = given, given.folder
        self.noted: Noted = []

    def accelerator(self, **named: Any) -> Any:
        package = hf("accelerate")
        package.state.AcceleratorState._reset_state(True)
        package.state.GradientState._reset_state()
        if self.given.strategy is None:
            made = package.Accelerator(cpu=True, **named)
        else:
            made = adapter("accelerate").Accelerator(
                cpu=True, strategy=self.given.strategy, **named
            )
            self.given.close.append(lambda: made.close(RuntimeError, RuntimeError("over"), None))
        self.a = made
        return made

    def prepare(
        self,
        model: nn.Module | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        data: Any = None,
        **named: Any,
    ) -> Script:
        accelerator = self.accelerator(**named)
        model = model_of_tests() if model is None else model
        made = optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(made, 5, gamma=0.9)
        loader = DataLoader(rows() if data is None else data, batch_size=4)
        prepared = accelerator.prepare(model, made, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        return self

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return mse_loss(self.model(x), y)

    def update(self, batch: Any, clip: float | None = None) -> None:
        """A pass as Accelerate's own examples write it."""
        a = self.a
        with a.accumulate(self.model):
            loss = self.loss(batch)
            a.backward(loss)
            if clip is not None and a.sync_gradients:
                self.noted.append(torch.as_tensor(a.clip_grad_norm_(self.model.parameters(), clip)))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.noted.append(a.gather(loss.detach()).mean())

    def epochs(self, count: int = 2, clip: float | None = None) -> Script:
        for _ in range(count):
            for batch in self.loader:
                self.update(batch, clip)
        return self

    def end(self) -> Noted:
        self.noted += parameters(self.a.unwrap_model(self.model))
        self.noted.append(torch.tensor(self.optimizer.param_groups[0]["lr"]))
        self.a.free_memory()
        return self.noted


def hooks_free() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
