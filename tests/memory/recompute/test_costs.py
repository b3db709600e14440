"""Recomputation costs exactly the FLOPs, and saves exactly the bytes, that the plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from slipstream.memory.blocks import blocks_of
from slipstream.memory.recompute.block_dataflow import Call, DataflowRecorder
from slipstream.memory.recompute.budget import BlockCost, Region, RegionParts
from slipstream.memory.recompute.chain import Chain
from slipstream.memory.recompute.measure import measure, saved_storages, storages_of
from slipstream.pytree import tensors
from tests.memory.models import MODELS, Case
from tests.memory.recompute.training import CONFIGS, after_one_forward, assert_same


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


def extra_forwards(parts: RegionParts) -> Counter[int]:
    """How many more forwards a plan does of each block."""
    found: Counter[int] = Counter()
    for part in parts:
        if isinstance(part, Region):
            found.update(part.blocks)
            found.update(extra_forwards(part.parts))
    return found


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt2", "every"),
        ("gpt2", "little"),
        ("bert", "two"),
        ("resnet", "three"),
        ("resnet", "half"),
        ("swin", "every"),
        ("swin", "half"),
        ("chain", "every"),
        ("chain", "little"),
    ],
)
def test_backward_repeats_exactly_the_flops_of_recomputed_blocks(name: str, config: str) -> None:
    case = MODELS[name]
    by_module, plain = flops_of(case.build().train(), case)
    model, recomputed = after_one_forward(name, CONFIGS[config])
    _, found = flops_of(model, case)
    extra, blocks = extra_forwards(recomputed.parts), blocks_of(model)
    assert extra
    assert found - plain == sum(times * by_module[blocks[i]] for i, times in extra.items())


NESTED = (
    Region((Region((0,)), 1)),
    Region((Region((2, Region((3,)), 4)), 5)),
)


def nested(model: nn.Module, blocks: Sequence[str], parts: RegionParts, batch: Any) -> Chain:
    """``parts`` on a chain whose links are those of the model."""
    recorder = DataflowRecorder()
    chain = Chain({path: model.get_submodule(path) for path in blocks})
    chain.observer = Watcher(recorder)
    model(**batch)
    chain.observer = None
    chain.install(recorder.order, parts, recorder.links)
    chain.begin()
    return chain


class Watcher:
    """An recorder that only records."""

    def __init__(self, recorder: DataflowRecorder) -> None:
        self.recorder = recorder

    def before_call(self, name: str, forward: Any, call: Call) -> None:
        self.recorder.before(name, call)

    def after_call(self, call: Call, output: Any) -> None:
        self.recorder.after(call, output)


def test_nested_regions_are_bitwise_the_same_and_cost_what_the_plan_says() -> None:
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
    extra = extra_forwards(NESTED)
    assert most - least == sum(extra[i] * by_module[path] for i, path in enumerate(blocks))
    assert max(extra.values()) == 3


@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet", "attentive"])
@pytest.mark.parametrize("every", [1, 2])
def test_kept_operations_are_not_recomputed(name: str, every: int) -> None:
    case = MODELS[name]
    _, plain = flops_of(case.build().train(), case)
    keep = ["matmul", "convolution", "attention"]
    model, _ = after_one_forward(name, {"every": every, "keep": keep})
    _, found = flops_of(model, case)
    assert found == plain


def saved_bytes(model: nn.Module, case: Case) -> int:
    """Bytes a forward saves, without parameters, batch and all inputs of blocks but the first."""
    other_inputs: list[Tensor] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        other_inputs.extend(tensors([args[1:], kwargs]))

    handles = [
        model.get_submodule(path).register_forward_pre_hook(look, with_kwargs=True)
        for path in blocks_of(model)
    ]
    batch = case.batch(0)
    loss, storages = saved_storages(lambda: case.loss(model, batch))
    for handle in handles:
        handle.remove()
    ignored = storages_of((*model.parameters(), *model.buffers(), *batch.values(), *other_inputs))
    found = sum(size for address, size in storages.items() if address not in ignored)
    del loss  # the graph, which kept the addresses unique
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("config", ["every", "three", "most", "little"])
def test_forward_saves_the_bytes_that_the_plan_says(
    name: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, costs = MODELS[name], list[BlockCost]()

    def measured(*args: Any) -> BlockCost:
        costs.append(measure(*args))
        return costs[-1]

    module = import_module("slipstream.memory.recompute.region_planner")
    monkeypatch.setattr(module, "measure", measured)
    after_one_forward(name, {"budget": 1.0})
    monkeypatch.undo()
    model, recomputed = after_one_forward(name, CONFIGS[config])
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


def test_a_budget_is_met_and_predicted() -> None:
    for name, case in MODELS.items():
        _, recomputed = after_one_forward(name, {"budget": 0.5})
        found = recomputed.prediction
        assert found is not None
        assert found.num_bytes <= 0.5 * found.plain_bytes
        assert found.seconds > found.plain_seconds
        (row,) = recomputed.report_rows()
        assert "MiB" in row.note
        num_recomputed, kept = sum(map(len, recomputed.regions)), int(row.value.split()[-2])
        assert num_recomputed + kept == case.count
