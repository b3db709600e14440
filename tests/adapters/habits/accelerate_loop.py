"""Habits with Accelerate: accumulation, backward, clipping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.adapters.habits.accelerate_script import Script, habit, hf, hooks_free, rows
from tests.adapters.habits.habit import Given, Noted

# Accumulation.


@habit("no habit: the straight road")
def straight(given: Given) -> Noted:
    return Script(given).prepare().epochs().end()


@habit("accumulate")
def accumulates(given: Given) -> Noted:
    return Script(given).prepare(gradient_accumulation_steps=2).epochs(clip=1.0).end()


@habit("accumulate: the last window is partial")
def partial_window(given: Given) -> Noted:
    return Script(given).prepare(gradient_accumulation_steps=3).epochs(clip=1.0).end()


def plugin(**named: Any) -> Any:
    return hf("accelerate.utils").GradientAccumulationPlugin(**named)


@habit("accumulate: windows run over the end of an epoch")
def window_over_epochs(given: Given) -> Noted:
    own = plugin(num_steps=3, sync_with_dataloader=False)
    return Script(given).prepare(gradient_accumulation_plugin=own).epochs(3).end()


@habit("accumulate: sync_each_batch")
def sync_each_batch(given: Given) -> Noted:
    own = plugin(num_steps=2, sync_each_batch=True)
    return Script(given).prepare(gradient_accumulation_plugin=own).epochs(clip=1.0).end()


@habit("accumulate: adjust_scheduler off")
def unadjusted(given: Given) -> Noted:
    own = plugin(num_steps=2, adjust_scheduler=False)
    return Script(given).prepare(gradient_accumulation_plugin=own).epochs().end()


@habit("accumulate: another number of passes in mid-training")
def other_window(given: Given) -> Noted:
    script = Script(given).prepare(gradient_accumulation_steps=2).epochs(1)
    script.a.gradient_accumulation_steps = 4
    return script.epochs(1).end()


@habit("accumulate by hand: no_sync")
def by_no_sync(given: Given) -> Noted:
    script = Script(given).prepare()
    for _ in range(2):
        for index, batch in enumerate(script.loader):
            waits = index % 2 == 0
            with script.a.no_sync(script.model) if waits else nullcontext():
                script.a.backward(script.loss(batch) / 2)
            if not waits:
                script.optimizer.step()
                script.optimizer.zero_grad()
    return script.end()


@habit("accumulate by hand: an update every second pass, no no_sync")
def by_modulo(given: Given) -> Noted:
    script = Script(given).prepare()
    for index, batch in enumerate(script.loader):
        script.a.backward(script.loss(batch) / 2)
        if index % 2:
            script.optimizer.step()
            script.optimizer.zero_grad()
    return script.end()


@habit("accumulate by hand: trigger_sync_in_backward")
def triggers(given: Given) -> Noted:
    script = Script(given).prepare()
    batches = list(script.loader)
    for number in range(0, len(batches), 2):
        losses = []
        with script.a.no_sync(script.model):
            losses = [script.loss(batch) for batch in batches[number : number + 2]]
            script.a.backward(losses[0])
        with script.a.trigger_sync_in_backward(script.model):
            script.a.backward(losses[1])
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("accumulate: a loss of many tokens, scaled by hand")
def token_scaled(given: Given) -> Noted:
    script = Script(given).prepare(gradient_accumulation_steps=2)
    for batch in script.loader:
        with script.a.accumulate(script.model):
            loss = (script.model(batch[0]) - batch[1]).square().sum()
            items = script.a.gather(torch.tensor([8.0])).sum()
            script.a.backward(loss * script.a.num_processes * 2 / items)
            script.optimizer.step()
            script.optimizer.zero_grad()
    return script.end()


@habit("an evaluation loop inside accumulate")
def evaluates_inside(given: Given) -> Noted:
    script = Script(given).prepare(gradient_accumulation_steps=2)
    other = script.a.prepare(DataLoader(rows(16), batch_size=4))
    for index, batch in enumerate(script.loader):
        script.update(batch)
        if index == 2:
            script.model.eval()
            with torch.no_grad():
                script.noted += [script.a.gather(script.loss(b)).mean() for b in other]
            script.model.train()
    return script.end()


# Backward.


@habit("loss.backward() by hand")
def plain_backward(given: Given) -> Noted:
    script = Script(given).prepare()
    for batch in script.loader:
        script.loss(batch).backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("two backward passes before a step")
def two_losses(given: Given) -> Noted:
    script = Script(given).prepare()
    for batch in script.loader:
        script.a.backward(script.loss(batch))
        script.a.backward(script.loss(batch) * 0.5)
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("retain_graph")
def retains(given: Given) -> Noted:
    script = Script(given).prepare(hooks_free())
    for batch in script.loader:
        loss = script.loss(batch)
        script.a.backward(loss, retain_graph=True)
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("create_graph: a gradient penalty")
def penalty(given: Given) -> Noted:
    script = Script(given).prepare(hooks_free())
    for x, y in script.loader:
        x.requires_grad_()
        out = script.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        script.a.backward(mse_loss(out, y) + slope.square().mean())
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("gradients zeroed before backward")
def zero_first(given: Given) -> Noted:
    script = Script(given).prepare(gradient_accumulation_steps=2)
    for batch in script.loader:
        with script.a.accumulate(script.model):
            script.optimizer.zero_grad()
            script.a.backward(script.loss(batch))
            script.optimizer.step()
    return script.end()


@habit("model.zero_grad()")
def zero_by_model(given: Given) -> Noted:
    script = Script(given).prepare()
    for batch in script.loader:
        script.a.backward(script.loss(batch))
        script.optimizer.step()
        script.model.zero_grad()
    return script.end()


@habit("optimizer.zero_grad(set_to_none=False)")
def zero_in_place(given: Given) -> Noted:
    script = Script(given).prepare()
    for batch in script.loader:
        script.a.backward(script.loss(batch))
        script.optimizer.step()
        script.optimizer.zero_grad(set_to_none=False)
    return script.end()


@habit("an update skipped by the script")
def skips(given: Given) -> Noted:
    script = Script(given).prepare()
    for index, batch in enumerate(script.loader):
        script.a.backward(script.loss(batch))
        if index != 3:
            script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("a batch whose loss is NaN is skipped before backward")
def skips_before(given: Given) -> Noted:
    script = Script(given).prepare()
    for index, batch in enumerate(script.loader):
        loss = script.loss(batch)
        if index == 3:
            continue
        script.a.backward(loss)
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("gradients looked at and changed before the step")
def changes_gradients(given: Given) -> Noted:
    script = Script(given).prepare()
    for batch in script.loader:
        script.a.backward(script.loss(batch))
        for parameter in script.model.parameters():
            assert parameter.grad is not None
            script.noted.append(parameter.grad.norm())
            parameter.grad.mul_(0.5)
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


@habit("an exception in mid-step is caught, and training goes on")
def survives(given: Given) -> Noted:
    script = Script(given).prepare()
    for index, batch in enumerate(script.loader):
        try:
            loss = script.loss(batch)
            if index == 2:
                raise ValueError("a bad batch")
            script.a.backward(loss)
            script.optimizer.step()
        except ValueError:
            pass
        script.optimizer.zero_grad()
    return script.end()


@habit("a closure given to optimizer.step()")
def closure(given: Given) -> Noted:
    script = Script(given).prepare(optimizer=lambda m: torch.optim.LBFGS(m.parameters(), 0.1))
    for batch in script.loader:

        def again(batch: Any = batch) -> torch.Tensor:
            script.optimizer.zero_grad()
            loss = script.loss(batch)
            script.a.backward(loss)
            return loss

        script.optimizer.step(again)
    return script.end()


@habit("optimizer.step() inside no_sync")
def steps_inside(given: Given) -> Noted:
    script = Script(given).prepare()
    for batch in script.loader:
        with script.a.no_sync(script.model):
            script.a.backward(script.loss(batch))
            script.optimizer.step()
            script.optimizer.zero_grad()
    return script.end()


@habit("accelerate.LocalSGD")
def local_sgd(given: Given) -> Noted:
    script = Script(given).prepare()
    local = hf("accelerate.local_sgd").LocalSGD(
        accelerator=script.a, model=script.model, local_sgd_steps=4, enabled=True
    )
    with local:
        for batch in script.loader:
            script.update(batch)
            local.step()
    return script.end()


# Clipping.
def clipping(clip: Callable[[Any], Any]) -> Callable[[Given], Noted]:
    def run(given: Given) -> Noted:
        script = Script(given).prepare()
        for batch in script.loader:
            script.a.backward(script.loss(batch))
            norm = clip(script)
            if norm is not None:
                script.noted.append(torch.as_tensor(norm))
            script.optimizer.step()
            script.optimizer.zero_grad()
        return script.end()

    return run


habit("clip by value")(clipping(lambda s: s.a.clip_grad_value_(s.model.parameters(), 0.1)))
habit("clip by torch's clip_grad_norm_")(
    clipping(lambda s: nn.utils.clip_grad_norm_(s.model.parameters(), 0.5))
)
habit("clip by a list of the trained parameters")(
    clipping(
        lambda s: s.a.clip_grad_norm_([p for p in s.model.parameters() if p.requires_grad], 0.5)
    )
)
habit("clip by the infinite norm")(
    clipping(lambda s: s.a.clip_grad_norm_(s.model.parameters(), 0.5, norm_type=float("inf")))
)
habit("clip some of the parameters")(
    clipping(lambda s: s.a.clip_grad_norm_(list(s.model.parameters())[:2], 0.5))
)
habit("no clipping, the norm alone")(
    clipping(lambda s: s.a.clip_grad_norm_(s.model.parameters(), float("inf")))
)
habit("clip twice")(
    clipping(lambda s: [s.a.clip_grad_norm_(s.model.parameters(), c) for c in (0.5, 0.1)][1])
)


@habit("clip in every pass of a window")
def clips_inside(given: Given) -> Noted:
    script = Script(given).prepare(gradient_accumulation_steps=2)
    for batch in script.loader:
        with script.a.accumulate(script.model):
            script.a.backward(script.loss(batch))
            script.a.clip_grad_norm_(script.model.parameters(), 0.5)
            script.optimizer.step()
            script.optimizer.zero_grad()
    return script.end()
