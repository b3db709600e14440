"""What parallel sessions refuse: settings, optimizers, batches, models left split."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.utils import prune

import slipstream
from slipstream.errors import MismatchError, ModelError, StrategyError, UsageError
from slipstream.optim import Lamb
from tests.harness.ranks import Ranks
from tests.parallel.models import CASES
from tests.parallel.session_tasks import TASKS, TENSOR, parallel_config, sgd


def sessions_that_end_in_an_error() -> None:
    """What is left is a part of the model, which no session takes for the whole."""
    for tensor, schedule in ((True, None), (False, "1f1b")):
        parallel = parallel_config("gpt2", tensor=tensor, schedule=schedule)
        model = TASKS["gpt2"].build()
        session = slipstream.accelerate(model, sgd(model), strategy={"parallel": parallel})
        with pytest.raises(ZeroDivisionError), session:
            raise ZeroDivisionError
        with pytest.raises(UsageError, match="has only a part of it; build it anew"):
            slipstream.accelerate(model, sgd(model))
        model = TASKS["gpt2"].build()
        slipstream.accelerate(model, sgd(model), strategy={"parallel": parallel}).close()
        slipstream.accelerate(model, sgd(model), strategy={"parallel": parallel}).close()


def test_a_part_of_a_model_is_not_taken_for_the_whole(four: Ranks) -> None:
    four.run(sessions_that_end_in_an_error)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"parallel": {"tensor": {"ranks": 3}}}, "take 3 ranks, but 4 were started"),
    "optimal": ({**TENSOR, "gradients": {"split": "optimal"}}, "with gradients.split optimal"),
    "adaptive": (
        {**TENSOR, "gradients": {"codec": {"kind": "adaptive", "codec": "int8"}}},
        "with gradients.codec adaptive",
    ),
    "no such module": ({"parallel": {"pipeline": {"ranks": 2, "cut": ["inner.h"]}}}, "inner.h"),
    "cuts": (
        {"parallel": {"pipeline": {"ranks": 4, "cut": ["inner.transformer.h.1"]}}},
        "cut at 1 modules makes 2 stages, on 4 ranks",
    ),
    "sequence": (
        {
            "parallel": {
                "tensor": {"ranks": 2, "sequence": True},
                "pipeline": {"ranks": 2, "cut": ["inner.transformer.h.1"]},
            }
        },
        "parallel.pipeline with inner.transformer.drop split along the sequence",
    ),
    "heads": (
        {"parallel": {"tensor": {"ranks": 4, "plan": {"*.attn.c_attn": "column", "no": "row"}}}},
        "no module matches 'no'",
    ),
}


def refused(config: dict[str, Any], message: str) -> None:
    model = CASES["gpt2"].build()
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises((StrategyError, ModelError), match=re.escape(message)):
        slipstream.accelerate(model, sgd(model), strategy=config)
    assert shapes == [p.shape for p in model.parameters()]


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused_with_the_reason(four, config, message) -> None:
    four.run(refused, config, message)


def lamb_is_refused() -> None:
    model = CASES["gpt2"].build()
    with pytest.raises(StrategyError, match="with Lamb: it needs whole"):
        slipstream.accelerate(model, Lamb(model.named_parameters(), lr=0.01), strategy=TENSOR)
    with pytest.raises(StrategyError, match="with Adafactor: it needs whole"):
        slipstream.accelerate(model, torch.optim.Adafactor(model.parameters()), strategy=TENSOR)
    frozen = TASKS["gpt2"].build()
    frozen.inner.transformer.requires_grad_(False)
    frozen.inner.transformer.h[3].requires_grad_(True)
    config = {"parallel": parallel_config("gpt2", tensor=False, schedule="1f1b")}
    with pytest.raises(ModelError, match="pipeline rank 0 have no parameter that requires"):
        slipstream.accelerate(frozen, sgd(frozen), strategy=config)
    whole = TASKS["gpt2"].build()
    indices = {**config, "gradients": {"split": {"kind": "by_index", "last": [1, 51]}}}
    with pytest.raises(StrategyError, match=r"with gradients\.split by_index"):
        slipstream.accelerate(whole, sgd(whole), strategy=indices)
    plan = {} if dist.get_rank() else {"parallel": {"tensor": {"ranks": 2}}}
    with pytest.raises(MismatchError, match="the strategy"):
        slipstream.accelerate(model, sgd(model), strategy=plan)


def test_layerwise_optimizers_and_strategies_that_differ_are_refused(four: Ranks) -> None:
    four.run(lamb_is_refused)


def a_layer_is_thawed() -> None:
    """Its gradients would be summed over ranks by hooks, which it has not got."""
    model = CASES["gpt2"].build()
    norm = model.inner.transformer.ln_f.requires_grad_(False)
    config = {"parallel": {"tensor": {"ranks": 2, "sequence": True}}}
    with slipstream.accelerate(model, sgd(model), strategy=config) as session:
        session.backward(session.model(*CASES["gpt2"].batch(0)))
        session.step()
        norm.requires_grad_(True)
        loss = session.model(*CASES["gpt2"].batch(1))
        with pytest.raises(UsageError, match=r"frozen at accelerate\(\) .* inner.*ln_f.weight"):
            session.backward(loss)


def test_a_layer_thawed_later_is_refused_also_without_data_parallel_peers(two: Ranks) -> None:
    two.run(a_layer_is_thawed)


def different_batches_of_stages() -> None:
    task, model = TASKS["gpt2"], TASKS["gpt2"].build()
    config = {"parallel": parallel_config("gpt2", tensor=False, schedule="1f1b")}
    with slipstream.accelerate(model, sgd(model), strategy=config) as session:
        x, y = task.batch(dist.get_rank())
        with pytest.raises(MismatchError, match="ranks 0 and 1 train one model, but got different"):
            session.forward_backward(task.loss, (x,), target=y)


def different_batches() -> None:
    assert slipstream.data_share(TENSOR) == (dist.get_rank() // 2, 2)
    model = CASES["gpt2"].build()
    with slipstream.accelerate(model, sgd(model), strategy=TENSOR) as session:
        loss = session.model(*CASES["gpt2"].batch(dist.get_rank()))
        with pytest.raises(MismatchError, match="ranks 0 and 1 train the layers"):
            session.backward(loss)


def test_ranks_of_one_model_must_train_on_the_same_batches(four: Ranks) -> None:
    four.run(different_batches)
    four.run(different_batches_of_stages)


def pruned_stages() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    parallel = {"pipeline": {"ranks": 2, "cut": ["1"]}}
    session = slipstream.accelerate(model, sgd(model), strategy={"parallel": parallel})
    prune.l1_unstructured(model[dist.get_rank()], "weight", amount=0.5)
    with pytest.raises(UsageError, match=r"was named \d\.weight_orig at accelerate"), session:
        session.forward_backward(mse_loss, (torch.ones(2, 4),), target=torch.ones(2, 4))


def test_a_parameter_with_another_name_is_refused_in_a_pipeline(two: Ranks) -> None:
    two.run(pruned_stages)
