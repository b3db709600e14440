"""Recomputed models train bitwise the same, however they call their blocks, until close()."""

from __future__ import annotations

import pickle
import random
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.memory import recompute
from slipstream.strategy import BudgetConfig, EveryConfig, RecomputeConfig
from tests.memory.models import (
    MODELS,
    Backwards,
    Block,
    Blocks,
    Case,
    Twice,
    forwards,
    images,
    masked_words,
    resnet50,
    rows,
    words,
)
from tests.memory.recompute.training import (
    CONFIGS,
    after_one_forward,
    assert_same,
    config_of,
    trained,
)


@pytest.fixture(scope="module")
def plain() -> Any:
    known: dict[tuple[str, bool], dict[str, Any]] = {}

    def of(name: str, autocast: bool) -> dict[str, Any]:
        if (name, autocast) not in known:
            known[name, autocast] = trained(MODELS[name], None, autocast=autocast)
        return known[name, autocast]

    return of


@pytest.mark.parametrize(
    ("config", "autocast"),
    [
        *((config, False) for config in (*CONFIGS, "checkpoints")),
        *((config, True) for config in ("two", "half", "selective")),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_bitwise_as_without(plain: Any, name: str, config: str, autocast: bool) -> None:
    case = MODELS[name]
    settings = CONFIGS.get(config, {"checkpoints": [case.blocks]})
    found = trained(case, config_of(settings), autocast=autocast)
    assert_same(found, plain(name, autocast))


def test_a_whole_resnet50() -> None:
    case = Case(resnet50, images, "resnet.encoder.stages.*.layers.*", 16)
    expected = trained(case, None)
    for name in ("every", "half"):
        assert_same(trained(case, config_of(CONFIGS[name])), expected)


def test_regions_follow_how_blocks_are_called() -> None:
    spans = {
        "gpt2": [2, 2, 1],
        "bert": [2, 2],
        "resnet": [2, 2, 2],  # one reaches from stage to stage
        "swin": [2, 2, 1],  # none reaches over the merging of patches
        "chain": [2, 2],
    }
    for name, lengths in spans.items():
        _, recomputed = after_one_forward(name, {"every": 2})
        assert list(map(len, recomputed.regions)) == lengths, name


class New(Blocks):
    def between(self, number: int, x: Tensor) -> Tensor:
        return x * 1 if number == 2 else x


class InPlace(Blocks):
    def between(self, number: int, x: Tensor) -> Tensor:
        return x.add_(1.0) if number == 2 else x


class Random(Blocks):
    def between(self, number: int, x: Tensor) -> Tensor:
        if number == 2:
            torch.rand(())
        return x


class PythonRandom(Blocks):
    def between(self, number: int, x: Tensor) -> Tensor:
        if number == 2:
            random.random()
        return x


class OwnRandom(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def between(self, number: int, x: Tensor) -> Tensor:
        if number == 2:
            torch.rand((), generator=self.generator)
        return x


class PartlyAutocast(Blocks):
    """Computes the first two blocks under autocast."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=number < 2):
                x = block(x, scale=self.scale)
        return F.cross_entropy(self.head(x), y)


class Told(Block):
    """Gets an object, and writes into it."""

    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        told = vars(scale) if isinstance(scale, SimpleNamespace) else scale
        told["calls"] += 1
        return super().forward(x * (1 + told["layer"] // 2))


class Telling(Blocks):
    """Tells blocks by an argument, which it changes, where they are."""

    told: type = dict

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Told(6) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, told = self.first(x), self.told(layer=0, calls=0)
        for number, block in enumerate(self.blocks):
            if number == 2:
                fields = told if isinstance(told, dict) else vars(told)
                fields["layer"] = number
            x = block(x, scale=told)
        return F.cross_entropy(self.head(x), y)


class TellingByObject(Telling):
    told = SimpleNamespace


@pytest.mark.parametrize(
    ("build", "regions"),
    [
        (New, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (InPlace, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (Random, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (PythonRandom, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (OwnRandom, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (PartlyAutocast, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (Telling, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (TellingByObject, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (Backwards, (("blocks.3", "blocks.2", "blocks.1"), ("blocks.0",))),
        (Twice, (("blocks.0", "blocks.1", "blocks.2"), ("blocks.3",))),
    ],
)
def test_regions_end_where_code_between_blocks_computes(build: Any, regions: Any) -> None:
    case = Case(build, rows, "blocks.*", 4)
    plain = trained(case, None)
    assert_same(trained(case, EveryConfig(every=3)), plain)
    assert_same(trained(case, EveryConfig(every=1)), plain)
    model = case.build().train()
    recomputed = recompute(model, EveryConfig(every=3))
    case.loss(model, rows(0)).backward()
    assert recomputed.regions == regions


def test_forwards_that_fail_or_end_early_leave_nothing() -> None:
    model = Blocks().train()
    recomputed = recompute(model, EveryConfig(every=2))
    with pytest.raises(IndexError):
        model(rows(0)["x"], rows(0)["y"] + 9)  # behind the blocks
    model(**rows(0)).backward()
    assert recomputed.regions == (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))
    with pytest.raises(RuntimeError):
        model(rows(0)["x"][:, :2], rows(0)["y"])  # before them
    model(**rows(0)).backward()


def test_several_forwards_may_go_before_a_backward_and_a_backward_may_go_twice() -> None:
    results = []
    for config in (None, EveryConfig(every=2)):
        torch.manual_seed(0)
        model = Blocks().train()
        if config is not None:
            recompute(model, config)
            model(**rows(9))
            model.load_state_dict(results[0][1])
        start = {name: value.clone() for name, value in model.state_dict().items()}
        torch.manual_seed(1)
        losses = [model(**rows(step)) for step in range(3)]
        losses[0].backward(retain_graph=True)
        losses[2].backward()
        losses[0].backward()
        losses[1].backward()
        results.append(({n: p.grad for n, p in model.named_parameters()}, start))
    assert_same(results[1][0], results[0][0])


@pytest.mark.parametrize("config", [EveryConfig(), EveryConfig(every=2), BudgetConfig(budget=0.5)])
@pytest.mark.parametrize("training", [True, False])
def test_recomputation_depends_on_gradients_not_on_training_mode(
    config: RecomputeConfig, training: bool
) -> None:
    model = Blocks().train(training)
    recomputed = recompute(model, config)
    calls = forwards(model.blocks[0].linear)
    with torch.no_grad():
        model(**rows(0))
    assert len(calls) == 1
    assert recomputed.regions == tuple((f"blocks.{i}",) for i in range(4))
    model(**rows(0)).backward()
    settled = config != EveryConfig()
    assert (len(recomputed.regions) < 4) == settled
    assert len(calls) > 2


def test_collected_hidden_states_get_their_gradients() -> None:
    results = []
    for config in (None, EveryConfig(every=3)):
        torch.manual_seed(0)
        model = MODELS["bert"].build().train()
        if config is not None:
            recompute(model, config)
            MODELS["bert"].loss(model, masked_words(0))
        torch.manual_seed(1)
        states = model(**masked_words(0), output_hidden_states=True).hidden_states
        assert len(states) == 5
        torch.stack(states).square().sum().backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same(results[1], results[0])


def test_copies_are_plain_and_independent() -> None:
    torch.manual_seed(0)
    model = Blocks().train()
    recompute(model, EveryConfig(every=2))
    model(**rows(0)).backward()
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls, own = forwards(model.blocks[0].linear), forwards(copy.blocks[0].linear)
        copy(**rows(1)).backward()
        assert (len(calls), len(own)) == (0, 1)
        assert copy.state_dict().keys() == model.state_dict().keys()
        fresh = recompute(copy, EveryConfig())
        copy(**rows(1)).backward()
        assert len(own) == 3
        fresh.close()


def test_close_leaves_the_model_as_it_was() -> None:
    model = MODELS["gpt2"].build().train()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    recomputed = recompute(model, EveryConfig(every=2))
    MODELS["gpt2"].loss(model, words(0)).backward()
    recomputed.close()
    recomputed.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_buffers_are_right_when_modules_switch_between_training_and_evaluation() -> None:
    results = []
    for config in (None, EveryConfig(every=2)):
        torch.manual_seed(0)
        model = Blocks().train()
        if config is not None:
            recompute(model, config)
        for frozen in (True, False, True):
            for block in model.blocks:
                block.norm.train(not frozen)
            model(**rows(0)).backward()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same(results[1], results[0])


@pytest.mark.parametrize("settings", [{"every": 1}, {"budget": 0.5}], ids=str)
def test_features_that_a_hook_collects_are_those_of_the_forward(settings: dict[str, Any]) -> None:
    model, collected = Blocks().train(), list[Tensor]()
    for block in model.blocks:
        block.get_submodule("linear").register_forward_hook(lambda m, x, y: collected.append(y))
    recompute(model, config_of(settings))
    loss = model(**rows(0))
    assert len(collected) == len(model.blocks)
    (loss + sum(feature.square().mean() for feature in collected)).backward()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.linear = nn.GRU(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.rnn(x))  # type: ignore[no-any-return]


def test_a_hook_may_make_of_an_output_what_the_block_goes_on_with() -> None:
    model = nn.Sequential(Recurrent(), Recurrent()).train()
    for block in model:
        block.get_submodule("rnn").register_forward_hook(lambda m, x, y: y[0])
    recompute(model, BudgetConfig(budget=0.8))
    model(torch.ones(3, 2, 4)).sum().backward()
