"""The oracles: plain training loops, against which every other way to train is compared.

    expected = ddp(MODELS["tied"], "sgd", steps=3, accumulate=1)

Each loop returns the model that it has built and trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import slipstream
from tests.harness.models import Batch, Case

TOLERANCE = {  # absolute and relative: parameters after a few steps, summed in another order
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    # eps: without it AdamW makes a step of full size from a gradient that is nothing but rounding
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3),
}


def build(case: Case, seed: int = 0) -> nn.Module:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes ten times as long
    return case.build()


def one_process(case: Case, optimizer: str, steps: int, accumulate: int, world: int) -> nn.Module:
    """One process on the joined batch of all ranks."""
    model = build(case)
    update = OPTIMIZERS[optimizer](model)
    for step in range(steps):
        for micro in range(step * accumulate, (step + 1) * accumulate):
            batches = [case.batch(rank, micro) for rank in range(world)]
            (_joined_loss(model, case, batches) / accumulate).backward()
        update.step()
        update.zero_grad()
    return model


def _joined_loss(model: nn.Module, case: Case, batches: list[Batch]) -> torch.Tensor:
    if case.joins:
        return model(*map(torch.cat, zip(*batches, strict=True)))
    return torch.stack([model(*batch) for batch in batches]).mean()


def ddp(case: Case, optimizer: str, steps: int, accumulate: int) -> nn.Module:
    """DistributedDataParallel on the ranks of the default group; plain averages where it cannot."""
    rank = dist.get_rank()
    model = build(case)
    update = OPTIMIZERS[optimizer](model)
    wrapped = model if case.ddp is None else DistributedDataParallel(model, **case.ddp)
    for micro in range(steps * accumulate):
        last = (micro + 1) % accumulate == 0
        local = isinstance(wrapped, DistributedDataParallel) and not last
        with wrapped.no_sync() if local else nullcontext():
            (wrapped(*case.batch(rank, micro)) / accumulate).backward()
        if last:
            if case.ddp is None:
                _average(model)
            update.step()
            update.zero_grad()
    for buffer in model.buffers():  # DDP would, when the next forward begins
        dist.broadcast(buffer, 0)
    return model


def _average(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(1 / dist.get_world_size())
        dist.all_reduce(parameter.grad)


def accelerate(model: nn.Module, optimizer: str = "sgd", **gradients: Any) -> Any:
    """A session on ``model`` without a loader."""
    strategy = {"gradients": gradients}
    return slipstream.accelerate(model, OPTIMIZERS[optimizer](model), None, strategy)


def accelerated(
    case: Case, optimizer: str, steps: int, accumulate: int, gradients: Mapping[str, Any]
) -> nn.Module:
    """slipstream; the ranks' parameters differ before ``accelerate()``."""
    rank = dist.get_rank()
    model = build(case, seed=rank)
    with accelerate(model, optimizer, accumulate=accumulate, **gradients) as session:
        for micro in range(steps * accumulate):
            session.backward(session.model(*case.batch(rank, micro)))
            assert session.step() == ((micro + 1) % accumulate == 0)
    return model


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    """Whether parameters and buffers are equal to the last bit."""
    return digest(a) == digest(b)


def equal(first: Any, second: Any) -> bool:
    """Bit for bit, tensors in dictionaries and lists, too."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def digest(model: nn.Module) -> str:
    """Names and bytes of all parameters and buffers in a few letters, to compare between ranks."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        found.update(name.encode() + raw.numpy().tobytes())
    return found.hexdigest()


def distance(a: nn.Module, b: nn.Module) -> float:
    """How far parameters and buffers lie apart, in units of the tolerance; above 1 is too far.

    The coarsest dtype of a model sets its tolerance, since its rounding reaches all parameters.
    """
    tolerance = max(TOLERANCE[p.dtype] for p in a.parameters())
    worst = 0.0
    for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        if x.numel():
            x, y = (t.detach().to(torch.complex128) for t in (x, y))
            worst = max(worst, float(((x - y).abs() / (tolerance * (1 + y.abs()))).max()))
    return worst
