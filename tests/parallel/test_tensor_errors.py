"""Plans that do not fit a model, refused before anything changes; no ranks needed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import comm
from slipstream.errors import StrategyError
from slipstream.parallel.tensor.plans import known_plan
from slipstream.parallel.tensor.split import split_layers
from tests.parallel.models import gpt2, places
from tests.parallel.tensor_models import Words, mlp


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
        "12 outputs; allowed: a multiple of 8 (2 ranks x 1 parts x blocks of 4)",
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


@pytest.mark.parametrize(("model", "styles", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_plan_that_does_not_fit_is_refused(model, styles, message) -> None:
    before = {n: (id(p), p.shape) for n, p in model.named_parameters()}
    group = comm.Group(ranks=(0, 1), process_group=None, check=False, rank=0)
    with pytest.raises(StrategyError, match=re.escape(message)):
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
