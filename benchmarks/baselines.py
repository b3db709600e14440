"""What training with torch alone does, set as its experts would: DDP, FSDP2, ZeRO-1, DDP's hooks.

Each function returns the iteration of a model. Never measures.

`ZeroRedundancyOptimizer(overlap_with_ddp=True)` is not here: torch refuses it on gloo ("may meet
hangs", https://github.com/pytorch/pytorch/issues/62300).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.iteration import LEARNING_RATE, Iterate, Loss, plain
from slipstream.memory.blocks import blocks_of

DDP_MEGABYTES = (1, 2, 4, 8, 16, 25, 50)
UNIT_BYTES = 2**20


class Hook(NamedTuple):
    """One of torch's communication hooks, and DDP's buckets for it; None: DDP's default."""

    call: Callable[..., Any]
    megabytes: float | None
    rank: int | None = None
    """Of PowerSGD."""


HOOKS = {
    "fp16": Hook(default_hooks.fp16_compress_hook, None),
    "fp16, 4 MB": Hook(default_hooks.fp16_compress_hook, 4),
    # In one bucket, as torch's crashes on gloo with several. Its batched form fails in torch 2.13:
    # the first compressed update gives a matrix where three dimensions are asked for.
    "PowerSGD, rank 4": Hook(powerSGD_hook.powerSGD_hook, 1000, 4),
}

Fsdp = Literal["default", "keep", "prefetch"]
FSDP: dict[Fsdp, str] = {
    "default": "parameters freed after forward, as is FSDP2's default",
    "keep": "parameters kept from forward to backward (ZeRO-2)",
    "prefetch": "the same, and all of them gathered from the start of forward on",
}


def ddp(
    model: nn.Module, loss_of: Loss, megabytes: float | None, *, static_graph: bool = True
) -> Iterate:
    """DistributedDataParallel; None is its default (25 MB, first 1 MB)."""
    return plain(wrapped_in_ddp(model, megabytes, static_graph=static_graph), loss_of)


def wrapped_in_ddp(
    model: nn.Module, megabytes: float | None, *, static_graph: bool = True
) -> nn.parallel.DistributedDataParallel:
    """A model under DDP in its fastest setting; it keeps buffers equal, as slipstream does."""
    return nn.parallel.DistributedDataParallel(
        model,
        bucket_cap_mb=megabytes,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
    )


def with_hook(model: nn.Module, loss_of: Loss, hook: str) -> Iterate:
    """DDP with one of torch's own communication hooks; PowerSGD is at work from the third on."""
    call, megabytes, rank = HOOKS[hook]
    wrapped = wrapped_in_ddp(model, megabytes, static_graph=False)
    state: Any = None
    if rank is not None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
    wrapped.register_comm_hook(state, call)
    return plain(wrapped, loss_of)


def zero1(model: nn.Module, loss_of: Loss, megabytes: float) -> Iterate:
    """DDP whose optimizer's state is sharded: each rank updates its part and sends it."""
    wrapped = wrapped_in_ddp(model, megabytes)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        optimizer_class=torch.optim.SGD,
        parameters_as_bucket_view=True,  # one broadcast a rank, not one a parameter
        lr=LEARNING_RATE,
    )
    return plain(wrapped, loss_of, optimizer)


def fsdp2(model: nn.Module, loss_of: Loss, units: Sequence[str], kind: Fsdp) -> Iterate:
    """``fully_shard`` of every unit and of the rest.

    On gloo FSDP2 waits for each of its collectives where it makes it. Only an explicit
    ``unshard(async_op=True)`` runs beside computing: "prefetch".
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    keep = kind != "default"
    for path in units:
        fully_shard(model.get_submodule(path), mesh=mesh, reshard_after_forward=not keep)
    # None: torch never frees the parameters of the root after forward, which backward needs first
    fully_shard(model, mesh=mesh, reshard_after_forward=False if keep else None)
    iterate = plain(model, loss_of)
    if kind != "prefetch":
        return iterate
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]  # the root first

    def prefetching() -> None:
        for module in modules:
            module.unshard(async_op=True)
        iterate()

    return prefetching


def fsdp_units(model: nn.Module) -> list[str]:
    """Paths of what FSDP2 shards as one: repeated blocks, and layers outside of 1 MB and more.

    Tied parameters stay in the root, which is gathered as long as either of their layers runs.
    """
    blocks = blocks_of(model)
    uses = Counter(p for m in model.modules() for p in m.parameters(recurse=False))

    def is_large(path: str, module: nn.Module) -> bool:
        own = list(module.parameters(recurse=False))
        is_leaf = not any(True for _ in module.children())
        inside = any(path.startswith(f"{block}.") for block in blocks)
        tied = any(uses[p] > 1 for p in own)
        return is_leaf and not inside and not tied and sum(p.nbytes for p in own) >= UNIT_BYTES

    return [path for path, m in model.named_modules() if path in blocks or is_large(path, m)]
