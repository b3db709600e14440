"""What is computed again comes out the same, costs exactly what it must, and leaves no trace."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from slipstream.errors import SlipstreamError, StrategyError, UsageError
from slipstream.memory import Recomputed, recompute
from slipstream.memory.blocks import blocks_of
from slipstream.memory.recompute.block_dataflow import Call, Observer
from slipstream.memory.recompute.budget import Cost, Parts, Region
from slipstream.memory.recompute.chain import Chain
from slipstream.memory.recompute.measure import Saved, measure
from slipstream.pytree import tensors
from slipstream.strategy import Budget, BudgetBytes, Every, Memory, Recompute
from tests.memory.models import MODELS, Blocks, Case, forwards, masked_words, rows, words

WISHES: dict[str, dict[str, Any]] = {
    "every": {"every": 1},
    "two": {"every": 2},
    "three": {"every": 3},
    "most": {"budget": 0.8},
    "half": {"budget": 0.5},
    "little": {"budget": 0.4},
    "selective": {"every": 1, "keep": ["matmul", "convolution", "attention"]},
    "selective_two": {"every": 2, "keep": ["matmul"]},
}


def wish_of(settings: dict[str, Any]) -> Recompute:
    config = Memory.model_validate({"recompute": settings}).recompute
    assert config is not None
    return config


def trained(case: Case, config: Recompute | None, *, autocast: bool = False) -> dict[str, Any]:
    """Losses, gradients and state of a few steps."""
    torch.manual_seed(0)
    model = case.build().train()
    recomputed = recompute(model, config) if config is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {}
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = case.loss(model, case.batch(step))
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        for name, p in model.named_parameters():
            if p.grad is not None:
                seen[f"{step} {name}"] = p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    seen |= model.state_dict() | {"random": torch.get_rng_state()}
    if recomputed is not None:
        recomputed.close()
        assert not any("forward" in vars(module) for module in model.modules())
    return seen


def assert_same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


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
        *((config, False) for config in (*WISHES, "checkpoints")),
        *((config, True) for config in ("two", "half", "selective")),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_bitwise_as_without(plain: Any, name: str, config: str, autocast: bool) -> None:
    case = MODELS[name]
    settings = WISHES.get(config, {"checkpoints": [case.blocks]})
    found = trained(case, wish_of(settings), autocast=autocast)
    assert_same(found, plain(name, autocast))


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


def after_one_forward(name: str, settings: dict[str, Any]) -> tuple[nn.Module, Recomputed]:
    torch.manual_seed(0)
    model = MODELS[name].build().train()
    recomputed = recompute(model, wish_of(settings))
    MODELS[name].loss(model, MODELS[name].batch(0)).backward()
    return model, recomputed


# What is computed again, and what is kept.


def flops_of(model: nn.Module, case: Case) -> tuple[dict[str, int], int]:
    """Of a forward by module, and of the backward after it."""
    with FlopCounterMode(display=False) as forward:
        loss = case.loss(model, case.batch(0))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    prefix = f"{type(model).__name__}."
    counts = forward.get_flop_counts()
    by_module = {name.removeprefix(prefix): sum(f.values()) for name, f in counts.items()}
    return by_module, backward.get_total_flops()


def runs_again(parts: Parts) -> Counter[int]:
    """How many more forwards a plan does of each block."""
    found: Counter[int] = Counter()
    for part in parts:
        if isinstance(part, Region):
            found.update(part.blocks)
            found.update(runs_again(part.parts))
    return found


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt2", "every"),
        ("gpt2", "little"),
        ("bert", "two"),
        ("resnet", "three"),
        ("resnet", "half"),
        ("chain", "every"),
        ("chain", "little"),
    ],
)
def test_backward_does_the_flops_of_the_blocks_that_are_not_kept_once_more(
    name: str, config: str
) -> None:
    case = MODELS[name]
    by_module, plain = flops_of(case.build().train(), case)
    model, recomputed = after_one_forward(name, WISHES[config])
    _, found = flops_of(model, case)
    again, blocks = runs_again(recomputed.parts), blocks_of(model)
    assert again
    assert found - plain == sum(times * by_module[blocks[i]] for i, times in again.items())


NESTED = (
    Region((Region((0,)), 1)),
    Region((Region((2, Region((3,)), 4)), 5)),
)


def nested(model: nn.Module, blocks: Sequence[str], parts: Parts, batch: Any) -> Chain:
    """``parts`` on a chain whose links are those of the model."""
    observer = Observer()
    chain = Chain({path: model.get_submodule(path) for path in blocks})
    chain.watch = Seen(observer)
    model(**batch)
    chain.watch = None
    chain.install(observer.order, parts, observer.links)
    chain.begin()
    return chain


class Seen:
    """A watch that only looks."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def begins(self, name: str, forward: Any, call: Call) -> None:
        self.observer.before(name, call)

    def ends(self, call: Call, output: Any) -> None:
        self.observer.after(call, output)


def test_regions_in_regions_are_bitwise_the_same_and_cost_what_the_plan_says() -> None:
    case = MODELS["resnet"]
    results = []
    for parts in (None, NESTED):
        torch.manual_seed(0)
        model = case.build().train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        blocks = blocks_of(model)
        if parts is not None:
            nested(model, blocks, parts, case.batch(0))
            model.load_state_dict(before)
        torch.manual_seed(1)
        by_module, flops = flops_of(model, case)
        grads = {name: p.grad for name, p in model.named_parameters()}
        results.append((grads | dict(model.named_buffers()), by_module, flops))
    (plain, by_module, least), (found, _, most) = results
    assert_same(found, plain)
    again = runs_again(NESTED)
    assert most - least == sum(again[i] * by_module[path] for i, path in enumerate(blocks))
    assert max(again.values()) == 3


@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet", "attentive"])
@pytest.mark.parametrize("every", [1, 2])
def test_operations_that_are_kept_are_not_computed_again(name: str, every: int) -> None:
    case = MODELS[name]
    _, plain = flops_of(case.build().train(), case)
    keep = ["matmul", "convolution", "attention"]
    model, _ = after_one_forward(name, {"every": every, "keep": keep})
    _, found = flops_of(model, case)
    assert found == plain


def saved_bytes(model: nn.Module, case: Case) -> int:
    """What a forward keeps, without parameters, batch and what blocks get besides their input."""
    aside: list[Tensor] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        aside.extend(tensors([args[1:], kwargs]))

    handles = [
        model.get_submodule(path).register_forward_pre_hook(look, with_kwargs=True)
        for path in blocks_of(model)
    ]
    batch = case.batch(0)
    own = (*model.parameters(), *model.buffers(), *batch.values())
    with Saved(own) as saved:
        loss = case.loss(model, batch)
    for handle in handles:
        handle.remove()
    saved.leave_out(aside)
    del loss
    return saved.num_bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("config", ["every", "three", "most", "little"])
def test_forward_keeps_the_bytes_that_the_plan_says(
    name: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, costs = MODELS[name], list[Cost]()

    def measured(*args: Any) -> Cost:
        costs.append(measure(*args))
        return costs[-1]

    module = import_module("slipstream.memory.recompute.recompute")
    monkeypatch.setattr(module, "measure", measured)
    after_one_forward(name, {"budget": 1.0})
    monkeypatch.undo()
    model, recomputed = after_one_forward(name, WISHES[config])
    plain = after_one_forward(name, {"checkpoints": [case.blocks]})
    plain[1].close()
    parts = recomputed.parts
    regions = [part.blocks for part in parts if isinstance(part, Region)]
    expected = sum(
        sum(costs[i].saved for i in blocks) - costs[blocks[-1]].output for blocks in regions
    )
    found = saved_bytes(plain[0], case) - saved_bytes(model, case)
    # what the last block returns is kept only where the head's backward needs it
    last = costs[-1].output if isinstance(parts[-1], Region) else 0
    assert found in (expected, expected + last)
    assert found > 0


def test_a_budget_is_kept_and_predicted() -> None:
    for name, case in MODELS.items():
        _, recomputed = after_one_forward(name, {"budget": 0.5})
        found = recomputed.prediction
        assert found is not None
        assert found.num_bytes <= 0.5 * found.plain_bytes
        assert found.seconds > found.plain_seconds
        assert "MiB" in recomputed.report_rows()[0].note
        again, kept = (
            sum(map(len, recomputed.regions)),
            int(recomputed.report_rows()[0].value.split()[-2]),
        )
        assert again + kept == case.count


# How models may call their blocks.


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


class Backwards(Blocks):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x, scale=self.scale)
        return F.cross_entropy(self.head(x), y)


class Twice(Blocks):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x, scale=self.scale)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize(
    ("build", "regions"),
    [
        (New, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (InPlace, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (Random, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (PythonRandom, (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))),
        (Backwards, (("blocks.3", "blocks.2", "blocks.1"), ("blocks.0",))),
        (Twice, (("blocks.0", "blocks.1", "blocks.2"), ("blocks.3",))),
    ],
)
def test_glue_and_order_are_seen(build: Any, regions: Any) -> None:
    case = Case(build, rows, "blocks.*", 4)
    found = trained(case, Every(every=3))
    assert_same(found, trained(case, None))
    model = case.build().train()
    recomputed = recompute(model, Every(every=3))
    case.loss(model, rows(0)).backward()
    assert recomputed.regions == regions


class Moody(Blocks):
    """Changes its mind after the first forward."""

    mood = ""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        blocks = list(self.blocks)
        if self.mood == "skips":
            del blocks[0]
        x = self.first(x)
        for number, block in enumerate(blocks):
            x = block(x * 2 if self.mood == "scales" and number == 1 else x, scale=self.scale)
            if self.mood == "adds" and number == 0:
                x.detach().add_(1.0)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        ("skips", "blocks.1 was called without blocks.0 before it, unlike in the first"),
        ("scales", "blocks.1 was not called with what the block before it returned"),
        ("adds", "blocks.1 was not called with what the block before it returned"),
    ],
)
def test_a_model_that_changes_its_mind_is_told(mood: str, words: str) -> None:
    model = Moody().train()
    recomputed = recompute(model, Every(every=2))
    model(**rows(0)).backward()
    model.mood = mood
    with pytest.raises(UsageError, match=words) as caught:
        model(**rows(0))
    assert "memory.recompute: {every: 1}" in str(caught.value)
    model.mood = ""
    model(**rows(0)).backward()
    recomputed.close()


def test_forwards_that_fail_or_end_early_leave_nothing() -> None:
    model = Blocks().train()
    recomputed = recompute(model, Every(every=2))
    with pytest.raises(IndexError):
        model(rows(0)["x"], rows(0)["y"] + 9)  # behind the blocks
    model(**rows(0)).backward()
    assert recomputed.regions == (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))
    with pytest.raises(RuntimeError):
        model(rows(0)["x"][:, :2], rows(0)["y"])  # before them
    model(**rows(0)).backward()


def test_several_forwards_may_go_before_a_backward_and_a_backward_may_go_twice() -> None:
    results = []
    for config in (None, Every(every=2)):
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


@pytest.mark.parametrize("config", [Every(), Every(every=2), Budget(budget=0.5)])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_and_not_training_decide(config: Recompute, training: bool) -> None:
    model = Blocks().train(training)
    recomputed = recompute(model, config)
    calls = forwards(model.blocks[0].linear)
    with torch.no_grad():
        model(**rows(0))
    assert len(calls) == 1
    assert recomputed.regions == tuple((f"blocks.{i}",) for i in range(4))
    model(**rows(0)).backward()
    settled = config != Every()
    assert (len(recomputed.regions) < 4) == settled
    assert len(calls) > 2


def test_hidden_states_that_transformers_collect_get_their_gradients() -> None:
    results = []
    for config in (None, Every(every=3)):
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


# What is left of it.


def test_copies_are_plain_and_independent() -> None:
    torch.manual_seed(0)
    model = Blocks().train()
    recompute(model, Every(every=2))
    model(**rows(0)).backward()
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls, own = forwards(model.blocks[0].linear), forwards(copy.blocks[0].linear)
        copy(**rows(1)).backward()
        assert (len(calls), len(own)) == (0, 1)
        assert copy.state_dict().keys() == model.state_dict().keys()
        fresh = recompute(copy, Every())
        copy(**rows(1)).backward()
        assert len(own) == 3
        fresh.close()


def test_close_leaves_the_model_as_it_was() -> None:
    model = MODELS["gpt2"].build().train()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    recomputed = recompute(model, Every(every=2))
    MODELS["gpt2"].loss(model, words(0)).backward()
    recomputed.close()
    recomputed.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_buffers_are_followed_where_modules_change_between_training_and_evaluation() -> None:
    results = []
    for config in (None, Every(every=2)):
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


# Wrong uses.


def test_what_cannot_be_done_is_refused_in_these_words() -> None:
    def refuse(model: nn.Module, settings: dict[str, Any], *said: str) -> None:
        with pytest.raises(SlipstreamError) as caught:
            recompute(model.train(), wish_of(settings))(**rows(0))  # type: ignore[operator]
        for part in said:
            assert part in str(caught.value)

    chain = Blocks()
    refuse(chain, {"checkpoints": ["block.1"]}, "no module matches 'block.1'", "near it: blocks.1")
    refuse(chain, {"checkpoints": ["blocks"]}, "blocks is a ModuleList, which is never called")
    refuse(
        chain,
        {"checkpoints": ["blocks.1", "blocks.1.norm"]},
        "blocks.1.norm (of 'blocks.1.norm') is inside of blocks.1",
    )
    refuse(nn.Linear(2, 2), {"every": 1}, "Linear has no repeated blocks", "checkpoints: [path")
    recompute(chain, Every())
    refuse(chain, {"every": 1}, "the forward of blocks.0 is replaced already")
    gpt2 = MODELS["gpt2"].build()
    gpt2.transformer.gradient_checkpointing = True
    refuse(gpt2, {"every": 1}, "computes activations again itself")


def test_a_budget_below_what_is_possible_says_what_is() -> None:
    model = Blocks().train()
    recompute(model, BudgetBytes(budget_bytes=100))
    with pytest.raises(
        StrategyError, match=r"budget of 100 bytes for .* allowed: at least "
    ) as told:
        model(**rows(0))
    least = int(str(told.value).split("at least ")[1].split()[0])
    for budget, fits in ((least, True), (least - 1, False)):
        other = Blocks().train()
        recompute(other, BudgetBytes(budget_bytes=budget))
        with nullcontext() if fits else pytest.raises(StrategyError):
            other(**rows(0))


def test_a_block_that_is_called_twice_has_no_budget() -> None:
    model = Twice().train()
    recompute(model, Budget(budget=0.5))
    with pytest.raises(UsageError, match=r"blocks\.0 is called twice in one forward"):
        model(**rows(0))


def test_a_cache_of_keys_and_values_is_refused() -> None:
    model = MODELS["gpt2"].build().train()
    recompute(model, Every())
    with pytest.raises(UsageError, match=r"use_cache = False"):
        model(**words(0), use_cache=True)
