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


def _averages(run: Loop) -> tuple[AveragedModel, ...]:
    return (
        AveragedModel(run.model),  # SWA
        AveragedModel(run.model, avg_fn=get_ema_avg_fn(0.7)),
        AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    )


def _averaged(run: Loop, averages: tuple[AveragedModel, ...]) -> None:
    for _ in range(3):
        run.update()
        for average in averages:
            average.update_parameters(run.model)
    for average in averages:
        run.note("average", *average.module.parameters())


@habit("EMA and SWA made before", "whole parameters")
def averages_before(run: Loop) -> None:
    averages = _averages(run)
    run.start()
    _averaged(run, averages)


@habit("EMA and SWA made after")
def averages_after(run: Loop) -> None:
    run.start()
    _averaged(run, _averages(run))


@habit("weights moved through .data for a test, and back", "whole parameters")
def merged(run: Loop) -> None:
    """As adapters are merged into their layer."""
    run.start()
    for _ in range(2):
        run.update()
        run.model.head.weight.data += 0.1
        run.model.eval()
        with torch.no_grad():
            run.note("merged", run.model(torch.stack([x for x, _ in run._samples(0)[:2]])))
        run.model.train()
        run.model.head.weight.data -= 0.1
    run.update()


@habit("the average's weights loaded for a test, and back", "whole parameters")
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
    run.note_model("head", copy.deepcopy(run.model.head))
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
