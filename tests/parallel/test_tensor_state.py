"""State of split layers: checkpoints, gradients, tied modules, closing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slipstream import comm
from slipstream.errors import ModelError
from slipstream.parallel.tensor.split import split_layers
from tests.harness.ranks import Ranks
from tests.parallel.models import CASES, places
from tests.parallel.tensor_models import mlp, pair, same, step, world


def states_travel_between_sizes() -> dict[str, torch.Tensor]:
    """A state of one process into two ranks, and back; of two ranks into groups of one."""
    case = CASES["gpt2"]
    torch.manual_seed(0)
    whole = case.build()
    model = case.build()
    split = split_layers(model, world(), case.plans["with vocabulary"](model))
    split.load_full_state_dict(whole.state_dict())
    same(split.full_state_dict(), whole.state_dict())
    batch = case.batch(0)
    assert float(model(*batch)) == pytest.approx(float(whole(*batch)), rel=1e-5)
    with pytest.raises(ModelError, match=r"wte\.weight has shape"):
        split.load_full_state_dict(model.state_dict())
    with pytest.raises(ModelError, match="Missing key"):
        split.load_full_state_dict({})
    assert model.inner.lm_head.weight is model.inner.transformer.wte.weight
    return split.full_state_dict()


def test_a_state_fits_any_number_of_ranks(two: Ranks) -> None:
    states = two.run(states_travel_between_sizes)
    same(states[0], states[1])
    model = CASES["gpt2"].build()
    alone = comm.group(check=False)
    split = split_layers(model, alone, CASES["gpt2"].plans["with vocabulary"](model))
    split.load_full_state_dict(states[0])
    same(split.full_state_dict(), states[0])
    split.close()
    same(model.state_dict(), states[0])


def resumes() -> None:
    case = CASES["gpt2"]
    runs = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = case.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        split = split_layers(model, world(), case.plans["known"](model), optimizer)
        for number in range(2):
            step(model, optimizer, case.batch(number))
        if interrupted:
            saved = split.full_state_dict(), split.full_optimizer_state_dict(optimizer)
            model = case.build()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            split = split_layers(model, world(), case.plans["known"](model), optimizer)
            split.load_full_state_dict(saved[0])
            split.load_full_optimizer_state_dict(optimizer, saved[1])
        runs.append([step(model, optimizer, case.batch(number)) for number in range(2, 4)])
    assert runs[0] == runs[1]


def test_model_and_optimizer_resume_bit_for_bit(two: Ranks) -> None:
    two.run(resumes)


def clipped() -> None:
    case = CASES["gpt2"]
    whole, model, *_, split = pair(case, "known")
    norms = []
    for m, clip in ((whole, None), (model, split)):
        m(*case.batch(0)).backward()
        if clip is None:
            norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.1))
        else:
            norms.append(clip.clip_grad_norm_(0.1))
    torch.testing.assert_close(norms[0], norms[1].double(), rtol=1e-6, atol=0)
    named = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        expected = named[name].grad
        if name in split.shards:
            expected = split.shards[name].piece(expected, dist.get_rank())
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-9)


def test_gradients_are_clipped_by_the_norm_of_the_whole_model(two: Ranks) -> None:
    two.run(clipped)


def keeps_gradients() -> None:
    torch.manual_seed(0)
    model = mlp(4, 4, 4)
    model(torch.ones(2, 4)).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    split = split_layers(model, world(), places({"0": "column", "1": "row"}))
    assert model[0].weight.grad.shape == (2, 4)
    split.close()
    split.close()
    assert all(map(torch.equal, grads, [p.grad for p in model.parameters()]))


def test_existing_gradients_are_split_and_gathered(two: Ranks) -> None:
    two.run(keeps_gradients)


def graphs_that_are_still_alive() -> None:
    """A loss from before the layers were split, or from before they were whole again."""
    model = mlp(4, 8, 4)
    x = torch.randn(3, 4)
    before = model(x).sum()
    split = split_layers(model, world(), places({"0": "column", "1": "row"}))
    after = model(x).sum()
    after.backward()
    split.close()
    again = model(x).sum()
    again.backward()
    assert model[0].weight.grad.shape == (8, 4)
    del before


def test_live_graphs_survive_splitting_and_closing(two: Ranks) -> None:
    two.run(graphs_that_are_still_alive)


class Twice(nn.Module):
    """A module under two names, and a parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.alias = self.up
        self.down = nn.Linear(8, 4)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
        self.norms[1].weight = self.norms[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = norm(x)
        return self.down(self.alias(x))


def registered_twice() -> None:
    torch.manual_seed(0)
    whole = Twice()
    model = copy.deepcopy(whole)
    part = {"kind": "sequence"}
    plan = {
        "up": {"kind": "column", "sequence": True},
        "down": "row",
        "norms.0": {**part, "enter": True},
        "norms.1": part,
    }
    split = split_layers(model, world(), places(plan))
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(copy.deepcopy(model)(x), whole(x))
    model(x).square().sum().backward()
    whole(x).square().sum().backward()
    split.close()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert model.alias is model.up


def test_modules_and_parameters_that_are_registered_twice(two: Ranks) -> None:
    two.run(registered_twice)


def half_precision() -> None:
    model = mlp(4, 8, 4)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    split = split_layers(model, world(), places({"0": "column", "1": "row"}))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    split.model.eval()
    split.close()
    assert not any(module.training for module in model.modules())


def test_a_row_behaves_as_its_layer_under_autocast_and_in_eval(two: Ranks) -> None:
    two.run(half_precision)
