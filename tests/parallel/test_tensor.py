"""Layers split over ranks against the whole model: training, collectives, dropout."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slipstream.parallel.tensor.layers import RowParallel
from slipstream.parallel.tensor.plans import known_plan
from slipstream.parallel.tensor.split import split_layers
from tests.harness.counters import collectives
from tests.harness.ranks import Ranks
from tests.parallel.models import CASES, LENGTH, WORDS, gpt2, places
from tests.parallel.tensor_models import mlp, pair, same, step, world

STEPS = 5


NAMES = [(name, plan) for name, case in CASES.items() for plan in case.plans]


def trains_as_whole(name: str, plan: str) -> None:
    case = CASES[name]
    whole, model, first, second, split = pair(case, plan)
    assert len(split.shards) < len(model.state_dict()) or name == "mobile"
    sizes = [sum(p.numel() for p in m.parameters()) for m in (whole, model)]
    assert sizes[1] < sizes[0] or name == "tokens"
    for number in range(STEPS):
        batch = case.batch(number)
        losses = [step(m, o, batch) for m, o in ((whole, first), (model, second))]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9), number
    expected = whole.state_dict()
    same(split.full_state_dict(), expected)
    moments = [first.state_dict()["state"], split.full_optimizer_state_dict(second)["state"]]
    for index, values in moments[0].items():
        same(moments[1][index], values)
    split.close()
    assert not any(isinstance(module, RowParallel) for module in model.modules())
    same(model.state_dict(), expected)
    assert step(model, second, case.batch(99)) == pytest.approx(
        step(whole, first, case.batch(99)), rel=1e-9
    )


@pytest.mark.parametrize(("name", "plan"), NAMES, ids=["-".join(n) for n in NAMES])
def test_losses_parameters_and_moments_are_those_of_the_whole_model(two, name, plan) -> None:
    two.run(trains_as_whole, name, plan)


def one_sum_each_way() -> None:
    model = mlp(6, 8, 6)
    plan = places({"0": "column", "1": "row"})
    x = torch.randn(5, 6, requires_grad=True)
    split = split_layers(model, world(), plan)
    with collectives() as log:
        y = model(x)
    assert [(c.kind, c.num_bytes) for c in log] == [("all_reduce", 5 * 6 * 4)]
    with collectives() as log:
        y.sum().backward()
    assert [(c.kind, c.num_bytes) for c in log] == [("all_reduce", 5 * 6 * 4)]
    assert (model[0].weight.shape, model[0].out_features) == ((4, 6), 4)
    assert (model[1].weight.shape, model[1].bias.shape) == ((6, 4), (6,))
    with collectives() as log, torch.no_grad():
        model(x)
    assert len(log) == 1
    split.close()
    assert (model[0].weight.shape, model[0].out_features) == ((8, 6), 8)


def test_a_column_and_a_row_cost_one_sum_each_way(two: Ranks) -> None:
    two.run(one_sum_each_way)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.query(x) * self.key(x))


def columns_of_one_input() -> None:
    model = Heads()
    plan = places({"query": "column", "key": "column", "out": "row"})
    split_layers(model, world(), plan)
    x = torch.randn(2, 4, requires_grad=True)
    model(x)  # a forward that nobody differentiates leaves nothing behind
    with torch.no_grad():
        model(x)
    with collectives() as log:
        model(x).sum().backward()
    assert [c.kind for c in log] == ["all_reduce"] * 2


def test_columns_of_one_input_sum_its_gradient_once(two: Ranks) -> None:
    two.run(columns_of_one_input)


def sequence_moves_no_more() -> None:
    totals = []
    for sequence in (False, True):
        model = gpt2()
        split_layers(model, world(), known_plan(model.inner.config, sequence=sequence))
        seen: list[torch.Size] = []
        see = partial(lambda seen, _, __, y: seen.append(y.shape), seen)
        model.inner.transformer.h[1].ln_2.register_forward_hook(see)
        words = torch.randint(WORDS, (2, LENGTH))
        with collectives() as log:
            model(words).backward()
        totals.append([c.kind for c in log])
        length = LENGTH if not sequence else LENGTH // 2 + (dist.get_rank() < LENGTH % 2)
        assert seen == [(2, length, 16)]
    assert totals[0] == ["all_reduce"] * 2 * 2 * 2


def test_with_the_sequence_split_a_rank_holds_its_part_only(two: Ranks) -> None:
    two.run(sequence_moves_no_more)


class Masks(nn.Module):
    """Dropout before, inside and behind a split region, twice; keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.drop = nn.Dropout(0.5)
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in "ab":
            x = self.keep(f"before {layer}", self.drop(torch.ones_like(x))) + x
            inside = self.up(x)
            self.keep(f"inside {layer}", self.drop(torch.ones_like(inside)))
            x = self.down(inside)
            self.keep(f"behind {layer}", self.drop(torch.ones_like(x)))
        return x

    def keep(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.seen[name] = x
        return x


def masks() -> None:
    torch.manual_seed(dist.get_rank())
    model = Masks()
    split_layers(model, world(), places({"up": "column", "down": "row"}))
    before = torch.get_rng_state()
    model(torch.ones(16, 8))
    after = torch.get_rng_state()
    assert not torch.equal(before, after)
    gathered: list[Any] = [None] * 2
    dist.all_gather_object(gathered, model.seen | {"after": after})
    for name in model.seen:
        assert torch.equal(gathered[0][name], gathered[1][name]) == ("inside" not in name), name
    assert torch.equal(gathered[0]["after"], gathered[1]["after"])
    inside = [rank[f"inside {layer}"] for rank in gathered for layer in "ab"]
    equal = [float((a == b).float().mean()) for a, b in pairwise([*inside, inside[0]])]
    assert all(0.4 < share < 0.6 for share in equal)  # independent masks agree on half
    model.eval()
    state = torch.get_rng_state()
    model(torch.ones(2, 8))
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_is_common_for_whole_tensors_and_per_rank_for_split_ones(
    two,
) -> None:
    two.run(masks)


def recomputed() -> None:
    torch.manual_seed(0)
    block = Masks()

    def run(x: torch.Tensor) -> torch.Tensor:
        return block.down(block.drop(block.up(x)))

    model = nn.Sequential(block)
    split_layers(model, world(), places({"0.up": "column", "0.down": "row"}))
    results = []
    for saved in (True, False):
        torch.manual_seed(1)
        x = torch.ones(4, 8, requires_grad=True)
        y = run(x) if saved else torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
        y.square().sum().backward()
        results.append((y, x.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_recomputing_a_split_region_draws_the_same_numbers(two: Ranks) -> None:
    two.run(recomputed)


def checkpoints_inside_regions() -> None:
    """Recomputing stops at the last saved tensor, in the middle of a split region."""
    words = CASES["gpt2"].batch(0)
    for sequence in (False, True):
        gradients = []
        for checkpointed in (False, True):
            torch.manual_seed(0)
            model = gpt2(dropout=0.3)
            split_layers(model, world(), known_plan(model.inner.config, sequence=sequence))
            if checkpointed:
                model.inner.gradient_checkpointing_enable({"use_reentrant": False})
            torch.manual_seed(1)
            model(*words).backward()
            model.eval()
            state = torch.get_rng_state()
            model(*words)
            assert torch.equal(state, torch.get_rng_state())
            gradients.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *gradients))


def test_gradients_of_checkpointed_blocks_with_dropout(two: Ranks) -> None:
    two.run(checkpoints_inside_regions)


def dropout_keeps_replicas_equal() -> None:
    torch.manual_seed(10 + dist.get_rank())
    for sequence in (False, True):
        model = gpt2(dropout=0.3)
        split_layers(model, world(), known_plan(model.inner.config, sequence=sequence))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [step(model, optimizer, CASES["gpt2"].batch(number)) for number in range(3)]
        norm = model.inner.transformer.h[0].ln_1.weight.detach()
        gathered: list[Any] = [None] * 2
        dist.all_gather_object(gathered, (losses, norm))
        assert gathered[0][0] == gathered[1][0]
        assert torch.equal(gathered[0][1], gathered[1][1])


def test_ranks_with_dropout_stay_equal_where_they_are_replicas(two: Ranks) -> None:
    two.run(dropout_keeps_replicas_equal)
