"""What recomputation saves and what it costs.

    python benchmarks/recompute.py batch                 # BERT-Large: batch at equal memory
    python benchmarks/recompute.py time --model bert     # seconds of an iteration, taking turns

``batch`` counts every storage that a forward of one sample keeps for backward. With ``every: 1``
the activations of one block at a time come on top while it is computed again.

``time`` compares, in turns: everything kept, torch's checkpoint around every block, every block by
slipstream, groups of sqrt(n) blocks, and budgets that may hold no more than the last two do, as
``budget.peak_bytes`` counts what blocks hold at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import isqrt
from typing import Any

import torch
from iteration import Iterate, plain, quartiles
from rich.progress import track
from tables import save
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

from slipstream.memory import recompute
from slipstream.memory.blocks import blocks_of
from slipstream.memory.recompute.budget import peak_bytes, segments
from slipstream.memory.recompute.measure import saved_storages, storages_of
from slipstream.strategy import Memory

Batch = dict[str, torch.Tensor]


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
    return Memory.model_validate({"recompute": recompute}).recompute


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


def times(name: str, runs: int) -> dict[str, Any]:
    """Seconds of an iteration of each contender, taking turns, and what its blocks hold."""
    build, make = MODELS[name]
    batch = make()

    def made(install: Callable[[nn.Module], Any]) -> tuple[Iterate, Any]:
        torch.manual_seed(0)
        model = build()
        installed = install(model)
        iterate = plain(model, partial(loss_of, batch))
        for _ in range(2):
            iterate()
        return iterate, installed

    def with_settings(**settings: Any) -> tuple[Iterate, Any]:
        return made(lambda model: recompute(model, config_of(settings)))

    _, measured = with_settings(budget=1.0)
    costs = measured.prediction.costs
    root = isqrt(len(costs))
    grouped, square = with_settings(every=root)
    single = segments(len(costs), 1)
    bytes_of = {
        "everything kept": peak_bytes(tuple(range(len(costs))), costs),
        "torch's checkpoint, every block": peak_bytes(single, costs),
        "every block": peak_bytes(single, costs),
        f"every {root} (sqrt n)": peak_bytes(square.parts, costs),
    }
    turns = {
        "everything kept": made(lambda model: None)[0],
        "torch's checkpoint, every block": made(by_torch)[0],
        "every block": with_settings(every=1)[0],
        f"every {root} (sqrt n)": grouped,
    }
    for rival in ("every block", f"every {root} (sqrt n)"):
        way = f"budget, no more than {rival}"
        turns[way], installed = with_settings(budget_bytes=bytes_of[rival])
        bytes_of[way] = peak_bytes(installed.parts, costs)
    for share in (0.25, 0.5, 0.75):
        way = f"budget {share}"
        turns[way], installed = with_settings(budget=share)
        bytes_of[way] = peak_bytes(installed.parts, costs)
    seconds: dict[str, list[float]] = {way: [] for way in turns}
    for _ in track(range(runs), name):
        for way, iterate in turns.items():
            start = time.perf_counter()
            iterate()
            seconds[way].append(time.perf_counter() - start)
    whole = statistics.median(seconds["everything kept"])
    rows = [
        {
            "way": way,
            "bytes": bytes_of[way],
            "seconds": quartiles(seconds[way]),
            "ratio": statistics.median(seconds[way]) / whole,
        }
        for way in turns
    ]
    return {"model": name, "blocks": len(costs), "runs": runs, "rows": rows}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["batch", "time"])
    parser.add_argument("--model", choices=list(MODELS), default="bert")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if args.what == "batch":
        entry: dict[str, Any] = {"batch": batches()}
    else:
        entry = times(args.model, args.runs)
    print(json.dumps(entry, indent=1))
    if args.json:
        save(args.json, "recompute", entry)


if __name__ == "__main__":
    main()
