"""What recomputation and offload save of memory, and what they cost in time.

    python -m benchmarks.offload --json benchmarks/results/offload.json

Three parts, each with torch's own means beside ours:

- bytes: BERT-Large, 512 tokens, eager attention: what an iteration takes for each sample, as
  estimated from shapes and as measured (the peak of the process's memory in forward and backward,
  gradients allocated before), and the batch that follows for 32 GiB;
- time: a smaller BERT on the CPU, all variants in turn on one model: seconds an iteration and the
  measured peak. Here ours offload to disk; torch's ``save_on_cpu`` moves nothing where all is on
  the CPU, so the hooks of torch's tutorial, which write each saved tensor to a file, stand beside
  it. What was written may still lie in the system's cache of files: that peak is measured, too;
- cuda: BERT-Large on a GPU limited to 32 GiB: the largest batch of each variant, and sequences a
  second with it. Left out where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from benchmarks.activations import bert, inputs, variants
from benchmarks.iteration import quartiles
from benchmarks.peak_memory import Growth, growth, growth_apart
from benchmarks.record import finish
from slipstream.memory import estimate, max_batch
from slipstream.memory.forward_override import ForwardOverride
from slipstream.strategy import OffloadConfig

LIMIT = 32 * 2**30
LARGE = (1024, 24, 16, 512)
SMALL = (512, 8, 8, 256)
SMALL_BATCH = 8

OURS = ("keep all", "recompute", "recompute + offload")


# Bytes


def peak_of(name: str, shape: tuple[int, int, int, int], batch: int) -> Growth:
    """By how much this process grows in the second forward and backward of this size."""
    model, given = bert(*shape), inputs(shape[-1], "cpu", batch)
    with variants(OffloadConfig(to="disk"))[name](model, given):
        model(**given).loss.backward()
        return growth(lambda: model(**given).loss.backward())


def count_bytes() -> dict[str, Any]:
    """BERT-Large: estimated and measured bytes of a sample, and the batch in 32 GiB."""
    with torch.device("meta"):
        model = bert(*LARGE)
    found = estimate(
        model, partial(inputs, LARGE[-1], "meta"), torch.optim.AdamW(model.parameters())
    )
    blocks = [[path] for path in found.blocks]
    ways: dict[str, tuple[Any, OffloadConfig | None]] = {
        "keep all": ((), None), "recompute": (blocks, None),
        "recompute + offload": (blocks, OffloadConfig()),
    }  # fmt: skip
    rows = []
    for name in track(OURS, "bytes", console=Console(stderr=True)):
        one, two = (growth_apart([name, LARGE, batch]).process for batch in (1, 2))
        saved = found.activations(*ways[name])
        rows.append(
            {
                "name": name,
                "saved_each": saved.each,
                "estimated_batch": found.max_batch(LIMIT, *ways[name]),
                "peaks": [one, two],
                "measured_each": two - one,
                "measured_batch": int((LIMIT - found.state - (2 * one - two)) // (two - one)),
            }
        )
    return {"limit": LIMIT, "state": found.state, "rows": rows}


# Time on the CPU


def measure_time(rounds: int) -> dict[str, Any]:
    """Seconds an iteration of every variant in turn on one model, and the peak of each."""
    model = bert(*SMALL)
    given = inputs(SMALL[-1], "cpu", SMALL_BATCH)
    every = variants(OffloadConfig(to="disk"))
    del every["torch: checkpoint + save_on_cpu"]  # nothing is copied from CPU to CPU
    seconds: dict[str, list[float]] = {name: [] for name in every}
    shuffle = random.Random(0)
    for turn in track(range(1 + rounds), "time", console=Console(stderr=True)):
        for name in shuffle.sample(list(every), len(every)):
            with every[name](model, given):
                model(**given).loss.backward()  # as each starts anew
                start = time.perf_counter()
                model(**given).loss.backward()
                spent = time.perf_counter() - start
            if turn:
                seconds[name].append(spent)
    first = seconds["keep all"]
    rows = []
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        peak = growth_apart([name, SMALL, SMALL_BATCH])
        rows.append(
            {
                "name": name,
                "seconds": quartiles(values),
                "ratio": quartiles(ratios),
                "peak": peak.process,
                "peak_with_files": peak.with_files,
            }
        )
    return {"shape": SMALL, "batch": SMALL_BATCH, "rounds": rounds, "rows": rows}


# Batch and time on a GPU


def measure_cuda(rounds: int) -> dict[str, Any] | None:
    """The largest batch in 32 GiB of every variant, and sequences a second with it."""
    if not torch.cuda.is_available():
        print("cuda: no GPU here, so this part is left out", file=sys.stderr)
        return None
    device = torch.device("cuda")
    model = bert(*LARGE).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    given = partial(inputs, LARGE[-1], "cuda")
    rows = []
    whole = torch.cuda.get_device_properties(device).total_memory
    amp = partial(torch.autocast, "cuda", torch.bfloat16)
    around = ForwardOverride(model, lambda forward, *args, **kwargs: _under(amp(), forward, kwargs))
    every = variants(OffloadConfig())
    del every["torch: save_on_cpu"]  # would take all of the host's memory
    del every["torch: saved tensors to files"], every["recompute, budget of as much"]
    for name, install in every.items():
        with install(model, {}):
            batch = max_batch(model, given, optimizer, memory_bytes=LIMIT, most=2**12)
            torch.cuda.set_per_process_memory_fraction(min(LIMIT / whole, 1.0), device)
            seconds = [_timed(model, optimizer, given(batch)) for _ in range(2 + rounds)][2:]
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        low, median, high = quartiles([batch / value for value in seconds])
        rows.append({"name": name, "batch": batch, "speed": [low, median, high]})
        optimizer.state.clear()
        torch.cuda.empty_cache()
    around.remove()
    return {"gpu": torch.cuda.get_device_name(), "limit": LIMIT, "rounds": rounds, "rows": rows}


def _under(context: Any, forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    with context:
        return forward(**kwargs)


def _timed(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Mapping[str, torch.Tensor]
) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    model(**given).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return time.perf_counter() - start


# For people


def main() -> None:
    """Measure what is asked for, or be the process whose peak is measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=["bytes", "time", "cuda"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        name, shape, batch = json.loads(args.peak)
        print(*peak_of(name, tuple(shape), batch))
        return
    measures: dict[str, Callable[[], dict[str, Any] | None]] = {
        "bytes": count_bytes,
        "time": lambda: measure_time(args.rounds),
        "cuda": lambda: measure_cuda(args.rounds),
    }
    entry = {part: measures[part]() for part in args.parts}
    finish(args.json, "offload", entry)


if __name__ == "__main__":
    main()
