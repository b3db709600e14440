"""Cost of the differentiable operators beside the bare calls of torch.distributed.

    python -m benchmarks.operators --json benchmarks/results/operators.json

Four variants run in turn on two ranks over loopback: the bare calls that move the same data; these
in a minimal hand-written torch.autograd.Function; the operator in a group without ``check``, which
must meet the limit; and the operator with ``check``. A turn is several calls in a row: a single
call between two barriers finds its code in memory, not in the caches, and takes ten times as long.

The overhead of Python is also measured alone: in one process, with collectives that return at once.
There the forward pass is compared with the bare call, and both passes, which are two operators and
a run of autograd, with the hand-written function.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.cases import as_ranks
from benchmarks.iteration import quartiles
from benchmarks.operator_cases import Case, cases
from benchmarks.record import finish
from benchmarks.turns import joined_ranks, seconds_of, take_turns
from slipstream import comm
from slipstream.comm.graphs import current

Call = Callable[[], object]
SIZES = {"1 KB": 2**8, "16 KB": 2**12, "256 KB": 2**16, "1 MB": 2**18, "16 MB": 2**22}
BLOCK = 2**19
"""Elements that the calls of a turn move together; at most 10 calls."""
ROWS = 16
RANKS = 2
LIMITS = (1.05, 20e-6)
WARM = 5


class ByHand(torch.autograd.Function):
    """The minimal function that makes two bare calls differentiable, once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, case: Case) -> torch.Tensor:
        ctx.case = case
        y = case.forward(x)
        return x.new_empty(0) if y is None else y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.case.backward(gradient), None


def passes(
    case: Case, x: torch.Tensor, unchecked: comm.Group, checked: comm.Group | None
) -> dict[str, dict[str, Call]]:
    """The variants: of forward alone, and of forward and backward."""
    plain = x.detach()
    y = case.forward(plain)
    gradient = None if y is None else torch.ones_like(y)

    def bare() -> None:
        case.forward(plain)
        case.backward(gradient)

    def recorded() -> torch.Tensor:
        y: torch.Tensor = ByHand.apply(x, case)  # type: ignore[no-untyped-call]
        return y

    def by_hand() -> None:
        y = recorded()
        torch.autograd.backward(y, torch.zeros_like(y) if gradient is None else gradient)

    def ours(group: comm.Group) -> None:
        y = case.ours(x, group)
        if y is None:
            comm.backward()
        else:
            torch.autograd.backward(y, gradient)

    forward: dict[str, Call] = {
        "bare": lambda: case.forward(plain),
        "by hand": recorded,
        "ours": lambda: case.ours(x, unchecked),
    }
    both: dict[str, Call] = {"bare": bare, "by hand": by_hand, "ours": lambda: ours(unchecked)}
    if checked is not None:
        forward["checked"] = lambda: case.ours(x, checked)
        both["checked"] = lambda: ours(checked)
    return {"forward": forward, "forward, backward": both}


def python_alone(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of each call if collectives return at once, on the slower of two ranks."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        group = comm.group(check=False)
        x = torch.ones(ROWS, ROWS, requires_grad=True)
        for name, case in cases(x.detach()).items():
            if args.only not in name:
                continue
            for which, calls in passes(case, x, group, None).items():
                row = compared(calls, x, args.seconds / 5, 20)
                before = found.get((name, which))
                if before is None or excess(row, which) > excess(before, which):
                    within = excess(row, which) <= LIMITS[1]
                    found[name, which] = {**row, "within": within, "rank": rank}
        dist.destroy_process_group()
    return [{"operator": o, "size": "", "pass": which, **r} for (o, which), r in found.items()]


def excess(row: Mapping[str, Any], which: str) -> float:
    """Seconds that an operator takes above what it is compared with."""
    if which == "forward":
        return float(row["ours"][1] - row["bare"][1])
    return float(row["ours"][1] - row["by hand"][1]) / 2


def measure(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 prints and saves."""
    torch.set_num_threads(1)
    alone = python_alone(args) if os.environ["RANK"] == "0" else []
    with joined_ranks():
        groups = comm.group(check=False), comm.group()
        rows = []
        console = Console(stderr=True, quiet=dist.get_rank() != 0)
        for size in track(args.sizes, "sizes", console=console):
            count = SIZES[size]
            x = torch.ones(ROWS, count // ROWS, requires_grad=True)
            block = min(max(BLOCK // count, 1), 10)
            for name, case in cases(x.detach()).items():
                if args.only in name:
                    for which, calls in passes(case, x, *groups).items():
                        found = compared(calls, x, args.seconds, block)
                        rows.append({"operator": name, "size": size, "pass": which, **found})
        if dist.get_rank() == 0:
            finish(args.json, "operators", {"ranks": RANKS, "rows": rows, "alone": alone})


def compared(
    calls: Mapping[str, Call], x: torch.Tensor, budget: float, block: int
) -> dict[str, Any]:
    """Seconds of each call on the slowest rank, in turns: quartiles, and whether ours is within.

    Args:
        calls: by name.
        x: the input; its gradient is dropped after each call.
        budget: seconds for all turns together.
        block: calls in a row, in a turn.
    """

    def repeat(name: str) -> None:
        for _ in range(block):
            calls[name]()
            x.grad = None

    def turn(name: str) -> float:
        spent = seconds_of(partial(repeat, name)) / block
        current().take()  # drops operators whose backward does not run here
        return spent

    def within_budget(warmed_up: float) -> int:
        return max(round(budget * WARM / warmed_up), 2 * WARM)

    seconds = take_turns([*calls], turn, within_budget, WARM)
    found: dict[str, Any] = {name: quartiles(values) for name, values in seconds.items()}
    own, other = found["ours"][1], found["bare"][1]
    return {
        **found,
        "rounds": len(seconds["ours"]),
        "block": block,
        "within": own <= max(other * LIMITS[0], other + LIMITS[1]),
    }


def main() -> int:
    """Start the ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    parser.add_argument("--only", default="", help="operators with this in their name")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--json", help="also write the figures to this file")
    return as_ranks(measure, parser.parse_args(), ranks=RANKS, keep_memory=False)


if __name__ == "__main__":
    sys.exit(main())
