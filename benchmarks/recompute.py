"""What recomputation saves and what it costs.

    python benchmarks/recompute.py batch                 # BERT-Large: batch at equal memory
    python benchmarks/recompute.py time --model bert     # seconds of an iteration, taking turns

``batch`` counts every storage that a forward of one sample keeps for backward. With ``every: 1``
the activations of one block at a time come on top while it is computed again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from iteration import Iterate, plain
from tables import save
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    SwinConfig,
    SwinForImageClassification,
)

from slipstream.memory import recompute
from slipstream.memory.measure import Saved
from slipstream.strategy import Memory

WISHES: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "every block": {"every": 1},
    "every 3": {"every": 3},
    "selective": {"every": 1, "keep": ["matmul", "convolution", "attention"]},
    "budget 0.75": {"budget": 0.75},
    "budget 0.5": {"budget": 0.5},
    "budget 0.25": {"budget": 0.25},
}

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
    with Saved([*model.parameters(), *model.buffers(), *batch.values()]) as saved:
        loss = model(**batch).loss
    found = saved.num_bytes
    del loss
    return found


def loss_of(batch: Batch, model: nn.Module) -> torch.Tensor:
    """As transformers compute it."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def wish_of(name: str) -> Any:
    """The settings of a contender."""
    return Memory.model_validate({"recompute": WISHES[name]}).recompute


def batches() -> dict[str, Any]:
    """Bytes of a sample of BERT-Large at 512 words, and the batch at equal memory."""
    torch.manual_seed(0)
    model: Any = bert(1024, 24, 16)
    one = words(30000, 1, 512)
    every = kept_bytes(model, one)
    block = model.bert.encoder.layer[0]
    hidden = torch.randn(1, 512, 1024, requires_grad=True)
    with Saved([*block.parameters(), hidden]) as saved:
        output = block(hidden)
    one_block = saved.num_bytes
    del output
    recomputed = recompute(model, wish_of("every block"))
    kept = kept_bytes(model, one)
    recomputed.close()
    return {
        "plain_bytes": every,
        "kept_bytes": kept,
        "block_bytes": one_block,
        "ratio": every / kept,
        "ratio_with_a_block": every / (kept + one_block),
    }


def times(name: str, runs: int) -> list[dict[str, Any]]:
    """Seconds of an iteration of each contender, taking turns, and what a forward keeps."""
    build, make = MODELS[name]
    batch, turns = make(), dict[str, Iterate]()
    rows: list[dict[str, Any]] = []
    for wish in WISHES:
        torch.manual_seed(0)
        model = build()
        recomputed = recompute(model, wish_of(wish)) if WISHES[wish] else None
        iterate = plain(model, partial(loss_of, batch))
        for _ in range(2):
            iterate()
        turns[wish] = iterate
        found = recomputed.prediction if recomputed is not None else None
        rows.append(
            {
                "wish": wish,
                # torch keeps selected results past the hooks that count
                "bytes": None if wish == "selective" else kept_bytes(model, batch),
                "predicted_ratio": found.seconds / found.plain_seconds if found else None,
            }
        )
    seconds: dict[str, list[float]] = {wish: [] for wish in WISHES}
    for _ in range(runs):
        for wish, iterate in turns.items():
            start = time.perf_counter()
            iterate()
            seconds[wish].append(time.perf_counter() - start)
    for row in rows:
        row["seconds"] = statistics.median(seconds[row["wish"]])
        row["ratio"] = row["seconds"] / statistics.median(seconds["none"])
    return rows


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["batch", "time"])
    parser.add_argument("--model", choices=list(MODELS), default="bert")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if args.what == "batch":
        facts: dict[str, Any] = {"batch": batches()}
    else:
        facts = {"model": args.model, "rows": times(args.model, args.runs)}
    print(json.dumps(facts, indent=1))
    if args.json:
        save(args.json, "recompute", facts)


if __name__ == "__main__":
    main()
