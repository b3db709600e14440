"""Repeated blocks are found wherever models put them, and patterns match paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.errors import StrategyError
from slipstream.memory import recompute
from slipstream.memory.blocks import blocks_of, matching
from slipstream.strategy import EveryConfig
from tests.memory.models import MODELS, forwards


class Block(nn.Module):
    """More than one layer."""

    def __init__(self, width: int = 2, to: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(width, to)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Other(Block):
    """Another class of the same shapes."""


class Shared(nn.Module):
    """Two blocks that are called twice each: by one list and by another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block(), Block()])
        self.decoder = nn.ModuleList([*self.encoder])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.encoder, *self.decoder):
            x = block(x)
        return x


class Wrapped(nn.Module):
    """A model within a model, with an embedding before and a head after its blocks."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(2, 2), blocks, Block()


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(num_layers=2, num_decoder_layers=3, **sizes))


def bottlenecks() -> nn.Module:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 3])
    assert config.layer_type == "bottleneck"
    return ResNetModel(config)


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertModel

    sizes = {"embedding_size": 8, "hidden_size": 16, "intermediate_size": 32}
    return AlbertModel(
        AlbertConfig(vocab_size=40, num_hidden_layers=3, num_attention_heads=2, **sizes)
    )


def two(*sizes: int) -> list[Block]:
    return [Block(*sizes), Block(*sizes)]


def twice(block: Block) -> list[Block]:
    return [block, block]


def tied() -> nn.Module:
    one, other = two()
    other.linear.weight = one.linear.weight
    return nn.Sequential(one, other)


MLP = (nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet", "swin"])
def test_blocks_of_known_models(name: str) -> None:
    model = MODELS[name].build()
    found = blocks_of(model)
    assert found == matching(model, [MODELS[name].blocks], "here")
    assert len(found) == MODELS[name].count


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (
            t5,
            [*(f"encoder.block.{i}" for i in range(2)), *(f"decoder.block.{i}" for i in range(3))],
        ),
        # the first of a stage has another shape, but is of the same class
        (
            bottlenecks,
            [
                f"encoder.stages.{i}"
                for i in ("0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1", "1.layers.2")
            ],
        ),
        (lambda: nn.Sequential(*two()), ["0", "1"]),
        (lambda: Wrapped(nn.ModuleList(two())), ["blocks.0", "blocks.1"]),
        (
            lambda: Wrapped(nn.ModuleDict({"0": Block(), "last": Block()})),
            ["blocks.0", "blocks.last"],
        ),
        (
            lambda: nn.ModuleDict({"h": nn.ModuleList(two()), "norm": nn.LayerNorm(2)}),
            ["h.0", "h.1"],
        ),
        (lambda: nn.ModuleList(nn.ModuleList(two()) for _ in "ab"), ["0.0", "0.1", "1.0", "1.1"]),
        # only the outermost, be they torch's own
        (lambda: nn.Sequential(*(nn.Sequential(*two()) for _ in "ab")), ["0", "1"]),
        (lambda: nn.Sequential(*(nn.Sequential(*MLP) for _ in "ab")), ["0", "1"]),
        (
            lambda: nn.Sequential(nn.Sequential(*two()), nn.Sequential(*two(4, 4))),
            ["0.0", "0.1", "1.0", "1.1"],
        ),
        # one class in two widths, of which one repeats
        (lambda: nn.ModuleList([Block(4, 2), *two()]), ["0", "1", "2"]),
        (tied, ["0", "1"]),
        (lambda: nn.Sequential(*twice(Block())), ["0"]),
        (lambda: nn.Sequential(*twice(Block()), Block()), ["0", "2"]),
        (Shared, ["encoder.0", "encoder.1"]),
    ],
)
def test_blocks_of_lists(build: Callable[[], nn.Module], blocks: list[str]) -> None:
    assert blocks_of(build()) == blocks


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(2, 2),
        lambda: nn.Sequential(*MLP),
        lambda: Wrapped(nn.Identity()),
        lambda: Wrapped(nn.ModuleList()),
        lambda: nn.ModuleList([Block(), Other()]),
        lambda: nn.ModuleList([Block(4, 2), Block(2, 4)]),
        lambda: nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())]),  # no weights
        albert,  # calls one layer in a loop, but lists it once
    ],
)
def test_nothing_repeats(build: Callable[[], nn.Module]) -> None:
    model = build()
    assert blocks_of(model) == []
    with pytest.raises(StrategyError, match=r"has no repeated blocks .*\{checkpoints: \[path"):
        recompute(model, EveryConfig())


def test_a_block_in_two_lists_is_recomputed_once_a_call() -> None:
    grads: list[Any] = []
    for config in (None, EveryConfig()):
        torch.manual_seed(0)
        model = Shared()
        recomputed = recompute(model, config) if config is not None else None
        calls = forwards(model.encoder[0].linear)
        model(torch.ones(3, 2)).sum().backward()
        grads.append([p.grad for p in model.parameters()])
        assert len(calls) == (2 if recomputed is None else 4)
        if recomputed is not None:
            recomputed.close()
    assert all(map(torch.equal, *grads))


NAMED = Wrapped(nn.ModuleDict({"one": Block(), "other": nn.Sequential(*two())}))


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["head"], ["head"]),
        (["head", "embed"], ["embed", "head"]),  # in the order of the model
        (["head", "hea?"], ["head"]),
        (["blocks.*"], ["blocks.one", "blocks.other"]),  # the outermost
        (
            ["*.linear"],
            ["blocks.one.linear", "blocks.other.0.linear", "blocks.other.1.linear", "head.linear"],
        ),
        (["blocks.other.[01]"], ["blocks.other.0", "blocks.other.1"]),
    ],
)
def test_patterns(patterns: list[str], found: list[str]) -> None:
    assert matching(NAMED, patterns, "here") == found


def test_any_of_its_paths_names_a_module() -> None:
    for patterns in (["decoder.*"], ["*coder.*"], ["decoder.0", "encoder.0", "decoder.1"]):
        assert matching(Shared(), patterns, "here") == ["encoder.0", "encoder.1"]
    with pytest.raises(
        StrategyError, match=r"encoder\.0\.linear \(matched by .* is inside of encoder\.0"
    ):
        matching(Shared(), ["encoder.0", "decoder.0.linear"], "here")


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["block.*"], "here: no module matches 'block.*'; nearest: blocks"),
        (["heads"], "here: no module matches 'heads'; nearest: head"),
        (["Blocks.one"], "here: no module matches 'Blocks.one'; nearest: blocks.one"),
        (["head", "zzz"], "here: no module matches 'zzz'; nearest: embed, blocks, blocks.one"),
        ([""], "here: no module matches ''"),
        (["blocks"], "here: blocks is a ModuleDict, which is never called; name its members"),
        (["*"], "here: blocks is a ModuleDict"),
        (
            ["blocks.*", "*.0"],
            "here: blocks.other.0 (matched by '*.0') is inside of blocks.other (matched by ",
        ),
    ],
)
def test_invalid_patterns_are_refused(patterns: list[str], said: str) -> None:
    with pytest.raises(StrategyError) as told:
        matching(NAMED, patterns, "here")
    assert str(told.value).startswith(said)
