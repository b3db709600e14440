"""Updates that go wrong without an error: found within two checks, and named?

    python -m benchmarks.wrong_updates exchanges --runs 20 --json wrong-updates-exchanges.json

Two models train on three ranks, or on four of two emulated hosts. After some updates a fault is
seeded at a random place: another rank, tensor, value and bit in each run, another transport by
turns. Counted are the runs in which all ranks end, or warn where it may be meant, within two
checks, and those of them that name the right rank, segment, tensor or setting. The same models
train without a fault, too: there must be no alarm.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

import slipstream
from benchmarks.record import finish
from tests.checks.seeded import ALIKE_UNDER_SHARDED, EVERY, FAULTS, Made, is_found, seeded
from tests.harness.ranks import Ranks

SPLIT = {"kind": "by_bytes", "megabytes": 0.02, "first_megabytes": 0.02, "last_megabytes": 0.02}
"""Several segments, though the models are small."""
TRANSPORTS = ("flat", "direct", "sharded")
FEEDING_BACK: tuple[dict[str, Any], ...] = (
    {"kind": "int8", "error_feedback": True},
    {"kind": "onebit", "start_step": 0},
    {"kind": "powersgd", "rank": 1, "start_step": 0},
)
PARTS = {
    "exchanges": (
        "segment lost once: own gradients", "segment lost from then on: own gradients",
        "segment lost from then on: zeros sent", "rank skipped in its host",
        "average divided twice", "average divided by the script",
    ),
    "residual": ("residual lost",),
    "ranks": (
        "stale buffer", "drifted statistics", "another learning rate", "same data",
        "optimizer stepped twice", "moments lost", "sign flipped", "exponent flipped",
        "mantissa flipped", "parameter replaced", "parameter added",
    ),
    "none": (),
}  # fmt: skip
"""Faults by their result; without a fault there must be no alarm."""
WORDS, LENGTH = 64, 16
ALARMS_EVERY = 10


def language_model() -> Made:
    """A GPT-2 with tied embeddings, layer norms, dropout, and a buffer that each forward writes."""
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    norm = model.transformer.ln_f
    norm.register_buffer("running_mean", torch.zeros(32))

    def average(module: nn.Module, args: object, output: torch.Tensor) -> None:
        mean = output.detach().flatten(0, -2).mean(0)
        norm.get_buffer("running_mean").lerp_(mean, 0.1)

    norm.register_forward_hook(average)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]

    def loss(trained: nn.Module, update: int, stream: int) -> torch.Tensor:
        tokens = torch.randint(WORDS, (2, LENGTH), generator=seed_of(update, stream))
        found: torch.Tensor = trained(input_ids=tokens, labels=tokens).loss
        return found

    return model, torch.optim.AdamW(groups, lr=1e-3), loss


def resnet() -> Made:
    """Two stages with batch norm."""
    config = ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    config.num_labels = 10
    model = ResNetForImageClassification(config)

    def loss(trained: nn.Module, update: int, stream: int) -> torch.Tensor:
        generator = seed_of(update, stream)
        images = torch.randn(4, 1, 16, 16, generator=generator)
        labels = torch.randint(10, (4,), generator=generator)
        return nn.functional.cross_entropy(trained(pixel_values=images).logits, labels)

    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), loss


def seed_of(update: int, stream: int) -> torch.Generator:
    """The random numbers of a batch."""
    return torch.Generator().manual_seed(1000 * update + stream)


MODELS: dict[str, Callable[[], Made]] = {"GPT-2, AdamW": language_model, "ResNet, SGD": resnet}


@dataclass(frozen=True)
class Row:
    """One fault in one model."""

    fault: str
    model: str
    transports: tuple[str, ...]
    runs: int
    found: int
    named: int
    median: float
    most: int


def gradients_of(fault: str, run: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings of a run, and the transports that take turns."""
    if fault == "rank skipped in its host":
        return {"split": SPLIT, "transport": "hierarchical"}, ("hierarchical",)
    transports = TRANSPORTS[: -1 if fault in ALIKE_UNDER_SHARDED else None]
    codec = None
    if fault == "residual lost":
        turn, run = divmod(run, len(transports))
        codec = FEEDING_BACK[turn % len(FEEDING_BACK)]
    transport = transports[run % len(transports)]
    return {"split": SPLIT, "transport": transport, "codec": codec}, transports


def measured(ranks: Ranks, fault: str, model: str, runs: int, console: Console) -> Row:
    """Seed a fault again and again; what was not found, or named wrongly, is shown."""
    found = named = 0
    updates: list[int] = []
    for run in track(range(runs), f"{fault}, {model}", console=console, transient=True):
        gradients, _ = gradients_of(fault, run)
        ended = ranks.run(seeded, MODELS[model], fault, run, gradients)
        seen = all(is_found(fault, outcome) for outcome in ended)
        right = seen and all(outcome.named for outcome in ended)
        found, named = found + seen, named + right
        updates += [max(outcome.updates for outcome in ended)] * seen
        if not right:
            console.print(f"{fault}, {model}, run {run}, {gradients}", style="red")
            for outcome in ended:
                console.print(f"{outcome.kind}: {outcome.said}", markup=False, highlight=False)
    middle, most = (median(updates), max(updates)) if updates else (0, 0)
    return Row(fault, model, gradients_of(fault, 0)[1], runs, found, named, middle, most)


def trained(make: Callable[[], Made], gradients: dict[str, Any], updates: int) -> list[str]:
    """Train without a fault; what was warned of on this rank."""
    torch.manual_seed(0)
    model, optimizer, loss = make()
    checks = {"every": ALARMS_EVERY}
    with (
        warnings.catch_warnings(record=True) as caught,
        slipstream.accelerate(
            model, optimizer, strategy={"gradients": gradients, "checks": checks}
        ) as session,
    ):
        warnings.simplefilter("always")
        torch.manual_seed(session.rank)
        for update in range(updates):
            session.backward(loss(session.model, update, session.rank))
            session.step()
    return [str(warning.message) for warning in caught]


def quiet_runs(ranks: Ranks, model: str, updates: int, console: Console) -> list[dict[str, object]]:
    """Train on each transport, dense and with codecs, without a fault; an alarm ends the run."""
    found = []
    settings = [(t, None) for t in TRANSPORTS] + [("flat", codec) for codec in FEEDING_BACK]
    for transport, codec in track(settings, f"no fault, {model}", console=console, transient=True):
        gradients = {"split": SPLIT, "transport": transport, "codec": codec}
        said = ranks.run(trained, MODELS[model], gradients, updates, timeout=3600)
        kind = codec["kind"] if codec else None
        warned = sorted({text for texts in said for text in texts})
        for text in warned:
            console.print(f"{model}, {transport}, {kind}: {text}", style="red")
        row = {"model": model, "transport": transport, "codec": kind}
        found.append({**row, "updates": updates, "warnings": len(warned)})
    return found


def main() -> int:
    """Seed every fault in every model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--runs", type=int, default=20, help="of each fault in each model")
    parser.add_argument("--updates", type=int, default=1000, help="of each run without a fault")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), help="of the part; all")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    console = Console(stderr=True)
    with Ranks(3) as three, Ranks(4) as four:
        rows = [
            measured(
                four if fault == "rank skipped in its host" else three,
                *(fault, model, args.runs, console),
            )
            for fault in args.faults or PARTS[args.part]
            for model in args.models
        ]
        quiet = [
            run
            for model in (args.models if args.part == "none" else ())
            for run in quiet_runs(three, model, args.updates, console)
        ]
    entry = {
        "part": args.part,
        "every": ALARMS_EVERY if args.part == "none" else EVERY,
        "rows": [asdict(row) for row in rows],
        "quiet": quiet,
    }
    finish(args.json, "wrong_updates", entry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
