"""One validation: what all ranks compare, and what it warns of; it changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.cluster.connect import connect
from slipstream.cluster.environment import Environment
from slipstream.errors import ModelError, StrategyError
from slipstream.session.validation import Validation, validate
from slipstream.strategy import Strategy
from tests.session.training import sgd, small


def validated(model: nn.Module, loader: object = None, **settings: object) -> Validation:
    strategy = Strategy.load(settings)
    return validate(model, sgd(model), loader, strategy, connect(Environment(), "cpu"))  # type: ignore[arg-type]


def test_the_fingerprint_names_what_ranks_must_share() -> None:
    model = small()
    model.register_buffer("mean", torch.zeros(2, dtype=torch.int64))
    model[2].bias.requires_grad_(False)  # type: ignore[index,union-attr]
    assert validated(model, [1], gradients={"accumulate": 2}) == Validation(
        {
            "the strategy": '{"gradients": {"accumulate": 2}}',
            "the optimizer": "SGD",
            "the loader": "given",
            "parameter 0.weight": "torch.float32 (3, 4)",
            "parameter 0.bias": "torch.float32 (3,)",
            "parameter 2.weight": "torch.float32 (1, 3)",
            "parameter 2.bias": "torch.float32 (1,), frozen",
            "buffer mean": "torch.int64 (2,)",
        },
        warnings=(),
    )


@pytest.mark.parametrize(
    "strategy",
    ["strategy.yaml", Path("strategy.yaml"), {"gradients": {"codec": "int8"}}, Strategy()],
    ids=lambda strategy: type(strategy).__name__,
)
def test_a_strategy_in_the_place_of_the_loader_is_refused(strategy: object) -> None:
    """A script that iterates over a loader of its own would train under the defaults."""
    with pytest.raises(ModelError, match=r"is the loader, .*; name a strategy: .*strategy="):
        validated(small(), strategy)


def test_a_rule_that_matches_nothing_is_a_warning() -> None:
    rules = [{"match": "0.*", "codec": "int8"}, {"match": "3.*", "codec": "half"}]
    model = small()
    (text,) = validated(model, gradients={"codec": {"kind": "by_name", "rules": rules}}).warnings
    assert "gradients.codec.rules.1.match '3.*' matches no trainable parameter" in text
    assert "(0.weight, 0.bias, 2.weight, ...)" in text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compute": {"compile": True}}, "compute.compile"),
        ({"memory": {"recompute": {"every": 1, "keep": ["matmul"]}}}, "memory.recompute keep"),
    ],
)
def test_a_graph_for_one_backward_is_not_replayed(settings: dict[str, Any], words: str) -> None:
    """Every hundredth update would be the first to fail."""
    with pytest.raises(StrategyError, match=f"checks.replay with {words}"):
        validated(small(), checks={"every": 100, "replay": True}, **settings)


def test_the_number_of_ranks_must_fill_the_mesh() -> None:
    with pytest.raises(StrategyError, match="2 tensor ranks"):
        validated(small(), parallel={"tensor": {"ranks": 2, "plan": {"0": "column"}}})
