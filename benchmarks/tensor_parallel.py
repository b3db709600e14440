"""Layers split by slipstream beside DTensor's ``parallelize_module``, forward and backward.

    python -m benchmarks.tensor_parallel --json results/tensor-parallel.json

The same modules with the same weights run in turn on two ranks with one thread each, over loopback
gloo: whole on every rank (what splitting saves), split by torch, split by slipstream.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.cases import as_ranks
from benchmarks.iteration import quartiles
from benchmarks.record import finish
from benchmarks.turns import joined_ranks, seconds_of, take_turns
from slipstream import comm
from slipstream.parallel.tensor.plans import TensorPlan, known_plan
from slipstream.parallel.tensor.split import split_layers
from slipstream.strategy.parallel import TensorParallelConfig

Theirs = dict[str, ParallelStyle]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def llama(width: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=width,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=4 * width,
        vocab_size=64,
        max_position_embeddings=256,
    )
    return LlamaModel(config)


def mlp_plans() -> tuple[TensorPlan, Theirs]:
    config = TensorParallelConfig.model_validate({"ranks": 2, "plan": {"0": "column", "2": "row"}})
    plan = config.plan
    assert plan is not None
    return plan, {"0": ColwiseParallel(), "2": RowwiseParallel()}


def llama_plans(model: nn.Module) -> tuple[TensorPlan, Theirs]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    theirs: Theirs = {f"layers.*.{name}": ColwiseParallel() for name in columns}
    theirs |= {f"layers.*.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    rows = ("self_attn.o_proj", "mlp.down_proj")
    theirs |= {f"layers.*.{name}": RowwiseParallel() for name in rows}
    return known_plan(model.config), theirs


def cases() -> dict[str, tuple[nn.Module, tuple[TensorPlan, Theirs], torch.Tensor]]:
    """Modules, plans and inputs: small ones show the cost of a call, large ones that of a copy."""
    modules: dict[str, Any] = {}
    for width, rows in ((64, 16), (256, 256), (1024, 512)):
        modules[f"MLP {width} x {rows} rows"] = (mlp(width), mlp_plans(), torch.randn(rows, width))
    for width, length in ((64, 16), (256, 128), (512, 256)):
        model = llama(width)
        words = torch.randint(64, (2, length))
        modules[f"Llama 2 x {width}, 2 x {length} words"] = (model, llama_plans(model), words)
    return modules


def call_of(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Forward and backward; the input of a plain module requires a gradient, as inside a model."""
    x = x.requires_grad_() if x.is_floating_point() else x

    def call() -> object:
        for tensor in (x, *model.parameters()):
            tensor.grad = None
        y = model(x)
        y = y if isinstance(y, torch.Tensor) else y.last_hidden_state
        return y.sum().backward()

    return call


@joined_ranks()
def measure(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 prints and saves."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = comm.group(check=False)
    rows = []
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    for name, (model, (plan, theirs), x) in track(cases().items(), "modules", console=console):
        by_torch, ours = copy.deepcopy(model), copy.deepcopy(model)
        parallelize_module(by_torch, mesh, theirs)
        split_layers(ours, group, plan)
        models = {"whole": model, "torch": by_torch, "slipstream": ours}
        calls = {variant: call_of(m, x.clone()) for variant, m in models.items()}
        seconds = take_turns([*calls], partial(turn, calls), args.rounds, 3, name)
        found = {variant: quartiles(values) for variant, values in seconds.items()}
        rows.append({"module": name, **found})
    if dist.get_rank() == 0:
        finish(args.json, "tensor_parallel", {"ranks": dist.get_world_size(), "rows": rows})


def turn(calls: dict[str, Callable[[], object]], variant: str) -> float:
    """Seconds of one forward and backward."""
    return seconds_of(calls[variant])


def main() -> int:
    """Start the ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", help="also write the figures to this file")
    return as_ranks(measure, parser.parse_args(), ranks=2, keep_memory=False)


if __name__ == "__main__":
    sys.exit(main())
