"""torch.compile under data parallelism: slipstream's compiled blocks beside compiled DDP.

    python -m benchmarks.compiled --model bert --json benchmarks/results/compiled-bert.json

All variants train the same model side by side in one run, an iteration each in turn (exchange.py).
"no exchange" is one replica by itself: what the exchange adds to it is exposed, and what it hides
of its wire time is the hidden share. Graphs and graph breaks are those that torch counts while a
variant runs first. DDP is compiled in both ways that its documentation names, around and inside.
Models with convolutions also run with channels last, as torch recommends it for DDP, too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.baselines import wrapped_in_ddp
from benchmarks.cases import (
    MODELS,
    Case,
    as_ranks,
    head_of,
    share_cores,
    timed_iterations,
    wire_seconds,
)
from benchmarks.iteration import Iterate, accelerated, plain, quartiles
from benchmarks.record import arguments, finish
from benchmarks.turns import joined_ranks
from slipstream.fusion import compile_blocks


def with_compiled_blocks(model: nn.Module) -> nn.Module:
    """The model itself."""
    compile_blocks(model)
    return model


def compiled_ddp(model: nn.Module, megabytes: float) -> Any:
    """DDP cuts the graph at its buckets, which it must not know beforehand."""
    return torch.compile(wrapped_in_ddp(model, megabytes, static_graph=False))


def ddp_of_blocks(model: nn.Module, megabytes: float) -> nn.Module:
    """DDP of what slipstream compiles."""
    return wrapped_in_ddp(with_compiled_blocks(model), megabytes)


def channels_last(model: nn.Module) -> Any:
    """Weights in that order, as torch does it."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


CHANNELS_LAST = ", channels last"


def variants_of(args: argparse.Namespace, case: Case) -> dict[str, Callable[[], Iterate]]:
    """Every variant by its label, to be built; those with " (compiled)" are."""

    def alone(*changes: Callable[[Any], Any]) -> Callable[[], Iterate]:
        def build() -> Iterate:
            model, loss_of = case.make()
            prepared: Any = model
            for change in changes:
                prepared = change(prepared)
            return plain(prepared, loss_of)

        return build

    def ours(**compute: bool) -> Callable[[], Iterate]:
        return lambda: accelerated(*case.make(), {"compute": compute})[0]

    found = {
        "no exchange": alone(nn.Module.train),
        "no exchange (compiled)": alone(with_compiled_blocks),
    }
    convolves = has_convolutions(case)
    sizes = args.ddp
    if sizes is None:  # as many models as the memory holds
        sizes = [4] if convolves else [4, 25]
    for megabytes in sizes:
        size = f"{megabytes:g} MB"
        found[f"DDP, {size}"] = alone(partial(wrapped_in_ddp, megabytes=megabytes))
        found[f"torch.compile(DDP), {size} (compiled)"] = alone(
            partial(compiled_ddp, megabytes=megabytes)
        )
        found[f"DDP(compiled blocks), {size} (compiled)"] = alone(
            partial(ddp_of_blocks, megabytes=megabytes)
        )
        if convolves:
            found[f"torch.compile(DDP){CHANNELS_LAST}, {size} (compiled)"] = alone(
                channels_last, partial(compiled_ddp, megabytes=megabytes)
            )
            found[f"DDP(compiled blocks){CHANNELS_LAST}, {size} (compiled)"] = alone(
                channels_last, partial(ddp_of_blocks, megabytes=megabytes)
            )
    found |= {"slipstream": ours(), "slipstream (compiled)": ours(compile=True)}
    if convolves:
        found |= {
            f"no exchange{CHANNELS_LAST}": alone(channels_last),
            f"no exchange{CHANNELS_LAST} (compiled)": alone(channels_last, with_compiled_blocks),
            f"slipstream{CHANNELS_LAST}": ours(channels_last=True),
            f"slipstream{CHANNELS_LAST} (compiled)": ours(channels_last=True, compile=True),
        }
    return found


def has_convolutions(case: Case) -> bool:
    """Whether the model has any."""
    return any(isinstance(layer, nn.Conv2d) for layer in case.make()[0].modules())


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the rows."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share_cores(rank, world)
    case = Case(args.model, None)
    with joined_ranks():
        variants: dict[str, Iterate] = {}
        counted: dict[str, tuple[int, int]] = {}
        for label, build in variants_of(args, case).items():
            counters.clear()
            variants[label] = build()
            for _ in range(3):  # compilations, and DDP's second layout
                variants[label]()
            breaks = sum(counters["graph_break"].values())
            counted[label] = counters["stats"]["unique_graphs"], breaks
        seconds, _ = timed_iterations(variants, args.rounds, args.warmup)
        if rank == 0:
            wire = wire_seconds(args, case.num_bytes, world)
            write(args, case, rows(seconds, counted, wire), wire)


def rows(
    seconds: Mapping[str, Sequence[float]], counted: Mapping[str, tuple[int, int]], wire: float
) -> list[dict[str, Any]]:
    """Of every variant; exposed against the replica that computes as it does."""
    medians = {name: quartiles(spent)[1] for name, spent in seconds.items()}
    found = []
    for name, spent in seconds.items():
        alone = "no exchange" + CHANNELS_LAST * (CHANNELS_LAST in name)
        alone += " (compiled)" * name.endswith("(compiled)")
        exposed = medians[name] - medians[alone]
        graphs, breaks = counted[name]
        found.append(
            {
                "name": name,
                "seconds": quartiles(spent),
                "exposed": exposed,
                "hidden": 1 - exposed / wire if wire and name != alone else None,
                "graphs": graphs,
                "breaks": breaks,
            }
        )
    return found


def write(
    args: argparse.Namespace, case: Case, found: Sequence[Mapping[str, Any]], wire: float
) -> None:
    """Print the rows; with --json write them too."""
    finish(args.json, "compiled", {**head_of(args, case), "wire": wire, "rows": found})


def main() -> int:
    """Start the ranks, or be one."""
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="bert")
    parser.add_argument("--ddp", nargs="*", type=float, help="DDP's buckets; default: 4 25, or 4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--loopback", action="store_true", help="without emulated links")
    return as_ranks(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
