"""Measured bubbles of a pipeline on two ranks, beside the formula of each schedule.

    python -m benchmarks.bubbles --json benchmarks/results/bubbles.json

GPT-2 is split where `balance` says, on two ranks of one thread over loopback. Micro-batches have
the same size in all rows, so more of them make a larger batch. The formulas assume stages of equal
time and sends that take no time. One process runs the same micro-batches for comparison.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.cases import as_ranks
from benchmarks.iteration import quartiles
from benchmarks.record import finish
from benchmarks.turns import joined_ranks
from slipstream.parallel import Pipeline, balance, ideal_bubble, measured_bubble
from slipstream.parallel.pipeline.schedules import ScheduleName
from slipstream.trace.event import ITERATION
from slipstream.trace.recorder import Recorder

SCHEDULES: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
]
"""Pairs of a schedule and its stages a rank."""

WARMUP = 2


def gpt2(args: argparse.Namespace) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    off: dict[str, Any] = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
    }
    off |= {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(
        n_layer=args.layers,
        n_embd=args.width,
        n_head=args.width // 64,
        vocab_size=args.vocabulary,
        n_positions=args.length,
        **off,
    )
    return GPT2LMHeadModel(config)


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


def words(args: argparse.Namespace, parts: int) -> torch.Tensor:
    """A batch of ``parts`` micro-batches."""
    generator = torch.Generator().manual_seed(0)
    shape = (parts * args.samples, args.length + 1)
    return torch.randint(args.vocabulary, shape, generator=generator)


def pipelined(args: argparse.Namespace, schedule: ScheduleName, stages: int, parts: int) -> Any:
    """Bubbles by rank and seconds of a step, on rank 0."""
    model, batch = gpt2(args), words(args, parts)
    ranks = dist.get_world_size()
    cut = balance(model, (batch[: args.samples, :-1],), ranks * stages)
    recorder = Recorder(dist.get_rank(), first_step=WARMUP, num_steps=args.steps)
    pipeline = Pipeline(model, cut=cut, schedule=schedule, micro_batches=parts, recorder=recorder)
    for step in range(WARMUP + args.steps):
        dist.barrier()
        recorder.begin_step(step)
        pipeline.forward_backward(loss_fn, (batch[:, :-1],), target=batch[:, 1:])
        recorder.end_step()
        model.zero_grad()
    pipeline.close()
    trace = recorder.gather()
    if trace is None:
        return None
    seconds = [e.duration for e in trace.events if e.name == ITERATION and e.rank == 0]
    bubbles = measured_bubble(trace.events)
    return {
        "schedule": schedule,
        "stages_per_rank": stages,
        "micro_batches": parts,
        "cut": cut,
        "bubble": list(bubbles.values()),
        "ideal": ideal_bubble(schedule, ranks, parts, stages),
        "seconds": quartiles(seconds),
    }


def alone(args: argparse.Namespace, parts: int) -> float:
    """Seconds of a step of the whole model on this process."""
    model, batch = gpt2(args), words(args, parts)
    seconds = []
    for step in range(WARMUP + args.steps):
        start = time.perf_counter()
        for part in batch.chunk(parts):
            (loss_fn(model(part[:, :-1]), part[:, 1:]) / parts).backward()
        if step >= WARMUP:
            seconds.append(time.perf_counter() - start)
        model.zero_grad()
    return median(seconds)


@joined_ranks()
def measure(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 prints and saves."""
    first = dist.get_rank() == 0
    rows = []
    console = Console(stderr=True, quiet=not first)
    for parts in track(args.micro_batches, "micro-batches", console=console):
        whole = alone(args, parts) if first else 0.0
        dist.barrier()
        for schedule, stages in SCHEDULES:
            row = pipelined(args, schedule, stages, parts)
            if row is not None:
                rows.append({**row, "one_process_s": whole})
    if first:
        sizes = {k: v for k, v in vars(args).items() if k not in ("json", "micro_batches")}
        finish(args.json, "bubbles", {"ranks": dist.get_world_size(), **sizes, "rows": rows})


def main() -> int:
    """Start the ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--samples", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=64, help="words of a sample")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", help="also write the figures to this file")
    return as_ranks(measure, parser.parse_args(), ranks=2, keep_memory=False)


if __name__ == "__main__":
    sys.exit(main())
