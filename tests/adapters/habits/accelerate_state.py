"""Habits with Accelerate: checkpoints, averages and copies."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.adapters.habits.accelerate_script import Script, habit, hf, hooks_free, rows
from tests.adapters.habits.habit import Given, Noted
from tests.adapters.loops import adamw, model_of_tests, parameters


def resumes(script: Script, given: Given, save_after: int) -> Noted:
    """Save in the first epoch, train on; then go on from there, as a new script does."""
    for index, batch in enumerate(script.loader):
        script.update(batch)
        if index + 1 == save_after:
            script.a.save_state(str(script.folder / "state"))
    script.end()
    again = Script(given).prepare(gradient_accumulation_steps=script.a.gradient_accumulation_steps)
    again.a.load_state(str(script.folder / "state"))
    for batch in again.a.skip_first_batches(again.loader, save_after):
        again.update(batch)
    first, second = script.noted[-5:], again.epochs(1).end()[-5:]
    return [*first, *second]


@habit("save_state, load_state and skip_first_batches in mid-epoch")
def resumes_mid_epoch(given: Given) -> Noted:
    return resumes(Script(given).prepare(gradient_accumulation_steps=2), given, 4)


@habit("save_state on the main process alone")
def saves_alone(given: Given) -> Noted:
    """As diffusers' examples do."""
    script = Script(given).prepare().epochs(1)
    if script.a.is_main_process:
        script.a.save_state(str(script.folder / "state"))
    script.a.wait_for_everyone()
    return script.epochs(1).end()


@habit("a checkpoint inside an accumulation window")
def saves_inside(given: Given) -> Noted:
    return resumes(Script(given).prepare(gradient_accumulation_steps=2), given, 3)


@habit("load_state in mid-training, to go back")
def goes_back(given: Given) -> Noted:
    script = Script(given).prepare().epochs(1)
    script.a.save_state(str(script.folder / "state"))
    script.epochs(1)
    script.a.load_state(str(script.folder / "state"))
    return script.epochs(1).end()


@habit("checkpoints with automatic names and a limit")
def named_checkpoints(given: Given) -> Noted:
    config = hf("accelerate.utils").ProjectConfiguration(
        project_dir=str(given.folder), automatic_checkpoint_naming=True, total_limit=2
    )
    script = Script(given).prepare(project_config=config)
    for batch in script.loader:
        script.update(batch)
        script.a.save_state()
    script.a.wait_for_everyone()
    script.a.load_state()
    names = sorted(p.name for p in Path(given.folder, "checkpoints").iterdir())
    script.noted += [torch.tensor(int(name.rpartition("_")[2])) for name in names]
    return script.epochs(1).end()


@habit("objects of the script in a checkpoint")
def custom_objects(given: Given) -> Noted:
    class Count:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    script, count = Script(given), Count()
    script.prepare()
    script.a.register_for_checkpointing(count)
    count.value = 7
    script.a.save_state(str(given.folder / "state"))
    count.value = 0
    script.a.wait_for_everyone()
    script.a.load_state(str(given.folder / "state"))
    script.noted.append(torch.tensor(count.value))
    return script.epochs().end()


@habit("objects registered for checkpoints before prepare()")
def custom_objects_first(given: Given) -> Noted:
    script = Script(given)
    a, model = script.accelerator(), model_of_tests()
    averages = torch.optim.swa_utils.AveragedModel(model)
    a.register_for_checkpointing(averages)
    optimizer = adamw(model)
    script.scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    script.model, script.optimizer, script.loader = a.prepare(
        model, optimizer, DataLoader(rows(), 4)
    )
    script.epochs(1)
    a.save_state(str(given.folder / "state"))
    script.epochs(1)
    a.load_state(str(given.folder / "state"))
    return script.epochs(1).end()


@habit("hooks around save_state")
def state_hooks(given: Given) -> Noted:
    script = Script(given).prepare()
    seen: list[int] = []
    script.a.register_save_state_pre_hook(lambda models, weights, folder: seen.append(len(weights)))
    script.a.register_load_state_pre_hook(lambda models, folder: seen.append(len(models)))
    script.epochs(1).a.save_state(str(given.folder / "state"))
    script.a.wait_for_everyone()
    script.a.load_state(str(given.folder / "state"))
    script.noted.append(torch.tensor(seen))
    return script.epochs(1).end()


@habit("the state of a plain run loaded")
def state_of_plain(given: Given) -> Noted:
    plain = Script(Given(None, given.folder)).prepare().epochs(1)
    plain.a.save_state(str(given.folder / "plain"))
    plain.end()
    script = Script(given).prepare()
    script.a.load_state(str(given.folder / "plain"))
    return script.epochs(1).end()


@habit("save_model, get_state_dict")
def saves_model(given: Given) -> Noted:
    script = Script(given).prepare().epochs(1)
    script.a.save_model(script.model, str(given.folder / "model"))
    script.a.wait_for_everyone()
    state = script.a.get_state_dict(script.model)
    script.noted += [value.clone() for name, value in state.items() if "running" not in name]
    read = hf("safetensors.torch").load_file(given.folder / "model" / "model.safetensors")
    assert set(read) == set(state)
    return script.epochs(1).end()


@habit("weights loaded by load_state_dict in mid-training")
def loads_weights(given: Given) -> Noted:
    script = Script(given).prepare()
    own = script.a.unwrap_model(script.model)
    start = copy.deepcopy(own.state_dict())
    script.epochs(1)
    own.load_state_dict(start)
    return script.epochs(1).end()


@habit("the optimizer's state saved and loaded by hand")
def optimizer_state(given: Given) -> Noted:
    script = Script(given).prepare().epochs(1)
    state = copy.deepcopy(script.optimizer.state_dict())
    script.epochs(1)
    script.optimizer.load_state_dict(state)
    return script.epochs(1).end()


# Averages and copies.


@habit("an average of weights (EMA), by deepcopy")
def ema(given: Given) -> Noted:
    script = Script(given).prepare()
    own = script.a.unwrap_model(script.model)
    mean = copy.deepcopy(own).requires_grad_(False)
    for batch in script.loader:
        script.update(batch)
        with torch.no_grad():
            for a, b in zip(mean.parameters(), own.parameters(), strict=True):
                a.lerp_(b, 0.1)
    x, y = next(iter(script.loader))
    script.noted += [*parameters(mean), script.a.gather(mse_loss(mean.eval()(x), y))]
    return script.end()


@habit("torch's AveragedModel")
def averaged(given: Given) -> Noted:
    script = Script(given).prepare()
    mean = torch.optim.swa_utils.AveragedModel(script.a.unwrap_model(script.model))
    for batch in script.loader:
        script.update(batch)
        mean.update_parameters(script.a.unwrap_model(script.model))
    return [*parameters(mean), *script.end()]


@habit("the model copied and trained apart")
def copied(given: Given) -> Noted:
    script = Script(given).prepare().epochs(1)
    other = copy.deepcopy(script.a.unwrap_model(script.model))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in script.loader:
        mse_loss(other(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*parameters(other), *script.epochs(1).end()]


@habit("the model pickled")
def pickled(given: Given) -> Noted:
    script = Script(given).prepare(hooks_free()).epochs(1)
    read = pickle.loads(pickle.dumps(script.a.unwrap_model(script.model)))
    return [*parameters(read), *script.epochs(1).end()]


@habit("the accelerator copied by deepcopy")
def copied_accelerator(given: Given) -> Noted:
    script = Script(given).prepare()
    script.a = copy.deepcopy(script.a)
    return script.epochs().end()
