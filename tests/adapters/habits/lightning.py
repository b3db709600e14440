"""Habits of scripts with Lightning's Trainer."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.adapters.habits.habit import Given, Noted, habits_of
from tests.adapters.loops import adamw, adapter, parameters

habit = habits_of("Lightning")


def rows(count: int = 64) -> DataLoader[Any]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def without_norm() -> nn.Module:
    """A model whose evaluation is the same on all ranks: Lightning evaluates each with running
    statistics of its own last batch, where a session has the first rank's."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def frozen_first() -> nn.Module:
    model = without_norm()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def trained(
    given: Given,
    *,
    model: Callable[[], nn.Module] = without_norm,
    optimizers: Callable[[nn.Module], Any] = adamw,
    methods: dict[str, Any] | None = None,
    callbacks: Any = (),
    data: Any = None,
    resume: str | None = None,
    fits: int = 1,
    manual: bool = False,
    after: Callable[[Any], None] = lambda trainer: None,
    **named: Any,
) -> Noted:
    pytorch = importlib.import_module("lightning.pytorch")
    strategies = importlib.import_module("lightning.pytorch.strategies")
    environments = importlib.import_module("lightning.fabric.plugins.environments")
    noted: Noted = []

    class Module(pytorch.LightningModule):  # type: ignore[misc, name-defined]  # imported late
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = model(), not manual

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            loss = mse_loss(self.net(x), y)
            noted.append(self.all_gather(loss.detach()).mean())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("loss", mse_loss(self.net(x), y), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return optimizers(self)

    for name, method in (methods or {}).items():
        setattr(Module, name, method)
    torchrun = environments.TorchElasticEnvironment()
    if given.strategy is None:
        chosen = strategies.DDPStrategy(cluster_environment=torchrun)
    else:
        chosen = adapter("lightning").SessionStrategy(given.strategy, cluster_environment=torchrun)
    usual = {
        "max_epochs": 2, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "enable_checkpointing": False,
    }  # fmt: skip
    made = pytorch.Trainer(
        accelerator="cpu", devices=2, strategy=chosen,
        callbacks=[c(given) for c in callbacks], **usual | named,
    )  # fmt: skip
    module = Module()
    for _ in range(fits):
        path = None if resume is None else str(given.folder / resume)
        made.fit(module, rows() if data is None else data, rows(16), ckpt_path=path)
    after(made)
    if "loss" in made.callback_metrics:
        noted.append(made.callback_metrics["loss"])
    return [*noted, *parameters(module)]


def plainly(**arguments: Any) -> Callable[[Given], Noted]:
    return lambda given: trained(given, **arguments)


def called(name: str) -> Any:
    return getattr(importlib.import_module("lightning.pytorch.callbacks"), name)


habit("no habit: the straight road")(plainly())
habit("accumulate")(plainly(accumulate_grad_batches=2, gradient_clip_val=1.0))
habit("accumulate: the last window is partial")(plainly(accumulate_grad_batches=3))
habit("mixed precision bf16")(plainly(precision="bf16-mixed"))
habit("model in double precision")(plainly(precision="64-true"))
habit("clip by value")(plainly(gradient_clip_val=0.1, gradient_clip_algorithm="value"))
habit("uneven rows")(plainly(data=rows(53)))
habit("max_steps inside an epoch")(plainly(max_steps=5, max_epochs=-1))
habit("evaluation each few steps")(plainly(val_check_interval=3))
habit("a frozen backbone")(plainly(model=frozen_first))
habit("a scheduler of each step")(
    plainly(
        optimizers=lambda m: {
            "optimizer": (made := adamw(m)),
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=40),
                "interval": "step",
            },
        }
    )
)
habit("a closure given to optimizer.step()")(
    plainly(optimizers=lambda m: torch.optim.LBFGS(m.parameters(), 0.1))
)
habit("two optimizers")(
    plainly(
        manual=True,
        optimizers=lambda m: [
            torch.optim.SGD(m.net[0].parameters(), 0.1),
            torch.optim.SGD(m.net[2].parameters(), 0.1),
        ],
    )
)
habit("early stopping")(
    plainly(callbacks=[lambda _: called("EarlyStopping")("loss", patience=1)], max_epochs=4)
)
habit("averages of weights (SWA)")(
    plainly(callbacks=[lambda _: called("StochasticWeightAveraging")(0.01, 1)], max_epochs=3)
)
habit("fit() called twice")(plainly(fits=2))
habit("a layer unfrozen in mid-training")(
    plainly(
        model=frozen_first,
        methods={"on_train_epoch_end": lambda self: self.net[0].requires_grad_(True)},
    )
)
habit("a backward() of the module's own")(
    plainly(methods={"backward": lambda self, loss, *_, **__: loss.backward()})
)
habit("gradients looked at and changed before the step")(
    plainly(
        methods={
            "on_before_optimizer_step": lambda self, optimizer: [
                p.grad.mul_(0.5) for p in self.parameters()
            ]
        }
    )
)
habit("gradients zeroed by the module")(
    plainly(
        methods={
            "optimizer_zero_grad": lambda self, epoch, index, optimizer: optimizer.zero_grad(
                set_to_none=False
            )
        }
    )
)
habit("a batch skipped: training_step returns None")(
    plainly(methods={"training_step": lambda self, batch, index: None if index == 3 else (
        mse_loss(self.net(batch[0]), batch[1]))})
)  # fmt: skip


@habit("an average of weights (EMA), by deepcopy")
def ema(given: Given) -> Noted:
    kept: list[Any] = []

    def begin(self: Any) -> None:
        kept.append(copy.deepcopy(self.net))

    @torch.no_grad()
    def follow(self: Any, *_: Any) -> None:
        for a, b in zip(kept[0].parameters(), self.net.parameters(), strict=True):
            a.lerp_(b, 0.1)

    noted = trained(given, methods={"on_train_start": begin, "on_train_batch_end": follow})
    return [*parameters(kept[0]), *noted]


@habit("resumed behind an epoch")
def resumes(given: Given) -> Noted:
    def saves(given: Given) -> Any:
        own = {"filename": "{epoch}", "save_top_k": -1}
        return called("ModelCheckpoint")(given.folder, **own)

    whole = trained(given, callbacks=[saves], enable_checkpointing=True)
    return [*whole, *trained(given, resume="epoch=0.ckpt")]


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def saves_each(**named: Any) -> Callable[[Given], Any]:
    return lambda given: called("ModelCheckpoint")(given.folder, save_top_k=-1, **named)


def by_name(name: str, *arguments: Any, **named: Any) -> Callable[[Given], Any]:
    return lambda _: called(name)(*arguments, **named)


habit("averages of weights (SWA), with batch norm")(
    plainly(
        callbacks=[by_name("StochasticWeightAveraging", 0.01, 1)],
        model=with_norm, max_epochs=3, limit_val_batches=0, gradient_clip_val=0.5,
    )
)  # fmt: skip
habit("GradientAccumulationScheduler")(
    plainly(callbacks=[by_name("GradientAccumulationScheduler", {0: 1, 1: 2, 2: 3})], max_epochs=3)
)
habit("ModelPruning")(
    plainly(callbacks=[by_name("ModelPruning", "l1_unstructured", amount=0.3)], max_epochs=3)
)
habit("BackboneFinetuning")(
    plainly(
        callbacks=[by_name("BackboneFinetuning", unfreeze_backbone_at_epoch=1)],
        methods={"backbone": property(lambda self: self.net[0])},
        optimizers=lambda m: torch.optim.AdamW(m.net[2].parameters(), lr=0.03),
    )
)
habit("thawed between two fits")(
    plainly(
        model=frozen_first,
        after=lambda trainer: [
            trainer.lightning_module.requires_grad_(True),
            setattr(trainer.fit_loop, "max_epochs", 4),
            trainer.fit(trainer.lightning_module, rows(), rows(16)),
        ],
    )
)
habit("models after each other: folds")(
    lambda given: [value for fold in range(3) for value in trained(given, data=rows(32 + 8 * fold))]
)
habit("a compiled model")(plainly(model=lambda: torch.compile(without_norm(), backend="eager")))
habit("accumulate: validation inside a window")(
    plainly(accumulate_grad_batches=2, val_check_interval=3, num_sanity_val_steps=2)
)


@habit("an average of weights (EMAWeightAveraging), resumed")
def average(given: Given) -> Noted:
    mean = by_name("EMAWeightAveraging", decay=0.9)
    saves = saves_each(filename="{epoch}")
    whole = trained(given, callbacks=[mean, saves], enable_checkpointing=True)
    return [*whole, *trained(given, callbacks=[mean], resume="epoch=0.ckpt")]


@habit("LearningRateFinder")
def finds_rate(given: Given) -> Noted:
    return trained(
        given,
        callbacks=[by_name("LearningRateFinder", num_training_steps=20)],
        optimizers=lambda m: torch.optim.SGD(m.parameters(), m.lr, momentum=0.9),
        methods={"lr": 0.03},
        data=rows(256),
        default_root_dir=str(given.folder),
    )


@habit("saved every few steps, resumed inside an epoch")
def resumes_inside(given: Given) -> Noted:
    saves = saves_each(filename="{step}", every_n_train_steps=3)
    whole = trained(given, callbacks=[saves], enable_checkpointing=True)
    return [*whole, *trained(given, resume="step=3.ckpt")]


@habit("OnExceptionCheckpoint, resumed")
def saves_on_exception(given: Given) -> Noted:
    class Keeps(called("OnExceptionCheckpoint")):  # type: ignore[misc]
        def teardown(self, *_: Any, **__: Any) -> None:
            """Leave the file, as a process that ends does."""

    def ends(self: Any, batch: Any, index: int) -> None:
        if self.trainer.global_step == 5:
            raise ArithmeticError

    def makes(given: Given) -> Any:
        return Keeps(given.folder, "left")

    methods = {"on_train_batch_start": ends}
    with suppress(ArithmeticError):
        trained(given, callbacks=[makes], enable_checkpointing=True, methods=methods)
    torch.distributed.barrier()
    return trained(given, resume="left.ckpt")


@habit("test of the best checkpoint, and predict")
def tests_best(given: Given) -> Noted:
    found: Noted = []

    def after(trainer: Any) -> None:
        trainer.test(dataloaders=rows(16), verbose=False, ckpt_path="best")
        found.append(trainer.callback_metrics["test"])
        found.extend(trainer.predict(trainer.lightning_module, rows(16)))

    def test_step(self: Any, batch: Any, index: int) -> None:
        self.log("test", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    methods = {"test_step": test_step, "predict_step": lambda self, batch, index: self(batch[0])}
    saves = saves_each(monitor="loss", mode="max")
    return [
        *trained(given, callbacks=[saves], enable_checkpointing=True, methods=methods, after=after),
        *found,
    ]


def clips_late(self: Any, optimizer: Any, **_: Any) -> None:
    if self.current_epoch:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


def steps_each_second(self: Any, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
    if index % 2:
        optimizer.step(closure=closure)
    else:
        closure()


habit("configure_gradient_clipping")(plainly(methods={"configure_gradient_clipping": clips_late}))
habit("optimizer_step, which leaves updates out")(
    plainly(methods={"optimizer_step": steps_each_second})
)


def by_hand(how: str) -> Callable[[Given], Noted]:
    def step(self: Any, batch: Any, index: int) -> None:
        optimizer, (x, y), last = self.optimizers(), batch, bool(index % 2)

        def compute() -> torch.Tensor:
            loss = mse_loss(self.net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        if how == "closure":
            optimizer.step(closure=compute)
        elif how == "sum":
            self.manual_backward(mse_loss(self.net(x), y) / 2)
        else:
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(mse_loss(self.net(x), y) / 2)
        if how != "closure" and last:
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()

    return plainly(manual=True, methods={"training_step": step})


habit("by hand: a closure")(by_hand("closure"))
habit("by hand: gradients add up")(by_hand("sum"))
habit("by hand: gradients add up in toggle_model(sync_grad=...)")(by_hand("toggle"))
