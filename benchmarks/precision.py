"""What 16 bits do to a training: its result, and on this machine its speed.

    python -m benchmarks.precision --task digits --json results/precision-digits.json
    python -m benchmarks.precision --task text --json results/precision-text.json
    python -m benchmarks.precision --task speed --json results/precision-speed.json

Each precision trains the models of ``convergence.py`` from the same seeds on one process; what
counts is the mean over seeds on data that was held out: accuracy within 0.5 points, or a loss
within 2 %, of fp32. fp16 is emulated where the CPU has no instructions for it, which takes ten
times as long; its speed is not measured. Speeds are of one iteration of a BERT with all cores, in
turns, against torch's own autocast, too; on a machine with AMX the bar is 1.6 times fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from benchmarks.convergence import TASKS, picture, summary, train
from benchmarks.iteration import Iterate, accelerated, plain, quartiles
from benchmarks.record import finish
from benchmarks.turns import seconds_of, take_turns

FP16 = {"dtype": "fp16", "emulate": True}
PRECISIONS: dict[str, dict[str, object] | None] = {
    "fp32": None,
    "autocast bf16": {"kind": "autocast"},
    "autocast fp16": {"kind": "autocast", **FP16},
    "half_weights bf16": {"kind": "half_weights"},
    "half_weights fp16": {"kind": "half_weights", **FP16},
}
FAST = ["fp32", "autocast bf16", "half_weights bf16"]
PEER = "torch.autocast bf16"


def converge(args: argparse.Namespace) -> None:
    """Every precision from the same seeds."""
    task, runs = TASKS[args.task](), []
    plans = [(name, seed) for seed in range(args.seeds) for name in args.precisions]
    for name, seed in track(plans, args.task, console=Console(stderr=True)):
        runs.append(train(task, name, seed, args.steps, {"precision": PRECISIONS[name]}))
    rows = [row for name in PRECISIONS if (row := summary(args.task, name, "fp32", runs))]
    entry = {"task": args.task, "steps": args.steps, "seeds": args.seeds, "rows": rows}
    finish(args.json, "precision", {**entry, "runs": [asdict(run) for run in runs]})
    if args.json:
        drawn = picture(args.task, list(PRECISIONS), runs)
        drawn.savefig(Path(args.json).with_suffix(".png"))


def bert(args: argparse.Namespace) -> nn.Module:
    """A BERT of base width."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=8192, num_hidden_layers=args.layers)
    return BertForMaskedLM(config)


def variants(args: argparse.Namespace) -> dict[str, Iterate]:
    """One iteration of each, by name."""
    random = torch.Generator().manual_seed(0)
    words = torch.randint(1, 8192, (args.batch, args.length), generator=random)

    def loss_of(model: nn.Module) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=words, labels=words).loss
        return found

    def under_autocast(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model)

    found = {PEER: plain(bert(args), under_autocast)}
    for name in FAST:
        found[name], _ = accelerated(bert(args), loss_of, {"precision": PRECISIONS[name]})
    return found


def speed(args: argparse.Namespace) -> None:
    """Iterations in turns; warm-up left out."""
    every = variants(args)

    def turn(name: str) -> float:
        return seconds_of(every[name])

    seconds = take_turns([*every], turn, args.rounds, args.warmup, "speed")
    rows: list[dict[str, Any]] = []
    for name, own in seconds.items():
        ratios = [plain / mine for plain, mine in zip(seconds["fp32"], own, strict=True)]
        rows.append({"name": name, "seconds": median(own), "times": quartiles(ratios)})
    machine = {
        "instructions": instructions(),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in bert(args).parameters()),
    }
    shape = {k: getattr(args, k) for k in ("layers", "batch", "length", "rounds")}
    finish(args.json, "precision", {"task": "speed", **shape, **machine, "rows": rows})


def instructions() -> str:
    """What the processor has for bf16, in the words of its makers."""
    can: Mapping[str, object] = torch.cpu.get_capabilities()
    names = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16")
    return ", ".join(name for name in names if can.get(name)) or "neither bf16 nor fp16"


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=[*TASKS, "speed"], default="digits")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--layers", type=int, default=4, help="of the BERT whose speed is measured")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    speed(args) if args.task == "speed" else converge(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
