"""What recomputation saves and what it costs.

    python -m benchmarks.recompute batch                 # BERT-Large: batch at equal memory
    python -m benchmarks.recompute time --model bert     # seconds of an iteration, taking turns

``batch`` counts every storage that a forward of one sample keeps for backward. With ``every: 1``
the activations of one block at a time come on top while it is computed again.

``time`` compares, in turns: everything kept, torch's checkpoint around every block, every block by
slipstream, groups of sqrt(n) blocks, and budgets that may hold no more than the last two do. Memory
is what the process grows by in forward and backward, measured in a process for each way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from math import isqrt
from typing import Any

import torch
from rich.progress import track
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    SwinConfig,
    SwinForImageClassification,
)

from benchmarks.iteration import Iterate, plain, quartiles
from benchmarks.peak_memory import growth, growth_apart
from benchmarks.record import finish
from benchmarks.turns import seconds_of, take_turns
from slipstream.memory import recompute
from slipstream.memory.blocks import blocks_of
from slipstream.memory.recompute.budget import peak_bytes, segments
from slipstream.memory.recompute.measure import saved_storages, storages_of
from slipstream.strategy import MemoryConfig

Batch = dict[str, torch.Tensor]
Settings = dict[str, Any] | str | None
KEPT, TORCHS = "everything kept", "torch's checkpoint, every block"


def words(vocabulary: int, batch: int, length: int) -> Batch:
    """Random words that are their own labels."""
    found = torch.randint(vocabulary, (batch, length))
    return {"input_ids": found, "labels": found}


def bert(hidden: int, layers: int, heads: int) -> nn.Module:
    """BERT with eager attention and dropout."""
    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
    )
    config._attn_implementation = "eager"
    model: nn.Module = BertForMaskedLM(config)
    return model.train()


def gpt2() -> nn.Module:
    """A smaller GPT-2."""
    config = GPT2Config(use_cache=False, n_embd=256, n_layer=8, n_head=4, vocab_size=4000)
    model: nn.Module = GPT2LMHeadModel(config)
    return model.train()


def swin() -> nn.Module:
    """Blocks of four sizes."""
    model: nn.Module = SwinForImageClassification(SwinConfig(embed_dim=48, image_size=224))
    return model.train()


def images(batch: int) -> Batch:
    """Random images of class 0."""
    return {
        "pixel_values": torch.randn(batch, 3, 224, 224),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "bert": (partial(bert, 256, 6, 4), partial(words, 30000, 4, 256)),
    "gpt2": (gpt2, partial(words, 4000, 4, 256)),
    "swin": (swin, partial(images, 2)),
}


def kept_bytes(model: nn.Module, batch: Batch) -> int:
    """What a forward keeps for backward, without parameters."""
    return saved_bytes(model, batch, [*model.buffers(), *batch.values()])


def saved_bytes(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], ignored: list[torch.Tensor]
) -> int:
    """Bytes that a forward of a module saves, without its parameters and what is ignored."""
    output, storages = saved_storages(lambda: module(**inputs))
    own = storages_of([*module.parameters(), *ignored])
    found = sum(size for address, size in storages.items() if address not in own)
    del output  # the graph, which kept the addresses unique
    return found


def loss_of(batch: Batch, model: nn.Module) -> torch.Tensor:
    """As transformers compute it."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def config_of(recompute: Mapping[str, Any]) -> Any:
    """The settings of a contender."""
    return MemoryConfig.model_validate({"recompute": recompute}).recompute


def by_torch(model: nn.Module) -> None:
    """Torch's checkpoint around every block."""
    for path in blocks_of(model):
        block = model.get_submodule(path)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def batches() -> dict[str, Any]:
    """Bytes of a sample of BERT-Large at 512 words, and the batch at equal memory."""
    torch.manual_seed(0)
    model: Any = bert(1024, 24, 16)
    one = words(30000, 1, 512)
    every = kept_bytes(model, one)
    block = model.bert.encoder.layer[0]
    hidden = torch.randn(1, 512, 1024, requires_grad=True)
    one_block = saved_bytes(block, {"hidden_states": hidden}, [hidden])
    recomputed = recompute(model, config_of({"every": 1}))
    kept = kept_bytes(model, one)
    recomputed.close()
    return {
        "plain_bytes": every,
        "kept_bytes": kept,
        "block_bytes": one_block,
        "ratio": every / kept,
        "ratio_with_a_block": every / (kept + one_block),
    }


def installed(model: nn.Module, settings: Settings) -> Any:
    """What keeps or recomputes activations as ``settings`` say: None keeps them all, ``TORCHS`` is
    torch's checkpoint, anything else is a strategy's."""
    if isinstance(settings, str):
        by_torch(model)
    elif settings is not None:
        return recompute(model, config_of(settings))
    return None


def iteration(name: str, settings: Settings) -> tuple[Iterate, Any]:
    """An iteration of a model that is past its first ones, and what is installed on it."""
    build, make = MODELS[name]
    torch.manual_seed(0)
    model, batch = build(), make()
    way = installed(model, settings)
    iterate = plain(model, partial(loss_of, batch))
    for _ in range(2):
        iterate()
    return iterate, way


def ways(name: str) -> dict[str, Settings]:
    """All that take turns; budgets hold no more than their rivals by what blocks were measured to
    hold."""
    _, measured = iteration(name, {"budget": 1.0})
    costs = measured.prediction.costs
    root = isqrt(len(costs))
    _, grouped = iteration(name, {"every": root})
    rivals = {"every block": segments(len(costs), 1), f"every {root} (sqrt n)": grouped.parts}
    found: dict[str, Settings] = {
        KEPT: None,
        TORCHS: TORCHS,
        "every block": {"every": 1},
        f"every {root} (sqrt n)": {"every": root},
    }
    for rival, parts in rivals.items():
        found[f"budget, no more than {rival}"] = {"budget_bytes": peak_bytes(parts, costs)}
    return found | {f"budget {share}": {"budget": share} for share in (0.25, 0.5, 0.75)}


def _turn(turns: Mapping[str, Callable[[], object]], way: str) -> float:
    return seconds_of(turns[way])


def times(name: str, runs: int) -> dict[str, Any]:
    """Seconds of an iteration of each way, taking turns in random order, and its peak."""
    settings = ways(name)
    turns = {way: iteration(name, chosen)[0] for way, chosen in settings.items()}
    seconds = take_turns([*turns], partial(_turn, turns), runs, 0, name)
    del turns

    def against(way: str, rival: str) -> tuple[float, float, float]:
        pairs = zip(seconds[way], seconds[rival], strict=True)
        return quartiles([mine / theirs for mine, theirs in pairs])

    rows = [
        {
            "way": way,
            "peak": growth_apart([name, settings[way]]).process,
            "seconds": quartiles(seconds[way]),
            "ratio": against(way, KEPT),
            "to_torch": against(way, TORCHS),
        }
        for way in track(settings, "memory")
    ]
    return {"model": name, "runs": runs, "rows": rows}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["batch", "time"], nargs="?", default="time")
    parser.add_argument("--model", choices=list(MODELS), default="bert")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(*growth(iteration(*json.loads(args.peak))[0]))
        return
    if args.what == "batch":
        entry: dict[str, Any] = {"batch": batches()}
    else:
        entry = times(args.model, args.runs)
    finish(args.json, "recompute", entry)


if __name__ == "__main__":
    main()
