"""Habits with Accelerate: precision, compilation, models and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.adapters.habits.accelerate_script import Script, habit, hf, hooks_free, rows
from tests.adapters.habits.habit import Given, Noted
from tests.adapters.loops import adamw, model_of_tests, parameters

# Precision, compilation.


@habit("mixed precision bf16")
def bf16(given: Given) -> Noted:
    own = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}
    return Script(given).prepare(**own).epochs(clip=1.0).end()


@habit("mixed precision fp16, on CPUs")
def fp16(given: Given) -> Noted:
    return Script(given).prepare(mixed_precision="fp16").epochs(clip=1.0).end()


@habit("accelerator.autocast()")
def autocast_block(given: Given) -> Noted:
    script = Script(given).prepare(mixed_precision="bf16")
    for x, y in script.loader:
        out = script.model(x)
        with script.a.autocast():
            loss = mse_loss(out @ torch.ones(1, 3), y.expand(-1, 3))
        script.a.backward(loss)
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("model in bf16")
def whole_bf16(given: Given) -> Noted:
    data = TensorDataset(*(t.bfloat16() for t in rows()[:]))
    return Script(given).prepare(model_of_tests().bfloat16(), data=data).epochs().end()


@habit("model in double precision")
def double(given: Given) -> Noted:
    data = TensorDataset(*(t.double() for t in rows()[:]))
    return Script(given).prepare(model_of_tests().double(), data=data).epochs(clip=1.0).end()


@habit("torch_compile, dynamo_backend")
def compiled(given: Given) -> Noted:
    return Script(given).prepare(hooks_free(), dynamo_backend="eager").epochs().end()


@habit("compiled before prepare()")
def compiled_before(given: Given) -> Noted:
    model = torch.compile(hooks_free(), backend="eager")
    return Script(given).prepare(model).epochs().end()  # type: ignore[arg-type]


@habit("compiled after prepare()")
def compiled_after(given: Given) -> Noted:
    script = Script(given).prepare(hooks_free())
    script.model = torch.compile(script.model, backend="eager")
    return script.epochs().end()


@habit("gradient checkpointing")
def recomputes(given: Given) -> Noted:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = hooks_free()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net[2](checkpoint(self.net[:2], x, use_reentrant=False))  # type: ignore[no-any-return]

    return Script(given).prepare(Recomputed()).epochs(clip=1.0).end()


# Models and optimizers.


@habit("a frozen backbone")
def frozen(given: Given) -> Noted:
    model = model_of_tests()
    model[0].requires_grad_(False)  # type: ignore[index]
    return Script(given).prepare(model).epochs(clip=1.0).end()


@habit("a layer frozen in mid-training")
def freezes(given: Given) -> Noted:
    script = Script(given).prepare().epochs(1)
    script.a.unwrap_model(script.model)[0].requires_grad_(False)
    return script.epochs(1).end()


@habit("a layer unfrozen in mid-training")
def unfreezes(given: Given) -> Noted:
    model = model_of_tests()
    model[0].requires_grad_(False)  # type: ignore[index]
    script = Script(given).prepare(model).epochs(1)
    model[0].requires_grad_(True)  # type: ignore[index]
    return script.epochs(1).end()


@habit("find_unused_parameters")
def unused(given: Given) -> Noted:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.other, self.calls = hooks_free(), nn.Linear(8, 1), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            out: torch.Tensor = self.net(x)
            return out + self.other(x) if self.calls % 2 else out

    handler = hf("accelerate").DistributedDataParallelKwargs(find_unused_parameters=True)
    script = Script(given).prepare(Partly(), kwargs_handlers=[handler])
    return script.epochs(clip=1.0).end()


@habit("a communication hook by DistributedDataParallelKwargs")
def ddp_hook(given: Given) -> Noted:
    handler = hf("accelerate").DistributedDataParallelKwargs(
        comm_hook=hf("accelerate.utils").DDPCommunicationHookType.FP16
    )
    return Script(given).prepare(kwargs_handlers=[handler]).epochs().end()


@habit("tied weights")
def tied(given: Given) -> Noted:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model[2].weight = model[0].weight
    return Script(given).prepare(model).epochs(clip=1.0).end()


@habit("an embedding resized after prepare()")
def resized(given: Given) -> Noted:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(x.argmax(1)))  # type: ignore[no-any-return]

    script = Script(given).prepare(Words()).epochs(1)
    own = script.a.unwrap_model(script.model)
    weight = own.words.weight.detach()
    own.words = nn.Embedding(12, 4)
    own.words.weight.data[:8] = weight
    own.words.weight.data[8:] = 0
    return script.epochs(1).end()


@habit("two models with two optimizers")
def gan(given: Given) -> Noted:
    script = Script(given).prepare(hooks_free())
    other = hooks_free()
    other, second = script.a.prepare(other, adamw(other))
    for x, y in script.loader:
        for model, optimizer in ((script.model, script.optimizer), (other, second)):
            script.a.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return script.end()


@habit("two models with one optimizer")
def two_models(given: Given) -> Noted:
    script = Script(given)
    a, first, second = script.accelerator(), hooks_free(), hooks_free()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    first, second, script.optimizer, loader = a.prepare(
        first, second, optimizer, DataLoader(rows(), 4)
    )
    script.model = first
    for x, y in loader:
        a.backward(mse_loss(first(x) + second(x), y))
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("two models with one optimizer, accumulated, clipped, saved and loaded")
def text_encoder(given: Given) -> Noted:
    """As diffusers' examples train a UNet and its text encoder."""
    script = Script(given)
    a = script.accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    unet, encoder = hooks_free(), nn.Linear(8, 8)
    optimizer = adamw(nn.ModuleList([unet, encoder]))
    unet, encoder, script.optimizer, loader = a.prepare(
        unet, encoder, optimizer, DataLoader(rows(), 4)
    )
    script.model = unet
    for epoch in range(3):
        for x, y in loader:
            with a.accumulate(unet, encoder):
                a.backward(mse_loss(unet(encoder(x)), y))
                if a.sync_gradients:
                    both = [*unet.parameters(), *encoder.parameters()]
                    script.noted.append(torch.as_tensor(a.clip_grad_norm_(both, 1.0)))
                script.optimizer.step()
                script.optimizer.zero_grad()
        if epoch == 0:
            a.save_state(str(given.folder))
            a.wait_for_everyone()
        if epoch == 1:
            a.load_state(str(given.folder))
    script.noted += [*parameters(encoder), *a.get_state_dict(encoder).values()]
    return script.end()


@habit("two optimizers")
def two_optimizers(given: Given) -> Noted:
    script = Script(given)
    a, model = script.accelerator(), hooks_free()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))  # type: ignore[index]
    script.model, script.optimizer, second, loader = a.prepare(
        model, first, second, DataLoader(rows(), 4)
    )
    for x, y in loader:
        a.backward(mse_loss(script.model(x), y))
        for optimizer in (script.optimizer, second):
            optimizer.step()
            optimizer.zero_grad()
    return script.end()


@habit("a frozen teacher, prepared, too")
def teacher(given: Given) -> Noted:
    script = Script(given).prepare(hooks_free())
    wise = script.a.prepare(model_of_tests().requires_grad_(False).eval())
    for x, y in script.loader:
        script.a.backward(mse_loss(script.model(x), y + wise(x)))
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("a teacher that is not frozen, prepared with evaluation_mode")
def loose_teacher(given: Given) -> Noted:
    script = Script(given).prepare(hooks_free())
    wise = script.a.prepare_model(model_of_tests().eval(), evaluation_mode=True)
    for x, y in script.loader:
        with torch.no_grad():
            target = y + wise(x)
        script.a.backward(mse_loss(script.model(x), target))
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("model and optimizer prepared apart")
def apart(given: Given) -> Noted:
    script = Script(given)
    a, model = script.accelerator(), model_of_tests()
    script.model = a.prepare(model)
    script.optimizer = a.prepare(adamw(model))
    script.loader = a.prepare(DataLoader(rows(), 4))
    script.scheduler = a.prepare(torch.optim.lr_scheduler.ConstantLR(script.optimizer, 1.0))
    return script.epochs().end()


@habit("the optimizer prepared before the model")
def optimizer_first(given: Given) -> Noted:
    script = Script(given)
    a, model = script.accelerator(), model_of_tests()
    script.optimizer = a.prepare(adamw(model))
    script.model, script.loader = a.prepare(model, DataLoader(rows(), 4))
    script.scheduler = torch.optim.lr_scheduler.ConstantLR(script.optimizer, 1.0)
    return script.epochs().end()


@habit("the optimizer made from the prepared model")
def optimizer_after(given: Given) -> Noted:
    script = Script(given)
    a = script.accelerator()
    script.model = a.prepare(model_of_tests())
    script.optimizer = a.prepare(adamw(script.model))
    script.loader = a.prepare(DataLoader(rows(), 4))
    script.scheduler = torch.optim.lr_scheduler.ConstantLR(script.optimizer, 1.0)
    return script.epochs().end()


@habit("the model prepared, the optimizer not")
def unprepared_optimizer(given: Given) -> Noted:
    script = Script(given)
    a, model = script.accelerator(), model_of_tests()
    script.optimizer = adamw(model)
    script.model, script.loader = a.prepare(model, DataLoader(rows(), 4))
    for batch in script.loader:
        a.backward(script.loss(batch))
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("prepare() called twice with the same objects")
def prepared_twice(given: Given) -> Noted:
    script = Script(given).prepare()
    again = script.a.prepare(script.model, script.optimizer)
    script.model, script.optimizer = again
    return script.epochs().end()


@habit("another optimizer in mid-training")
def other_optimizer(given: Given) -> Noted:
    script = Script(given).prepare().epochs(1)
    script.optimizer = script.a.prepare(
        torch.optim.SGD(script.a.unwrap_model(script.model).parameters(), lr=0.01)
    )
    script.scheduler = torch.optim.lr_scheduler.ConstantLR(script.optimizer, 1.0)
    return script.epochs(1).end()


@habit("an optimizer of the script's own")
def own_optimizer(given: Given) -> Noted:
    class Signs(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad.sign(), alpha=group["lr"])

    return Script(given).prepare(optimizer=lambda m: Signs(m.parameters())).epochs().end()


@habit("groups of parameters, weight decay on some")
def groups(given: Given) -> Noted:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        decays = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        return torch.optim.AdamW(
            [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}], 0.03
        )

    return Script(given).prepare(optimizer=made).epochs(clip=1.0).end()


@habit("add_param_group in mid-training")
def adds_group(given: Given) -> Noted:
    script = Script(given).prepare(
        hooks_free(),
        optimizer=lambda m: torch.optim.SGD(m[2].parameters(), lr=0.1),  # type: ignore[index]
    )
    script.epochs(1)
    own = script.a.unwrap_model(script.model)
    script.optimizer.add_param_group({"params": [*own[0].parameters()], "lr": 0.01})
    return script.epochs(1).end()


@habit("a hook on a parameter")
def parameter_hook(given: Given) -> Noted:
    script = Script(given).prepare()
    own = script.a.unwrap_model(script.model)
    own[0].weight.register_hook(lambda g: g * 0.5)
    return script.epochs().end()


@habit("forward hooks on modules")
def module_hook(given: Given) -> Noted:
    script = Script(given).prepare()
    seen: Noted = []
    own = script.a.unwrap_model(script.model)
    own[0].register_forward_hook(lambda m, a, out: seen.append(out.detach().norm()))
    script.epochs()
    return script.end() + seen


@habit("Conv and SyncBatchNorm converted")
def sync_bn(given: Given) -> Noted:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model_of_tests())
    return Script(given).prepare(model).epochs().end()
