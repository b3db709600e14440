"""What the differentiable operators cost beside the bare calls of torch.distributed.

    python benchmarks/operators.py --json results/operators.json

Every operator and the bare call that moves the same bytes take turns on two ranks over loopback:
without ``check`` (the comparison), and with it. The operator also records the step for backward.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from iteration import on_loopback, quartiles
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tables import save

from slipstream import comm

Call = Callable[[], object]
SIZES = {"4 KB": 2**10, "1 MB": 2**18, "16 MB": 2**22}
BARS = (1.05, 20e-6)


def bare(x: torch.Tensor) -> dict[str, Call]:
    """What one writes with torch.distributed, out of place as ours."""
    world, rank = dist.get_world_size(), dist.get_rank()
    peer = (rank + 1) % world

    def reduced(op: dist.ReduceOp.RedOpType, scale: float = 1.0) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out, op)
        return out if scale == 1.0 else out.div_(1 / scale)

    def broadcast() -> torch.Tensor:
        out = x.clone() if rank == 0 else torch.empty_like(x)
        dist.broadcast(out, 0)
        return out

    def reduce() -> torch.Tensor:
        out = x.clone()
        dist.reduce(out, 0)
        return out

    def gather() -> torch.Tensor | None:
        rows = [torch.empty_like(x) for _ in range(world)] if rank == 0 else None
        dist.gather(x, rows, 0)
        return torch.cat(rows) if rows else None

    def all_gather() -> torch.Tensor:
        out = x.new_empty(world * x.shape[0])
        dist.all_gather_into_tensor(out, x)
        return out

    def scatter() -> torch.Tensor:
        out = x.new_empty(x.shape[0] // world)
        dist.scatter(out, list(x.chunk(world)) if rank == 0 else None, 0)
        return out

    def reduce_scatter() -> torch.Tensor:
        out = x.new_empty(x.shape[0] // world)
        dist.reduce_scatter_tensor(out, x)
        return out

    def all_to_all() -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    def send_and_recv() -> torch.Tensor | None:
        if rank == 0:
            dist.send(x, peer)
            return None
        out = torch.empty_like(x)
        dist.recv(out, peer)
        return out

    return {
        "broadcast": broadcast,
        "reduce_sum": reduce,
        "all_reduce_sum": lambda: reduced(dist.ReduceOp.SUM),
        "all_reduce_mean": lambda: reduced(dist.ReduceOp.SUM, 1 / world),
        "all_reduce_max": lambda: reduced(dist.ReduceOp.MAX),
        "gather": gather,
        "all_gather": all_gather,
        "scatter": scatter,
        "reduce_scatter_sum": reduce_scatter,
        "all_to_all": all_to_all,
        "send, recv": send_and_recv,
    }


def ours(x: torch.Tensor, group: comm.Group) -> dict[str, Call]:
    """The same by slipstream, recorded for backward (and forgotten at once)."""

    def recorded(operator: Callable[..., object]) -> Call:
        def call() -> object:
            with comm.graph():
                return operator(x, group)

        return call

    def send_and_recv() -> object:
        with comm.graph():
            return comm.send(x, 1, group) if group.rank == 0 else comm.recv(0, group, like=x)

    names = [name for name in bare(x) if name != "send, recv"]
    return {name: recorded(getattr(comm, name)) for name in names} | {"send, recv": send_and_recv}


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    unchecked, checked = comm.group(check=False), comm.group()
    rows = []
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    for size, count in track(SIZES.items(), "sizes", console=console):
        x = torch.ones(count, requires_grad=True)
        plain = x.detach()
        variants = {"bare": bare(plain), "ours": ours(x, unchecked), "checked": ours(x, checked)}
        for name in variants["bare"]:
            calls = {variant: found[name] for variant, found in variants.items()}
            rows.append({"operator": name, "size": size, **take_turns(calls, args.rounds)})
    if dist.get_rank() == 0:
        Console(width=120).print(table(rows))
        if args.json:
            save(args.json, "operators", {"ranks": dist.get_world_size(), "rows": rows})
    dist.barrier()
    dist.destroy_process_group()


def take_turns(calls: Mapping[str, Call], rounds: int) -> dict[str, Any]:
    """Seconds of each call, the slowest rank's, by turns; medians with quartiles."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(rounds + 3):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if step >= 3:
                seconds[name].append(float(spent))
    found: dict[str, Any] = {name: quartiles(values) for name, values in seconds.items()}
    own, other = found["ours"][1], found["bare"][1]
    found["within"] = own <= max(other * BARS[0], other + BARS[1])
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    """What a person reads: microseconds."""
    drawn = Table(title="operators beside torch.distributed, 2 ranks, loopback, microseconds")
    for heading in ("operator", "size", "torch", "ours", "quartiles", "within", "with check"):
        drawn.add_column(heading, justify="left" if heading == "operator" else "right")
    for r in rows:
        low, median, high = (1e6 * s for s in r["ours"])
        drawn.add_row(
            r["operator"], r["size"], f"{1e6 * r['bare'][1]:.0f}", f"{median:.0f}",
            f"{low:.0f}..{high:.0f}", "yes" if r["within"] else "NO",
            f"{1e6 * r['checked'][1]:.0f}",
        )  # fmt: skip
    return drawn


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return 0
    return on_loopback(__file__, sys.argv[1:], 2)


if __name__ == "__main__":
    sys.exit(main())
