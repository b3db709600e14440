"""Habits with Accelerate: schedulers, loaders, and what else is around training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.adapters.habits.accelerate_script import Script, habit, hf, hooks_free, rows
from tests.adapters.habits.habit import Given, Noted
from tests.adapters.loops import adamw, model_of_tests, parameters

# Schedulers.


@habit("a scheduler stepped by hand, not prepared")
def own_scheduler(given: Given) -> Noted:
    script = Script(given)
    a, model = script.accelerator(gradient_accumulation_steps=2), model_of_tests()
    optimizer = adamw(model)
    script.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    script.model, script.optimizer, script.loader = a.prepare(
        model, optimizer, DataLoader(rows(), 4)
    )
    return script.epochs().end()


@habit("step_scheduler_with_optimizer off")
def free_scheduler(given: Given) -> Noted:
    return Script(given).prepare(step_scheduler_with_optimizer=False).epochs().end()


@habit("ReduceLROnPlateau")
def plateau(given: Given) -> Noted:
    script = Script(given).prepare()
    script.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        script.optimizer.optimizer, patience=0, factor=0.5
    )
    for batch in script.loader:
        loss = script.loss(batch)
        script.a.backward(loss)
        script.optimizer.step()
        script.scheduler.step(script.a.gather(loss.detach()).mean())
        script.optimizer.zero_grad()
    return script.end()


@habit("the rate set by hand")
def rate_by_hand(given: Given) -> Noted:
    script = Script(given).prepare()
    for index, batch in enumerate(script.loader):
        for group in script.optimizer.param_groups:
            group["lr"] = 0.01 * (1 + index)
        script.a.backward(script.loss(batch))
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.end()


# Loaders.


@habit("split_batches")
def split_batches(given: Given) -> Noted:
    config = hf("accelerate").DataLoaderConfiguration(split_batches=True)
    return Script(given).prepare(dataloader_config=config).epochs().end()


@habit("dispatch_batches")
def dispatch_batches(given: Given) -> Noted:
    config = hf("accelerate").DataLoaderConfiguration(dispatch_batches=True)
    return Script(given).prepare(dataloader_config=config).epochs().end()


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return zip(*rows(40)[:], strict=True)


@habit("an IterableDataset")
def streamed(given: Given) -> Noted:
    return Script(given).prepare(data=Streamed()).epochs().end()


@habit("uneven rows")
def uneven(given: Given) -> Noted:
    return Script(given).prepare(data=rows(53)).epochs().end()


@habit("uneven rows, even_batches off, join_uneven_inputs")
def joined(given: Given) -> Noted:
    script = Script(given).prepare(hooks_free(), data=rows(52))
    with script.a.join_uneven_inputs([script.model], even_batches=False):
        for batch in script.loader:
            script.a.backward(script.loss(batch))
            script.optimizer.step()
            script.optimizer.zero_grad()
    return script.end()


@habit("broadcast_buffers off, with batch norm")
def own_buffers(given: Given) -> Noted:
    handler = hf("accelerate").DistributedDataParallelKwargs(broadcast_buffers=False)
    script = Script(given).prepare(kwargs_handlers=[handler]).epochs(1)
    script.model.eval()
    with torch.no_grad():
        script.noted += [script.a.gather(script.loss(b)) for b in script.loader]
    script.model.train()
    return script.epochs(1).end()


@habit("uneven rows, even_batches off")
def left_uneven(given: Given) -> Noted:
    config = hf("accelerate").DataLoaderConfiguration(even_batches=False)
    script = Script(given).prepare(hooks_free(), data=rows(52), dataloader_config=config)
    return script.epochs(1).end()


@habit("even rows inside join_uneven_inputs")
def joined_even(given: Given) -> Noted:
    script = Script(given).prepare()
    with script.a.join_uneven_inputs([script.model]):
        script.epochs()
    return script.end()


@habit("gather_for_metrics with a last batch that is not full")
def metrics(given: Given) -> Noted:
    script = Script(given).prepare().epochs(1)
    other = script.a.prepare(DataLoader(rows(21), batch_size=4))
    script.model.eval()
    seen = []
    with torch.no_grad():
        for x, y in other:
            seen += script.a.gather_for_metrics((script.model(x), y))
    script.model.train()
    out, target = torch.cat(seen[::2]), torch.cat(seen[1::2])
    assert len(target) == 21
    script.noted += [out, target]
    return script.epochs(1).end()


@habit("evaluation after each epoch, with batch norm")
def evaluates(given: Given) -> Noted:
    script = Script(given).prepare()
    other = script.a.prepare(DataLoader(rows(16), batch_size=4))
    for _ in range(2):
        script.epochs(1)
        script.model.eval()
        with torch.no_grad():
            script.noted += [script.a.gather(script.loss(b)) for b in other]
        script.model.train()
    return script.end()


@habit("the seedable sampler, shuffled")
def seedable(given: Given) -> Noted:
    script = Script(given)
    config = hf("accelerate").DataLoaderConfiguration(use_seedable_sampler=True)
    a, model = script.accelerator(dataloader_config=config), model_of_tests()
    hf("accelerate.utils").set_seed(3)
    optimizer = adamw(model)
    script.model, script.optimizer, script.loader = a.prepare(
        model, optimizer, DataLoader(rows(), 4, shuffle=True)
    )
    script.scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return script.epochs().end()


@habit("collectives of the script: reduce, pad_across_processes, broadcast")
def collectives(given: Given) -> Noted:
    script = Script(given).prepare()
    own = torch.ones(1 + given.rank)
    for batch in script.loader:
        script.update(batch)
        script.noted += [script.a.pad_across_processes(own), script.a.reduce(own[:1])]
        script.a.wait_for_everyone()
    return script.end()


# Around it.


@habit("early stopping by set_trigger")
def early_stop(given: Given) -> Noted:
    script = Script(given).prepare()
    for index, batch in enumerate(script.loader):
        script.update(batch)
        if index == 3 and given.rank == 1:
            script.a.set_trigger()
        if script.a.check_trigger():
            break
    return script.end()


@habit("find_executable_batch_size")
def finds_batch_size(given: Given) -> Noted:
    script = Script(given)
    a = script.accelerator()

    def train(batch_size: int) -> Noted:
        a.free_memory()
        model = model_of_tests()
        optimizer = adamw(model)
        script.model, script.optimizer, script.loader = a.prepare(
            model, optimizer, DataLoader(rows(), batch_size)
        )
        script.scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        for index, batch in enumerate(script.loader):
            if batch_size == 8 and index == 1:
                raise RuntimeError("CUDA out of memory.")
            script.update(batch)
        return script.end()

    found = hf("accelerate.utils").find_executable_batch_size(train, starting_batch_size=8)
    noted: Noted = found()
    return noted


@habit("free_memory, then another model")
def folds(given: Given) -> Noted:
    script = Script(given)
    a = script.accelerator()
    for _ in range(2):
        model = model_of_tests()
        optimizer = adamw(model)
        script.model, script.optimizer, script.loader = a.prepare(
            model, optimizer, DataLoader(rows(), 4)
        )
        script.scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        script.epochs(1)
        noted = script.end()
    return noted


@habit("free_memory with a session that trained, weights saved behind it")
def saves_after(given: Given) -> Noted:
    script = Script(given).prepare().epochs(1)
    noted = script.end()
    own = script.a.unwrap_model(script.model)
    torch.save(own.state_dict(), given.folder / f"weights{given.rank}")
    read = torch.load(given.folder / f"weights{given.rank}")
    return [*noted, *(v for n, v in read.items() if "running" not in n and "num" not in n)]


@habit("a tracker")
def tracks(given: Given) -> Noted:
    tracker = hf("accelerate.tracking").GeneralTracker

    class Kept(tracker):  # type: ignore[misc, valid-type]
        name, requires_logging_directory = "kept", False

        def __init__(self) -> None:
            super().__init__()
            self.values: list[float] = []

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Any, step: Any = None, **named: Any) -> None:
            self.values.append(float(values["loss"]))

    kept = Kept()
    script = Script(given).prepare(log_with=kept)
    script.a.init_trackers("project", config={"rate": 0.1})
    for batch in script.loader:
        script.update(batch)
        script.a.log({"loss": script.noted[-1]})
    script.noted.append(torch.tensor(kept.values))
    return script.end()


@habit("the profiler around training")
def profiled(given: Given) -> Noted:
    script = Script(given).prepare()
    with script.a.profile():
        script.epochs(1)
    return script.end()


@habit("model.module, as under DDP")
def module_of_ddp(given: Given) -> Noted:
    script = Script(given).prepare().epochs(1)
    return [*parameters(script.model.module), *script.end()]


@habit("the model's own attributes, as without DDP")
def attributes(given: Given) -> Noted:
    script = Script(given).prepare().epochs(1)
    own = script.a.unwrap_model(script.model)
    return [own[3].weight.detach().clone(), *script.end()]


@habit("rank-dependent weights before prepare()")
def unequal_start(given: Given) -> Noted:
    model = model_of_tests()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(given.rank)
    return Script(given).prepare(model).epochs(1).end()


@habit("sparse gradients of an embedding")
def sparse(given: Given) -> Noted:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(x.argmax(1)))  # type: ignore[no-any-return]

    return (
        Script(given)
        .prepare(Words(), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        .epochs(1)
        .end()
    )
