"""Recomputation under ``accelerate()``: on one rank and two, with tensor and pipeline parallel."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import slipstream
from slipstream.errors import StrategyError
from slipstream.memory.recompute.budget import BlockCost
from slipstream.memory.recompute.measure import measure
from tests.harness.composed import composed
from tests.harness.ranks import Ranks
from tests.memory.models import MODELS, Blocks, forwards, rows

module = import_module("slipstream.memory.recompute.region_planner")


def trained(name: str, strategy: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Losses and state of a few updates on this rank's batches, and the report."""
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: dict[str, Any] = {}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        torch.manual_seed(session.data_rank)
        for step in range(4):
            loss = case.loss(session.model, case.batch(2 * step + session.data_rank))
            seen[f"loss {step}"] = loss.detach()
            session.backward(loss)
            session.step()
        saved = session.checkpoint("model")["model"]
        seen |= {key: value.clone() for key, value in saved.items()}
        report = session.report()
    assert not any("forward" in vars(inner) for inner in model.modules())
    return seen, report


def check_same(name: str, strategy: dict[str, Any], recompute: dict[str, Any]) -> None:
    plain, _ = trained(name, strategy)
    found, report = trained(name, strategy | {"memory": {"recompute": recompute}})
    assert [key for key in plain if not torch.equal(found[key], plain[key])] == []
    assert "modules recomputed" in report


@pytest.mark.parametrize("name", ["gpt2", "resnet", "swin"])
@pytest.mark.parametrize(
    "recompute",
    [{"every": 1}, {"every": 3}, {"budget": 0.5}, {"every": 1, "keep": ["matmul"]}],
    ids=["every", "three", "budget", "selective"],
)
def test_bitwise_as_without_on_two_ranks(two: Ranks, name: str, recompute: Any) -> None:
    two.run(check_same, name, {"gradients": {"accumulate": 2}}, recompute)


@pytest.mark.parametrize("recompute", [{"every": 1}, {"every": 2}, {"budget": 0.5}], ids=str)
@pytest.mark.parametrize("sequence", [False, True])
def test_bitwise_as_without_with_tensor_parallel(
    two: Ranks, recompute: Any, sequence: bool
) -> None:
    tensor = {"ranks": 2, "sequence": sequence}
    two.run(check_same, "gpt2", {"parallel": {"tensor": tensor}}, recompute)


def next_word(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def in_stages(schedule: str) -> int:
    results, counts = [], []
    for memory in ({}, {"recompute": {"every": 1}}):
        case = MODELS["gpt2"]
        torch.manual_seed(0)
        model = case.build().train()
        calls = forwards(model.transformer.h[4 * dist.get_rank()].mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"ranks": 2, "cut": ["transformer.h.2"], "schedule": schedule, "micro_batches": 2}
        strategy = {"parallel": {"pipeline": config}, "memory": memory}
        if schedule == "zero_bubble":
            config["cut"] = ["transformer.h.1", "transformer.h.2", "transformer.h.4"]
        with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
            torch.manual_seed(1)
            losses = []
            for step in range(3):
                words = case.batch(step)["input_ids"]
                losses.append(session.forward_backward(next_word, (words,), target=words))
                session.step()
            state = {
                key: value.clone() for key, value in session.checkpoint("model")["model"].items()
            }
            results.append(state | dict(enumerate(losses)))
            counts.append(len(calls))
    plain, found = results
    assert [key for key in plain if not torch.equal(found[key], plain[key])] == []
    return counts[1] - counts[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_bitwise_as_without_with_pipeline_parallel(two: Ranks, schedule: str) -> None:
    # a block of one of the ranks at least: each of 6 micro-batches runs once more
    assert 6 in two.run(in_stages, schedule)


def measured_differently(*args: Any) -> BlockCost:
    """On rank 0 the first blocks are slow, on others the last."""
    measured_differently.count += 1  # type: ignore[attr-defined]
    place = measured_differently.count  # type: ignore[attr-defined]
    found = measure(*args)
    speed = place if dist.get_rank() else 10 - place
    return BlockCost(float(speed), 1.0, found.output, found.saved)


def agreed() -> tuple[Any, Any]:
    from slipstream.memory import recompute
    from slipstream.strategy import BudgetConfig

    plans = []
    for shared in (False, True):
        measured_differently.count = 0  # type: ignore[attr-defined]
        torch.manual_seed(0)
        model = Blocks().train()
        with patch.object(module, "measure", measured_differently):
            if not shared:
                alone = recompute(model, BudgetConfig(budget=0.6))
                model(**rows(0)).backward()
                plans.append(alone.regions)
                continue
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            strategy = {"memory": {"recompute": {"budget": 0.6}}}
            with (
                composed("recompute") as made,
                slipstream.accelerate(model, optimizer, strategy=strategy) as session,
            ):
                session.backward(session.model(**rows(0)))
                plans.append(made[0].regions)
    return plans[0], plans[1]


def test_all_ranks_use_the_plan_of_the_first(two: Ranks) -> None:
    (alone, shared), (other_alone, other_shared) = two.run(agreed)
    assert alone != other_alone
    assert shared == other_shared == alone


def too_low_a_budget() -> None:
    trained("gpt2", {"memory": {"recompute": {"budget_bytes": 1000}}})


def test_too_low_a_budget_is_refused_alike_on_all_ranks(two: Ranks) -> None:
    said = {str(error) for error in two.fail(too_low_a_budget).values()}
    assert len(said) == 1
    assert "memory.recompute.budget_bytes: a budget of 1000 bytes" in said.pop()


WRONG = {
    "nothing matches": ({"memory": {"recompute": {"checkpoints": ["layer.*"]}}}, "nearest:"),
    "a region across pipeline stages": (
        {
            "parallel": {"pipeline": {"ranks": 2, "cut": ["transformer.h.2"]}},
            "memory": {"recompute": {"budget": 0.5}},
        },
        "memory.recompute budget with parallel.pipeline",
    ),
}


def refused(strategy: dict[str, Any]) -> None:
    trained("gpt2", strategy)


@pytest.mark.parametrize(("strategy", "words"), WRONG.values(), ids=WRONG)
def test_invalid_strategies_are_refused_before_training(
    two: Ranks, strategy: Any, words: str
) -> None:
    for error in two.fail(refused, strategy).values():
        assert words in str(error)


def test_a_single_process() -> None:
    check_same("bert", {}, {"budget": 0.5})
    with pytest.raises(StrategyError, match=r"no module matches 'bert\.layer'"):
        trained("bert", {"memory": {"recompute": {"checkpoints": ["bert.layer"]}}})
