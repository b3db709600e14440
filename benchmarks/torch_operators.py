"""Tests torch's own differentiable collectives for correctness, with the cases of our tests.

    python -m benchmarks.torch_operators --markdown docs/operators.md

Every operator of slipstream.comm runs on three ranks, in the world, in a subgroup and in a permuted
one; result, gradient and second gradient are compared with plain math on what all ranks hold. A
case in which a rank raises, dies or hangs is an error.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nn
from rich.progress import track

from slipstream import comm
from tests.harness.operators import (
    REFERENCES,
    close,
    expected,
    inputs,
    loss_of,
    measured,
    second_loss,
)
from tests.harness.ranks import RankFailure, Ranks

SHAPE = (6, 4)
GROUPS = {"world": [0, 1, 2], "ranks 1, 2": [1, 2], "ranks 2, 0": [2, 0]}
Operator = Callable[[torch.Tensor, dist.ProcessGroup, int], torch.Tensor | None]
"""An operator of a tensor, a process group and the root's rank in the world."""


def nn_gather(x: torch.Tensor, group: dist.ProcessGroup, root: int) -> torch.Tensor:
    return torch.cat(list(nn.gather(x, root, group)))


def nn_reduce(x: torch.Tensor, group: dist.ProcessGroup, root: int) -> torch.Tensor | None:
    total: torch.Tensor = nn.reduce(x, root, group=group)
    return total if dist.get_rank() == root else total * 0


def nn_scatter(x: torch.Tensor, group: dist.ProcessGroup, root: int) -> torch.Tensor:
    piece: torch.Tensor = nn.scatter(list(x.chunk(group.size())), root, group)
    return piece


def nn_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, _: int) -> torch.Tensor:
    pieces = [piece.contiguous() for piece in x.chunk(group.size())]
    piece: torch.Tensor = nn.reduce_scatter(torch.empty_like(pieces[0]), pieces, group=group)
    return piece


def nn_all_to_all(x: torch.Tensor, group: dist.ProcessGroup, _: int) -> torch.Tensor:
    pieces = [piece.contiguous() for piece in x.chunk(group.size())]
    return torch.cat(list(nn.all_to_all([torch.empty_like(p) for p in pieces], pieces, group)))


NN = "distributed.nn.functional"
FUNCTIONAL = "_functional_collectives"
OURS = "slipstream.comm"
PHASES = ("result", "gradient", "2nd gradient")
THEIRS: dict[str, dict[str, Operator]] = {
    "broadcast": {
        NN: lambda x, g, root: nn.broadcast(x, root, g),
        FUNCTIONAL: lambda x, g, root: functional.broadcast(x, dist.get_group_rank(g, root), g),
    },
    "reduce_sum": {NN: nn_reduce},
    "all_reduce_sum": {
        NN: lambda x, g, _: nn.all_reduce(x, group=g),
        FUNCTIONAL: lambda x, g, _: functional.all_reduce(x, "sum", g),
    },
    "all_reduce_mean": {
        NN: lambda x, g, _: nn.all_reduce(x, dist.ReduceOp.AVG, g),
        FUNCTIONAL: lambda x, g, _: functional.all_reduce(x, "avg", g),
    },
    "all_reduce_max": {
        NN: lambda x, g, _: nn.all_reduce(x, dist.ReduceOp.MAX, g),
        FUNCTIONAL: lambda x, g, _: functional.all_reduce(x, "max", g),
    },
    "all_reduce_min": {
        NN: lambda x, g, _: nn.all_reduce(x, dist.ReduceOp.MIN, g),
        FUNCTIONAL: lambda x, g, _: functional.all_reduce(x, "min", g),
    },
    "gather": {NN: nn_gather},
    "all_gather": {
        NN: lambda x, g, _: torch.cat(list(nn.all_gather(x, g))),
        FUNCTIONAL: lambda x, g, _: functional.all_gather_tensor(x, 0, g),
    },
    "scatter": {NN: nn_scatter},
    "reduce_scatter_sum": {
        NN: nn_reduce_scatter,
        FUNCTIONAL: lambda x, g, _: functional.reduce_scatter_tensor(x, "sum", 0, g),
    },
    "all_to_all": {
        NN: nn_all_to_all,
        FUNCTIONAL: lambda x, g, _: functional.all_to_all_single(x, None, None, g),
    },
}


def judge(name: str, library: str, ranks: list[int]) -> str:
    """On this rank: "right", or the first of the three that is wrong or raises."""
    warnings.simplefilter("ignore")
    group = comm.group(ranks, timeout=timedelta(seconds=5))
    if group.rank < 0:
        return ""
    xs = inputs(group.size, SHAPE, torch.float64)
    references = [by_rank[group.rank] for by_rank in expected(name, xs, ())]
    if library == OURS:
        steps = iter(measured(name, group, xs[group.rank], ()))
    else:
        steps = differentiated(THEIRS[name][library], group, xs[group.rank], references[0] is None)
    for what, reference in zip(PHASES, references, strict=True):
        try:
            close(next(steps), reference, torch.float64)
        except AssertionError:
            return f"{what} wrong"
        except (RuntimeError, ValueError) as error:
            return f"{what}: {type(error).__name__}"
    return "right"


def differentiated(
    operator: Operator, group: comm.Group, x: torch.Tensor, without_result: bool
) -> Iterator[torch.Tensor | None]:
    """Yield result, gradient and second gradient of torch's operator on this rank.

    Where the reference has no result, torch's is ignored, but takes part in backward.
    """
    x = x.clone().requires_grad_()
    y = operator(x, group.members, group.ranks[0])
    yield None if without_result or y is None else y.detach() * 1
    loss = loss_of(None if without_result else y, group.rank)
    if loss is None:
        loss = (x if y is None else y).sum() * 0
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    yield first.detach()
    again = second_loss(first, group.rank) + x.sum() * 0  # connects x if nothing depends on it
    (second,) = torch.autograd.grad(again, x)
    yield second


def verdict(name: str, library: str, ranks: list[int]) -> str:
    """The judgement of all ranks."""
    if library != OURS and library not in THEIRS[name]:
        return "absent"
    with Ranks(3, timeout=30.0) as team:
        try:
            words: list[str] = [word for word in team.run(judge, name, library, ranks) if word]
        except RankFailure:
            return "a rank hangs or dies"
    return next((word for what in PHASES for word in words if word.startswith(what)), "right")


def page() -> str:
    """The table, in Markdown."""
    lines = [
        "# Operators between ranks: torch's own and slipstream's",
        "",
        f"Written by `python -m benchmarks.torch_operators --markdown docs/operators.md` on "
        f"{date.today().isoformat()} with torch {torch.__version__} and gloo: result, gradient and "
        "second gradient of each operator on three ranks against plain math on what all of them "
        "hold. `tests/comm/test_operators.py` tests the last column, and many more cases.",
        "",
        "| operator | group | `torch.distributed.nn.functional` | "
        "`torch.distributed._functional_collectives` | `slipstream.comm` |",
        "|---|---|---|---|---|",
    ]
    cases = [(name, place) for name in REFERENCES for place in GROUPS]
    for name, place in track(cases, "cases"):
        verdicts = [verdict(name, library, GROUPS[place]) for library in (NN, FUNCTIONAL, OURS)]
        lines.append(f"| {name} | {place} | {' | '.join(verdicts)} |")
    lines += [
        "",
        "`send` and `recv` have no differentiable form in torch. torch sorts the ranks of a group: "
        "in `ranks 2, 0` its first chunk belongs to rank 0 instead of rank 2.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Judge every case; print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", help="write the page to this file")
    args = parser.parse_args()
    text = page()
    if args.markdown:
        Path(args.markdown).write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
