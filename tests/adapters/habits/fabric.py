"""Habits of scripts with Lightning Fabric."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.adapters.habits.habit import Given, Noted, habits_of
from tests.adapters.loops import adamw, adapter, model_of_tests, parameters

habit = habits_of("Fabric")


class Script:
    """A script whose first lines are the same in most habits."""

    def __init__(
        self,
        given: Given,
        model: nn.Module | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **named: Any,
    ) -> None:
        strategies = importlib.import_module("lightning.fabric.strategies")
        environments = importlib.import_module("lightning.fabric.plugins.environments")
        torchrun = environments.TorchElasticEnvironment()
        if given.strategy is None:
            chosen = strategies.DDPStrategy(cluster_environment=torchrun)
        else:
            chosen = adapter("fabric").FabricStrategy(given.strategy, cluster_environment=torchrun)
        package = importlib.import_module("lightning.fabric")
        self.f = package.Fabric(accelerator="cpu", devices=2, strategy=chosen, **named)
        self.f.launch()
        self.given, self.noted = given, list[torch.Tensor]()
        model = model_of_tests() if model is None else model
        self.model, self.optimizer = self.f.setup(model, optimizer(model))
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        rows = TensorDataset(x, x.sum(1, keepdim=True))
        self.loader = self.f.setup_dataloaders(DataLoader(rows, batch_size=4))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return mse_loss(self.model(x), y)

    def epoch(self, between: Callable[[int], Any] = lambda index: None) -> Script:
        for index, batch in enumerate(self.loader):
            loss = self.loss(batch)
            self.f.backward(loss)
            between(index)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.noted.append(self.f.all_gather(loss.detach()).mean())
        return self

    def end(self) -> Noted:
        self.noted += parameters(self.model)
        if self.given.strategy is not None:
            self.f.strategy.close()
        return self.noted


habit("no habit: the straight road")(lambda given: Script(given).epoch().epoch().end())
habit("mixed precision bf16")(lambda given: Script(given, precision="bf16-mixed").epoch().end())


def clipping(**named: Any) -> Callable[[Given], Noted]:
    def run(given: Given) -> Noted:
        script = Script(given)

        def clip(index: int) -> None:
            norm = script.f.clip_gradients(script.model, script.optimizer, **named)
            if norm is not None:
                script.noted.append(norm)

        return script.epoch(clip).end()

    return run


habit("clip by the norm")(clipping(max_norm=0.5))
habit("clip by value")(clipping(clip_val=0.1))
habit("clip by the infinite norm")(clipping(max_norm=0.5, norm_type=float("inf")))


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model_of_tests()

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.net(x), y)


@habit("mark_forward_method, mixed precision bf16")
def marks(given: Given) -> Noted:
    script = Script(given, Scored(), precision="bf16-mixed")
    script.model.mark_forward_method("loss_of")
    script.loss = lambda batch: script.model.loss_of(*batch)  # type: ignore[method-assign]
    return script.epoch().epoch().end()


@habit("accumulate")
def accumulates(given: Given) -> Noted:
    script = Script(given)
    for index, batch in enumerate(script.loader):
        with script.f.no_backward_sync(script.model, enabled=index % 2 == 0):
            script.f.backward(script.loss(batch) / 2)
        if index % 2:
            script.optimizer.step()
            script.optimizer.zero_grad()
    return script.end()


@habit("loss.backward() by hand")
def plain_backward(given: Given) -> Noted:
    script = Script(given)
    for batch in script.loader:
        script.loss(batch).backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("gradients zeroed before backward")
def zero_first(given: Given) -> Noted:
    script = Script(given)
    for batch in script.loader:
        script.optimizer.zero_grad()
        script.f.backward(script.loss(batch))
        script.optimizer.step()
    return script.end()


@habit("an update skipped by the script")
def skips(given: Given) -> Noted:
    script = Script(given)
    for index, batch in enumerate(script.loader):
        script.f.backward(script.loss(batch))
        if index != 3:
            script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("gradients looked at and changed before the step")
def changes_gradients(given: Given) -> Noted:
    script = Script(given)
    return script.epoch(lambda _: [p.grad.mul_(0.5) for p in script.model.parameters()]).end()


@habit("a frozen backbone")
def frozen(given: Given) -> Noted:
    model = model_of_tests()
    model[0].requires_grad_(False)  # type: ignore[index]
    return Script(given, model).epoch().end()


@habit("a layer unfrozen in mid-training")
def unfreezes(given: Given) -> Noted:
    model = model_of_tests()
    model[0].requires_grad_(False)  # type: ignore[index]
    script = Script(given, model).epoch()
    model[0].requires_grad_(True)  # type: ignore[index]
    return script.epoch().end()


@habit("a closure given to optimizer.step()")
def closure(given: Given) -> Noted:
    script = Script(given, optimizer=lambda m: torch.optim.LBFGS(m.parameters(), 0.1))
    for batch in script.loader:

        def again(batch: Any = batch) -> torch.Tensor:
            script.optimizer.zero_grad()
            loss = script.loss(batch)
            script.f.backward(loss)
            return loss

        script.optimizer.step(again)
    return script.end()


@habit("a closure given to AdamW.step()")
def closure_first(given: Given) -> Noted:
    """As in Lightning's example "build your own trainer"."""
    script = Script(given)
    for batch in script.loader:

        def compute(batch: Any = batch) -> torch.Tensor:
            loss = script.loss(batch)
            script.f.backward(loss)
            return loss

        script.noted.append(script.f.all_gather(script.optimizer.step(compute).detach()).mean())
        script.optimizer.zero_grad()
    return script.end()


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic, self.actor = nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.actor(x).softmax(-1), self.critic(x)

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        odds, value = self(x)
        loss: torch.Tensor = mse_loss(value, y) - odds.log().mean()
        return loss


@habit("reinforcement: a pass without gradients, training_step, clipping, a rate by hand")
def reinforcement(given: Given) -> Noted:
    script = Script(given, Actor())
    for epoch in range(2):
        script.optimizer.param_groups[0]["lr"] = 0.03 / (epoch + 1)
        with torch.no_grad():
            for x, _ in script.loader:
                script.noted.append(script.f.all_gather(script.model(x)[1].mean()).mean())
        for batch in script.loader:
            loss = script.model.training_step(*batch)
            script.optimizer.zero_grad()
            script.f.backward(loss)
            script.f.clip_gradients(script.model, script.optimizer, max_norm=0.5)
            script.optimizer.step()
    return script.end()


@habit("models after each other: folds")
def folds(given: Given) -> Noted:
    return [value for _ in range(3) for value in Script(given).epoch().end()]


@habit("a compiled model")
def compiled(given: Given) -> Noted:
    return Script(given, torch.compile(model_of_tests(), backend="eager")).epoch().epoch().end()  # type: ignore[arg-type]


@habit("two optimizers")
def two_optimizers(given: Given) -> Noted:
    script = Script(given)
    other = model_of_tests()
    other, optimizer = script.f.setup(other, adamw(other))
    for x, y in script.loader:
        script.f.backward(mse_loss(other(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return script.end()


@habit("an average of weights (EMA), by deepcopy")
def ema(given: Given) -> Noted:
    script = Script(given)
    own = script.model.module
    mean = copy.deepcopy(own).requires_grad_(False)

    @torch.no_grad()
    def follow(_: int) -> None:
        for a, b in zip(mean.parameters(), own.parameters(), strict=True):
            a.lerp_(b, 0.1)

    script.epoch(follow)
    return [*parameters(mean), *script.end()]


@habit("state saved and loaded in mid-training, to go back")
def goes_back(given: Given) -> Noted:
    script = Script(given).epoch()
    state = {"model": script.model, "optimizer": script.optimizer}
    if given.strategy is not None:
        state["session"] = script.f.strategy.session
    script.f.save(given.folder / "state", state)
    script.epoch()
    script.f.load(given.folder / "state", state)
    return script.epoch().end()
