"""What recomputation refuses, before training or in a forward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import SlipstreamError, StrategyError, UsageError
from slipstream.memory import recompute
from slipstream.strategy import BudgetBytesConfig, BudgetConfig, EveryConfig
from tests.memory.models import MODELS, Blocks, Twice, rows, words
from tests.memory.recompute.training import config_of


class Changing(Blocks):
    """Can change how it calls its blocks after the first forward."""

    change = ""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        blocks = list(self.blocks)
        if self.change == "skips":
            del blocks[0]
        x = self.first(x)
        for number, block in enumerate(blocks):
            x = block(x * 2 if self.change == "scales" and number == 1 else x, scale=self.scale)
            if self.change == "adds" and number == 0:
                x.detach().add_(1.0)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("skips", "blocks.1 was called without blocks.0 before it, unlike in the first"),
        ("scales", "blocks.1 was not called with what the block before it returned"),
        ("adds", "blocks.1 was not called with what the block before it returned"),
    ],
)
def test_a_model_that_changes_its_calls_is_an_error(change: str, words: str) -> None:
    model = Changing().train()
    recomputed = recompute(model, EveryConfig(every=2))
    model(**rows(0)).backward()
    model.change = change
    with pytest.raises(UsageError, match=words) as caught:
        model(**rows(0))
    assert "memory.recompute: {every: 1}" in str(caught.value)
    model.change = ""
    model(**rows(0)).backward()
    recomputed.close()


def test_invalid_configs_are_refused() -> None:
    def refuse(model: nn.Module, settings: dict[str, Any], *said: str) -> None:
        with pytest.raises(SlipstreamError) as caught:
            recompute(model.train(), config_of(settings))(**rows(0))  # type: ignore[operator]
        for part in said:
            assert part in str(caught.value)

    chain = Blocks()
    refuse(chain, {"checkpoints": ["block.1"]}, "no module matches 'block.1'", "nearest: blocks.1")
    refuse(chain, {"checkpoints": ["blocks"]}, "blocks is a ModuleList, which is never called")
    refuse(
        chain,
        {"checkpoints": ["blocks.1", "blocks.1.norm"]},
        "blocks.1.norm (matched by 'blocks.1.norm') is inside of blocks.1",
    )
    refuse(nn.Linear(2, 2), {"every": 1}, "Linear has no repeated blocks", "checkpoints: [path")
    recompute(chain, EveryConfig())
    refuse(chain, {"every": 1}, "the forward of blocks.0 is already overridden")
    gpt2 = MODELS["gpt2"].build()
    gpt2.transformer.gradient_checkpointing = True
    refuse(gpt2, {"every": 1}, "uses its own gradient checkpointing", "out of TrainingArguments")


def test_too_low_a_budget_is_an_error_that_names_the_least() -> None:
    model = Blocks().train()
    recompute(model, BudgetBytesConfig(budget_bytes=100))
    with pytest.raises(
        StrategyError, match=r"budget of 100 bytes for .* allowed: at least "
    ) as told:
        model(**rows(0))
    least = int(str(told.value).split("at least ")[1].split()[0])
    for budget, fits in ((least, True), (least - 1, False)):
        other = Blocks().train()
        recompute(other, BudgetBytesConfig(budget_bytes=budget))
        with nullcontext() if fits else pytest.raises(StrategyError):
            other(**rows(0))


def test_a_budget_for_a_block_that_is_called_twice_is_refused() -> None:
    model = Twice().train()
    recompute(model, BudgetConfig(budget=0.5))
    with pytest.raises(UsageError, match=r"blocks\.0 is called twice in one forward"):
        model(**rows(0))


def test_a_cache_of_keys_and_values_is_refused() -> None:
    model = MODELS["gpt2"].build().train()
    recompute(model, EveryConfig())
    with pytest.raises(UsageError, match=r"use_cache = False"):
        model(**words(0), use_cache=True)
