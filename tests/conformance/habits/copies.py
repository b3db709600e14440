"""Copies of the model: averages, targets, files."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from tests.conformance.habit import habit
from tests.conformance.loop import Batch, Loop, mse


def _averaged(run: Loop, average: AveragedModel) -> None:
    for _ in range(3):
        run.update()
        average.update_parameters(run.model)
    run.note("average", *average.module.parameters())


@habit("EMA made before")
def ema_before(run: Loop) -> None:
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    run.start()
    _averaged(run, average)


@habit("EMA made after")
def ema_after(run: Loop) -> None:
    run.start()
    _averaged(run, AveragedModel(run.model, avg_fn=get_ema_avg_fn(0.7)))


@habit("EMA by hand")
def ema_by_hand(run: Loop) -> None:
    run.start()
    average = copy.deepcopy(run.model)
    for _ in range(3):
        run.update()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), run.model.parameters(), strict=True):
                mine.lerp_(theirs.to(mine.dtype), 0.3)
    run.note("average", *average.parameters())


@habit("SWA made before")
def swa_before(run: Loop) -> None:
    average = AveragedModel(run.model)
    run.start()
    _averaged(run, average)


@habit("SWA made after")
def swa_after(run: Loop) -> None:
    run.start()
    _averaged(run, AveragedModel(run.model))


@habit("the average's weights loaded for a test, and back")
def swapped(run: Loop) -> None:
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    run.start()
    for _ in range(2):
        run.update()
        average.update_parameters(run.model)
        own = copy.deepcopy(run.model.state_dict())
        run.model.load_state_dict(average.module.state_dict())
        run.note_model("swapped", run.model)
        run.model.load_state_dict(own)
    run.update()


def _copied(run: Loop, make: Callable[[nn.Module], nn.Module]) -> None:
    """A copy that is trained on its own, beside the training."""
    run.start()
    run.update(times=2)
    made = make(run.model)
    run.note_model("copy", made)
    own = torch.optim.SGD(made.parameters(), lr=0.1)
    x, y = run._samples(0)[0]
    mse(made, Batch(torch.stack([x, -x]), torch.stack([y, y]), run.rank)).backward()
    own.step()
    run.note_model("copy trained", made)
    run.update(times=2)


@habit("deepcopy of the model")
def deepcopied(run: Loop) -> None:
    _copied(run, copy.deepcopy)


@habit("pickle of the model")
def pickled(run: Loop) -> None:
    _copied(run, lambda model: pickle.loads(pickle.dumps(model)))


@habit("torch.save of the model")
def saved(run: Loop) -> None:
    def make(model: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    _copied(run, make)


@habit("torch.save of state_dict()")
def state_saved(run: Loop) -> None:
    def make(model: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = type(run)(run.technique, run.rank, run.ranks).model
        other.load_state_dict(torch.load(file))
        return other

    _copied(run, make)


@habit("deepcopy of a part of the model")
def part_copied(run: Loop) -> None:
    run.start()
    run.update(times=2)
    head = copy.deepcopy(run.model.head)
    run.update()
    run.note_model("head", head)
