"""Habits with the Trainer: its arguments, models, and what a subclass overrides."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from tests.adapters.habits.habit import Given, Noted
from tests.adapters.habits.trainer_script import (
    Scored,
    Script,
    callback,
    gpt2,
    habit,
    hf,
    padded,
    plainly,
    rows,
    sentences,
)

habit("no habit: the straight road")(plainly())
habit("accumulate")(plainly(gradient_accumulation_steps=2))
habit("accumulate: the last window is partial")(plainly(gradient_accumulation_steps=3))
habit("accumulate: sync_each_batch")(
    plainly(
        gradient_accumulation_steps=2,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    )
)
habit("no clipping, the norm alone")(plainly(max_grad_norm=0.0))
habit("clip to 0.1")(plainly(max_grad_norm=0.1))
habit("mixed precision bf16")(plainly(bf16=True, gradient_accumulation_steps=2))
habit("mixed precision fp16, on CPUs")(plainly(fp16=True))
habit("uneven rows")(plainly(data=rows(53), gradient_accumulation_steps=2))
habit("dataloader_drop_last")(plainly(data=rows(53), dataloader_drop_last=True))
habit("split_batches")(plainly(accelerator_config={"split_batches": True}))
habit("dispatch_batches")(plainly(accelerator_config={"dispatch_batches": True}))
habit("max_steps inside an epoch")(plainly(max_steps=5, gradient_accumulation_steps=2))
habit("warm-up and cosine")(plainly(lr_scheduler_type="cosine", warmup_steps=4))
habit("ReduceLROnPlateau")(
    plainly(
        lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=2,
        eval_dataset=rows(16), metric_for_best_model="loss",
    )
)  # fmt: skip
for name in ("adamw_torch", "adafactor", "sgd", "rmsprop", "adagrad"):
    habit(f"optim {name}")(plainly(optim=name))
habit("weight decay on some groups")(plainly(weight_decay=0.1))
habit("evaluation each few steps")(
    plainly(eval_strategy="steps", eval_steps=3, eval_dataset=rows(21))
)
habit("evaluation before training")(
    plainly(eval_on_start=True, eval_strategy="epoch", eval_dataset=rows(16))
)
habit("evaluation on several sets")(
    plainly(eval_strategy="epoch", eval_dataset={"a": rows(16), "b": rows(21)})
)
habit("find_unused_parameters")(plainly(ddp_find_unused_parameters=False))
habit("broadcast_buffers off, with batch norm")(
    plainly(ddp_broadcast_buffers=False, eval_strategy="epoch", eval_dataset=rows(16))
)
habit("ddp_bucket_cap_mb")(plainly(ddp_bucket_cap_mb=1))
habit("torch_compile, dynamo_backend")(
    plainly(torch_compile=True, torch_compile_backend="eager", num_train_epochs=1)
)
habit("logging_nan_inf_filter off, averages of steps")(
    plainly(logging_nan_inf_filter=False, logging_steps=3)
)


@habit("full_determinism")
def _(given: Given) -> Noted:
    try:
        return plainly(full_determinism=True, seed=7, data_seed=11)(given)
    finally:
        torch.use_deterministic_algorithms(False)


def of_texts(**arguments: Any) -> Any:
    named = {"data_collator": padded, "num_train_epochs": 1, "learning_rate": 0.01} | arguments
    lengths = named.pop("lengths", False)

    def run(given: Given) -> Noted:
        return Script(given, gpt2(), sentences(lengths=lengths), **named).train().end()

    return run


habit("a causal LM: num_items_in_batch")(of_texts(lengths=True, gradient_accumulation_steps=2))
habit("label smoothing")(of_texts(label_smoothing_factor=0.1))
habit("group_by_length")(of_texts(lengths=True, train_sampling_strategy="group_by_length"))
habit("gradient checkpointing")(of_texts(gradient_checkpointing=True))
habit("gradient checkpointing, reentrant")(
    of_texts(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
)
habit("neftune_noise_alpha")(of_texts(neftune_noise_alpha=5.0))
habit("average_tokens_across_devices off")(
    of_texts(lengths=True, average_tokens_across_devices=False)
)
habit("include_num_input_tokens_seen")(of_texts(include_num_input_tokens_seen=True))
habit("a frozen backbone")(
    lambda given: Script(given, without_embeddings(), sentences(), num_train_epochs=1).train().end()
)


def without_embeddings() -> Any:
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    return model


@habit("embeddings resized before training")
def resized(given: Given) -> Noted:
    model = gpt2()
    model.resize_token_embeddings(20, mean_resizing=False)
    return Script(given, model, sentences(), num_train_epochs=1).train().end()


@habit("embeddings resized between two trainings")
def resized_between(given: Given) -> Noted:
    script = Script(given, gpt2(), sentences(), num_train_epochs=1).train()
    script.t.model.resize_token_embeddings(20, mean_resizing=False)
    script.t.optimizer = script.t.lr_scheduler = None
    return script.train().end()


@habit("embeddings resized while training")
def resized_inside(given: Given) -> Noted:
    def grow(state: Any, model: Any, **_: Any) -> None:
        if state.global_step == 2:
            model = getattr(model, "module", model)
            model.resize_token_embeddings(20, mean_resizing=False)

    mine = callback(on_step_end=grow)
    return Script(given, gpt2(), sentences(), callbacks=[mine], num_train_epochs=1).train().end()


@habit("LoRA by peft")
def lora(given: Given) -> Noted:
    class Lora(nn.Module):
        """As peft wraps a layer: the base frozen, two small matrices beside it."""

        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(8, 2) * 0.1)
            self.b = nn.Parameter(torch.zeros(2, 24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.base(x)
            return out + x @ self.a @ self.b

    if importlib.util.find_spec("peft"):
        peft = hf("peft")
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"])
        model = peft.get_peft_model(gpt2(), config)
    else:
        model = gpt2().requires_grad_(False)
        for block in model.transformer.h:
            block.attn.c_attn = Lora(block.attn.c_attn)
    return Script(given, model, sentences(), num_train_epochs=1).train().end()


@habit("a layer frozen in mid-training")
def freezes(given: Given) -> Noted:
    def freeze(state: Any, model: Any, **_: Any) -> None:
        if state.global_step == 4:
            getattr(model, "module", model).net[0].requires_grad_(False)

    return Script(given, callbacks=[callback(on_step_end=freeze)]).train().end()


@habit("a layer unfrozen in mid-training")
def unfreezes(given: Given) -> Noted:
    def thaw(state: Any, model: Any, **_: Any) -> None:
        if state.global_step == 4:
            getattr(model, "module", model).net[0].requires_grad_(True)

    model = Scored()
    model.net[0].requires_grad_(False)  # type: ignore[index]
    return Script(given, model, callbacks=[callback(on_step_end=thaw)]).train().end()


# What a subclass overrides.


@habit("compute_loss of a subclass")
def own_loss(given: Given) -> Noted:
    class Mixin:
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            out = model(**inputs)
            loss = out["loss"] + 0.1 * out["logits"].square().mean()
            return (loss, out) if return_outputs else loss

    return Script(given, mixin=Mixin).train().end()


@habit("compute_loss_func")
def loss_func(given: Given) -> Noted:
    def loss(out: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = out["logits"][:, :-1].flatten(0, 1)
        total = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    script = Script(
        given, gpt2(), sentences(), compute_loss_func=loss, gradient_accumulation_steps=2
    )
    return script.train().end()


@habit("training_step of a subclass, which adds a loss")
def own_step(given: Given) -> Noted:
    class Mixin:
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            loss = super().training_step(model, inputs, *rest)  # type: ignore[misc]
            self.accelerator.backward(model(**inputs)["logits"].square().mean() * 0.1)  # type: ignore[attr-defined]
            return loss

    return Script(given, mixin=Mixin).train().end()


@habit("loss.backward() by hand")
def plain_backward(given: Given) -> Noted:
    class Mixin:
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            loss = model(**self._prepare_inputs(inputs))["loss"]  # type: ignore[attr-defined]
            loss.backward()
            return loss.detach()

    return Script(given, mixin=Mixin).train().end()


@habit("create_optimizer of a subclass")
def own_create_optimizer(given: Given) -> Noted:
    class Mixin:
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.NAdam(self.model.parameters(), lr=0.01)  # type: ignore[attr-defined]
            return self.optimizer

    return Script(given, mixin=Mixin).train().end()


@habit("optimizer and scheduler given")
def given_optimizer(given: Given) -> Noted:
    model = Scored()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return Script(given, model, optimizers=(optimizer, scheduler)).train().end()


@habit("optimizer_cls_and_kwargs")
def optimizer_class(given: Given) -> Noted:
    own = (torch.optim.Adamax, {"lr": 0.02})
    return Script(given, optimizer_cls_and_kwargs=own).train().end()


@habit("get_train_dataloader of a subclass")
def own_loader(given: Given) -> Noted:
    class Mixin:
        def get_train_dataloader(self) -> Any:
            loader = torch.utils.data.DataLoader(rows(40), 4)  # type: ignore[arg-type]
            return self.accelerator.prepare(loader)  # type: ignore[attr-defined]

    return Script(given, mixin=Mixin).train().end()


@habit("two optimizers")
def two_optimizers(given: Given) -> Noted:
    class Mixin:
        def create_optimizer(self, model: Any = None) -> Any:
            own = self.model.net  # type: ignore[attr-defined]
            self.other = self.accelerator.prepare(torch.optim.SGD(own[0].parameters(), lr=0.1))  # type: ignore[attr-defined]
            self.optimizer = torch.optim.SGD(own[3].parameters(), lr=0.1)
            return self.optimizer

    def both(**_: Any) -> None:
        trainer.other.step()

    mine = callback(on_pre_optimizer_step=both)
    script = Script(given, mixin=Mixin, callbacks=[mine])
    trainer = script.t
    return script.train().end()


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows(40))


habit("an IterableDataset")(plainly(data=Streamed(), max_steps=8))
habit("an IterableDataset without a length, accumulate")(
    plainly(data=Streamed(), max_steps=8, gradient_accumulation_steps=4)
)
