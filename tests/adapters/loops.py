"""A typical loop in each framework, with its own data parallelism or with a session."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

UPDATES = 4  # an epoch, of two batches each

Noted = list[torch.Tensor]
Loop = Callable[..., Noted]


def model_of_tests() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.03)


def dataset(per_update: int) -> Dataset[Any]:
    x = torch.randn(UPDATES * per_update, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def samples() -> Dataset[Any]:
    """Two batches of four for each rank and update."""
    return dataset(8 * torch.distributed.get_world_size())


def adapter(name: str) -> Any:
    return importlib.import_module(f"slipstream.adapters.{name}")


def parameters(model: nn.Module) -> Noted:
    return [p.detach().clone() for p in model.parameters()]


# Each loop returns the losses (and norms, where the framework tells them), then the parameters.
# ``folder``: where it saves after the first epoch, or, with ``resume``, goes on from there.


def accelerate(
    strategy: Any, *, epochs: int = 3, folder: Path | None = None, resume: bool = False
) -> Noted:
    package = importlib.import_module("accelerate")
    package.state.AcceleratorState._reset_state(True)
    package.state.GradientState._reset_state()
    own = {} if strategy is None else {"strategy": strategy}
    of = package if strategy is None else adapter("accelerate")
    accelerator = of.Accelerator(cpu=True, gradient_accumulation_steps=2, **own)
    model = model_of_tests()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    loader = DataLoader(samples(), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    noted: Noted = []
    if resume:
        accelerator.load_state(str(folder))
    for epoch in range(int(resume), epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    noted += [accelerator.gather(loss.detach()).mean(), norm]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if folder is not None and not resume and epoch == 0:
            accelerator.save_state(str(folder))
    noted += parameters(accelerator.unwrap_model(model))
    accelerator.free_memory()  # as end_training(), which ends the process group, too
    return noted


def trainer(
    strategy: Any,
    *,
    epochs: int = 3,
    folder: Path | None = None,
    resume: bool = False,
    times: int = 1,
    change: Callable[[nn.Module], object] = lambda model: None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **settings: Any,
) -> Noted:
    package = importlib.import_module("accelerate")
    transformers = importlib.import_module("transformers")
    package.state.AcceleratorState._reset_state(True)
    package.state.GradientState._reset_state()

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of_tests()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.net(x)
            return {"loss": nn.functional.mse_loss(scores, labels), "scores": scores}

    model = Scored()
    change(model)
    x, labels = samples()[:]
    rows = [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder or "unused"), max_steps=epochs * UPDATES, logging_steps=1,
        save_strategy="no" if folder is None or resume else "steps", save_steps=UPDATES,
        learning_rate=0.03, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, **settings,
    )  # fmt: skip
    named = {"model": model, "args": arguments, "train_dataset": rows, "eval_dataset": rows}
    if optimizer is not None:
        made = optimizer(model)
        named["optimizers"] = made, torch.optim.lr_scheduler.ConstantLR(made, 1.0)
    if strategy is None:
        made = transformers.Trainer(**named)
    else:
        made = adapter("trainer").SessionTrainer(strategy=strategy, **named)
    for _ in range(times):
        made.train(resume_from_checkpoint=f"{folder}/checkpoint-{UPDATES}" if resume else None)
    logged = [entry for entry in made.state.log_history if "grad_norm" in entry]
    noted = [
        torch.tensor(e[key]) for e in logged[-epochs * UPDATES :] for key in ("loss", "grad_norm")
    ]
    if resume:  # the log of the first epoch is in the checkpoint
        noted = noted[2 * UPDATES :]
    if strategy is not None:
        assert made.accelerator.session is None  # train() has closed it
    return noted + parameters(made.model)


def lightning(
    strategy: Any,
    *,
    epochs: int = 3,
    folder: Path | None = None,
    resume: bool = False,
    precision: str = "32-true",
    manual: bool = False,
    optimizers: Callable[[nn.Module], Any] = lambda model: adamw(model),
    at_validation: Callable[[nn.Module], None] = lambda model: None,
    averages: bool = False,
    val_check_interval: float = 1.0,
    launcher: str = "TorchElasticEnvironment",
) -> Noted:
    pytorch = importlib.import_module("lightning.pytorch")
    strategies = importlib.import_module("lightning.pytorch.strategies")
    environments = importlib.import_module("lightning.fabric.plugins.environments")
    noted: Noted = []

    class Module(pytorch.LightningModule):  # type: ignore[name-defined]  # imported late
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of_tests()
            self.automatic_optimization = not manual

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self(x), y)
            if index % 2:
                noted.append(self.all_gather(loss.detach()).mean())
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=1.0)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            at_validation(self)
            x, y = batch
            self.log("loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

        def configure_optimizers(self) -> Any:
            made = optimizers(self)
            if isinstance(made, list):
                return made
            return [made], [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.9)]

    started = getattr(environments, launcher)()
    if strategy is None:
        chosen = strategies.DDPStrategy(cluster_environment=started)
    else:
        chosen = adapter("lightning").SessionStrategy(strategy, cluster_environment=started)
    package = importlib.import_module("lightning.pytorch.callbacks")
    callbacks = [package.StochasticWeightAveraging(0.01, 1)] if averages else []
    if folder is not None:
        callbacks += [package.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
    made = pytorch.Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=chosen,
        precision=precision, max_epochs=epochs, logger=False,
        accumulate_grad_batches=1 if manual else 2, gradient_clip_val=None if manual else 1.0,
        callbacks=callbacks, val_check_interval=val_check_interval,
        enable_checkpointing=folder is not None, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, use_distributed_sampler=True,
    )  # fmt: skip
    module, loader = Module(), DataLoader(samples(), batch_size=4)
    made.fit(
        module, loader, DataLoader(samples(), batch_size=4),
        ckpt_path=str(folder / "epoch=0.ckpt") if folder and resume else None,
    )  # fmt: skip
    if strategy is not None:
        assert chosen.session is None  # fit() has closed it
    return [*noted, made.callback_metrics["loss"], *parameters(module)]


def fabric(
    strategy: Any, *, epochs: int = 3, folder: Path | None = None, resume: bool = False
) -> Noted:
    package = importlib.import_module("lightning.fabric")
    strategies = importlib.import_module("lightning.fabric.strategies")
    environments = importlib.import_module("lightning.fabric.plugins.environments")
    torchrun = environments.TorchElasticEnvironment()
    if strategy is None:
        chosen = strategies.DDPStrategy(cluster_environment=torchrun)
    else:
        chosen = adapter("fabric").FabricStrategy(strategy, cluster_environment=torchrun)
    made = package.Fabric(
        accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=chosen
    )
    made.launch()
    model = model_of_tests()
    model, optimizer = made.setup(model, adamw(model))
    loader = made.setup_dataloaders(DataLoader(samples(), batch_size=4))
    state = {"model": model, "optimizer": optimizer}
    if strategy is not None:
        state["session"] = chosen.session
    noted: Noted = []
    if resume:
        made.load(folder, state)
    for epoch in range(int(resume), epochs):
        for index, (x, y) in enumerate(loader):
            waits = index % 2 == 0
            with made.no_backward_sync(model, enabled=waits):
                loss = nn.functional.mse_loss(model(x), y)
                made.backward(loss / 2)
            if waits:
                continue
            norm = made.clip_gradients(model, optimizer, max_norm=1.0)
            noted += [made.all_gather(loss.detach()).mean(), norm]
            optimizer.step()
            optimizer.zero_grad()
        if folder is not None and not resume and epoch == 0:
            made.save(folder, state)
    noted += parameters(model)
    if strategy is not None:
        chosen.close()
    return noted


LOOPS: dict[str, Loop] = {
    "accelerate": accelerate,
    "trainer": trainer,
    "lightning": lightning,
    "fabric": fabric,
}
