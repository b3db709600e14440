"""Layers split over ranks against the whole model, trained in the same process."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from slipstream import comm
from slipstream.errors import CommError, ModelError, StrategyError
from slipstream.parallel.tensor.layers import RowParallel
from slipstream.parallel.tensor.loss import vocabulary_cross_entropy
from slipstream.parallel.tensor.plans import known_plan
from slipstream.parallel.tensor.split import SplitLayers, split_layers
from tests.harness.counters import collectives
from tests.harness.ranks import Ranks
from tests.parallel.models import CASES, LENGTH, WORDS, Case, gpt2, places

STEPS = 20
NAMES = [(name, plan) for name, case in CASES.items() for plan in case.plans]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def built(case: Case) -> nn.Module:
    """Another model on each rank: what counts is that of the first."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return case.build().double()


def pair(case: Case, plan: str) -> tuple[nn.Module, nn.Module, Any, Any, SplitLayers]:
    """The whole model and the split one, each with its optimizer, which knows a step already."""
    model = built(case)
    dist.broadcast(torch.zeros(1), 0)
    whole = built(case)
    for mine, first in zip(whole.state_dict().values(), model.state_dict().values(), strict=True):
        dist.broadcast(mine, 0)
        if dist.get_rank() == 0:
            assert torch.equal(mine, first)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, model)]
    split = split_layers(model, world(), case.plans[plan](model), optimizers[1])
    return whole, model, *optimizers, split


def world() -> comm.Group:
    return comm.group(check=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...]) -> float:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


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
    wanted = whole.state_dict()
    same(split.full_state_dict(), wanted)
    moments = [first.state_dict()["state"], split.full_optimizer_state_dict(second)["state"]]
    for index, values in moments[0].items():
        same(moments[1][index], values)
    split.close()
    assert not any(isinstance(module, RowParallel) for module in model.modules())
    same(model.state_dict(), wanted)
    assert step(model, second, case.batch(99)) == pytest.approx(
        step(whole, first, case.batch(99)), rel=1e-9
    )


def same(state: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize(("name", "plan"), NAMES, ids=["-".join(n) for n in NAMES])
def test_losses_parameters_and_moments_are_those_of_the_whole_model(two, name, plan) -> None:
    two.run(trains_as_whole, name, plan)


# What travels, what is held.


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


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


def columns_share_their_input() -> None:
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


def test_columns_of_one_input_add_up_its_gradient_once(two: Ranks) -> None:
    two.run(columns_share_their_input)


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


# Random numbers.


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
    every: list[Any] = [None] * 2
    dist.all_gather_object(every, model.seen | {"after": after})
    for name in model.seen:
        assert torch.equal(every[0][name], every[1][name]) == ("inside" not in name), name
    assert torch.equal(every[0]["after"], every[1]["after"])
    inside = [rank[f"inside {layer}"] for rank in every for layer in "ab"]
    equal = [float((a == b).float().mean()) for a, b in pairwise([*inside, inside[0]])]
    assert all(0.4 < share < 0.6 for share in equal)  # independent masks agree on half
    model.eval()
    state = torch.get_rng_state()
    model(torch.ones(2, 8))
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_is_common_where_tensors_are_whole_and_a_ranks_own_where_they_are_split(
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
    for kept in (True, False):
        torch.manual_seed(1)
        x = torch.ones(4, 8, requires_grad=True)
        y = run(x) if kept else torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
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
        every: list[Any] = [None] * 2
        dist.all_gather_object(every, (losses, norm))
        assert every[0][0] == every[1][0]
        assert torch.equal(every[0][1], every[1][1])


def test_ranks_with_dropout_stay_equal_where_they_are_replicas(two: Ranks) -> None:
    two.run(dropout_keeps_replicas_equal)


# State.


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
        wanted = named[name].grad
        if name in split.shards:
            wanted = split.shards[name].piece(wanted, dist.get_rank())
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-9)


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


def test_gradients_that_are_there_are_cut_and_joined(two: Ranks) -> None:
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


def test_graphs_that_are_still_alive_do_not_disturb(two: Ranks) -> None:
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
        wanted = model(x)
    split = split_layers(model, world(), places({"0": "column", "1": "row"}))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == wanted.dtype == torch.bfloat16
    split.model.eval()
    split.close()
    assert not any(module.training for module in model.modules())


def test_a_row_is_as_its_layer_under_autocast_and_in_eval(two: Ranks) -> None:
    two.run(half_precision)


# Cross entropy.


def cross_entropy() -> None:
    group = world()
    torch.manual_seed(0)
    for shape, reduction in (((6,), "mean"), ((2, 5), "sum"), ((3, 2), "none"), ((0,), "sum")):
        whole = (30 * torch.randn(*shape, 13, dtype=torch.float64)).requires_grad_()
        target = torch.randint(13, shape)
        if target.numel():
            target.view(-1)[0] = -100
        own = whole.detach().split([7, 6], -1)[group.rank].clone().requires_grad_()
        wanted = F.cross_entropy(whole.flatten(0, -2), target.flatten(), reduction=reduction)
        loss = vocabulary_cross_entropy(own, target, 13, group, reduction=reduction)
        torch.testing.assert_close(loss.flatten(), wanted.flatten())
        wanted.square().sum().backward()
        loss.square().sum().backward()
        torch.testing.assert_close(own.grad, whole.grad.split([7, 6], -1)[group.rank])
    with pytest.raises(CommError, match=re.escape("target 13; allowed: 0 .. 12")):
        vocabulary_cross_entropy(torch.ones(1, [7, 6][group.rank]), torch.tensor([13]), 13, group)
    with pytest.raises(CommError, match=re.escape("allowed: [1, ")):
        vocabulary_cross_entropy(torch.ones(1, 5), torch.tensor([1]), 13, group)


def test_cross_entropy_of_a_split_vocabulary(two: Ranks) -> None:
    two.run(cross_entropy)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6, padding_idx=2)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(words))


def vocabulary_never_whole() -> None:
    group = world()
    torch.manual_seed(0)
    whole = Words()
    model = copy.deepcopy(whole)
    uneven = {"kind": "column", "uneven": True}
    split = split_layers(model, group, places({"embed": "vocabulary", "head": uneven}))
    words, target = torch.randint(13, (4, 3)), torch.randint(13, (4, 3))
    words[0, 0] = 2
    logits = model(words)
    assert logits.shape[-1] == [7, 6][group.rank]
    loss = vocabulary_cross_entropy(logits, target, 13, group)
    wanted = F.cross_entropy(whole(words).flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    wanted.backward()
    own = split.shards["embed.weight"].piece(whole.embed.weight.grad, group.rank)
    torch.testing.assert_close(model.embed.weight.grad, own)
    for odd in (-1, 13):
        with pytest.raises(IndexError):
            model(torch.tensor([[odd]]))


def test_a_tied_vocabulary_stays_split_from_embedding_to_loss(two: Ranks) -> None:
    two.run(vocabulary_never_whole)


# Mistakes: found before anything is changed, so one process can tell.


class Adapted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


MISTAKES: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "no such module": (mlp(4, 4), {"up": "column"}, "no module matches 'up'"),
    "outputs": (mlp(4, 5), {"0": "column"}, "has 5 outputs; allowed: a multiple of 2"),
    "inputs": (mlp(5, 4), {"0": "row"}, "has 5 inputs; allowed: a multiple of 2"),
    "heads": (
        mlp(4, 12),
        {"0": {"kind": "column", "block": 4}},
        "12 outputs; allowed: a multiple of 8 (2 ranks x blocks of 4)",
    ),
    "parts": (mlp(4, 8), {"0": {"kind": "column", "parts": 3}}, "a multiple of 6"),
    "uneven parts": (
        mlp(4, 8),
        {"0": {"kind": "column", "parts": 3, "gather": True}},
        "8 outputs; allowed: a multiple of 3",
    ),
    "too few": (
        mlp(4, 1),
        {"0": {"kind": "column", "gather": True}},
        "1 outputs; allowed: at least",
    ),
    "no layer": (nn.Sequential(nn.ReLU()), {"0": "row"}, "has ReLU; allowed: Linear, Conv1d"),
    "no channels": (mlp(4, 4), {"0": "channels"}, "has Linear; allowed: batch, group"),
    "groups": (
        nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)),
        {"0": "row"},
        "a convolution of 2 groups; allowed: one of 1 group",
    ),
    "padding": (
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
        {"0": "column"},
        "padding_mode 'circular'; allowed: zeros",
    ),
    "switch": (mlp(4, 4), {"0": "switch"}, "has parameters; allowed: a module without"),
    "its own forward": (nn.Sequential(Adapted(4, 4)), {"0": "row"}, "has Adapted; allowed: Linear"),
    "parametrised": (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        {"0": "column"},
        "ParametrizedLinear; allowed: Linear",
    ),
    "batch statistics": (
        nn.Sequential(nn.BatchNorm1d(4)),
        {"0": "sequence"},
        "has BatchNorm1d; allowed: modules that treat samples one by one",
    ),
    "statistics of all ranks": (
        nn.Sequential(nn.SyncBatchNorm(4)),
        {"0": "channels"},
        "has SyncBatchNorm; allowed: BatchNorm",
    ),
    "sparse": (
        nn.Sequential(nn.Embedding(4, 4, sparse=True)),
        {"0": "vocabulary"},
        "sparse=True; allowed: False",
    ),
    "no embedding": (mlp(4, 4), {"0": "vocabulary"}, "has Linear; allowed: an Embedding"),
    "max norm": (
        nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)),
        {"0": "vocabulary"},
        "allowed: an Embedding without max_norm",
    ),
    "no attribute": (
        mlp(4, 4),
        {"0": {"kind": "heads", "divide": ["num_heads"]}},
        "has divide 'num_heads'; allowed: whole numbers: in_features, out_features",
    ),
    "attribute": (
        mlp(3, 4),
        {"0": {"kind": "heads", "divide": ["in_features"]}},
        "3 in_features; allowed: a multiple of 2",
    ),
    "tied, one of them whole": (
        Words(),
        {"embed": "vocabulary"},
        "embed.weight and head.weight are one tied parameter",
    ),
    "tied, cut in two ways": (
        Words(),
        {"embed": "vocabulary", "head": "row"},
        "splits embed.weight along axis 0 into [7, 6] and head.weight along axis 1 into [3, 3]",
    ),
}


@pytest.mark.parametrize(("model", "styles", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_plan_that_does_not_fit_is_refused(model, styles, said) -> None:
    before = {n: (id(p), p.shape) for n, p in model.named_parameters()}
    group = comm.Group(ranks=(0, 1), process_group=None, check=False, rank=0)
    with pytest.raises(StrategyError, match=re.escape(said)):
        split_layers(model, group, places(styles))
    assert before == {n: (id(p), p.shape) for n, p in model.named_parameters()}


def test_no_plan_is_known_for_other_models() -> None:
    with pytest.raises(StrategyError, match=r"a model without model\.config; allowed: gpt2, bert"):
        known_plan(None)
    config = gpt2().inner.config
    config.model_type = "bert"
    with pytest.raises(
        StrategyError, match="known for bert with the sequence split; allowed: gpt2"
    ):
        known_plan(config, sequence=True)
