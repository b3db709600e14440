"""One training iteration, as everyone writes it and with slipstream; what benchmarks take turns on.

Never measures: each benchmark has its own clock, table and order of turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

import slipstream
from slipstream.session.session import Session
from slipstream.testbed import Distance, Testbed

Iterate = Callable[[], None]
Loss = Callable[[nn.Module], torch.Tensor]
LEARNING_RATE = 1e-4


def plain(
    model: nn.Module, loss_of: Loss, optimizer: torch.optim.Optimizer | None = None
) -> Iterate:
    """Without slipstream; ``model`` may be wrapped, by DistributedDataParallel say.

    The optimizer is SGD unless another one is given.
    """
    own = optimizer or torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def iterate() -> None:
        loss_of(model).backward()
        own.step()
        own.zero_grad()

    return iterate


def accelerated(
    model: nn.Module, loss_of: Loss, strategy: Mapping[str, object] | None = None
) -> tuple[Iterate, Session[nn.Module, torch.optim.SGD]]:
    """With slipstream, and the session to ask or to close."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    session = slipstream.accelerate(model, optimizer, strategy=dict(strategy or {}))

    def iterate() -> None:
        session.backward(loss_of(session.model))
        session.step()

    return iterate, session


def this_module() -> str:
    """The module that runs: ``benchmarks.exchange``."""
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "run it as python -m benchmarks.NAME"
    return spec.name


def on_loopback(argv: Sequence[str], ranks: int) -> int:
    """Run this module on several ranks of this host, a thread each; its exit status."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.call([*torchrun, "-m", this_module(), *argv], env=environ)


def on_testbed(argv: Sequence[str], nodes: int, rate: str, distance: Distance | None = None) -> int:
    """Run this module on every node of a testbed."""
    with Testbed(nodes=nodes, rate=rate, distance=distance) as bed:
        return bed.run(
            [
                [
                    "env",
                    f"RANK={node.index}",
                    f"WORLD_SIZE={nodes}",
                    f"MASTER_ADDR={bed.nodes[0].address}",
                    "MASTER_PORT=29500",
                    sys.executable,
                    "-m",
                    this_module(),
                    *argv,
                ]
                for node in bed.nodes
            ]
        )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; of one value, that one."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
