"""Runs the stages one after the other on one micro-batch, so that all ranks know what travels.

Never leaves a trace: buffers and random states are as before, whatever happens. An error on one
rank is an error on all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.errors import ModelError
from slipstream.parallel.pipeline.micro_batches import MicroBatch
from slipstream.parallel.pipeline.placeholders import TensorSpec
from slipstream.parallel.pipeline.stages import Seen, Stages
from slipstream.pytree import mapped
from slipstream.transport.consistency import collective_errors


@dataclass
class Walk:
    """What was found out.

    Attributes:
        seen: what modules return that end before a later stage.
        travels: by stage the tensor that it sends; of the last its loss, if there is one.
        result: of the last stage: what the model returns, or its loss.
    """

    seen: Seen = field(default_factory=dict)
    travels: list[TensorSpec] = field(default_factory=list)
    result: Any = None


@dataclass
class _Step:
    """One stage of the walk, as its rank tells the others."""

    seen: Seen
    result: Any
    requires_grad: bool
    failure: str = ""


def walk(
    stages: Stages,
    batch: MicroBatch,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Walk:
    """Forward of all stages, the s-th on rank s % ranks. Collective.

    Args:
        stages: of this rank's model.
        batch: the same on every rank.
        loss_fn: None: the result is what the model returns.
        group: None: one process.
        device: of the model.

    Raises:
        ModelError: what a stage raised, on every rank; names stage and rank.
    """
    rank = dist.get_rank(group) if group is not None else 0
    size = dist.get_world_size(group) if group is not None else 1
    found, hidden = Walk(), None
    last = stages.cuts.stages - 1
    with unchanged(stages.model, device):
        for stage in range(last + 1):
            owner, payload, cause = stage % size, b"", None
            if owner == rank:
                try:
                    result, seen = stages.watch(stage, hidden, batch.args, batch.kwargs, found.seen)
                    if stage == last and loss_fn is not None:
                        result = _loss(loss_fn(result, batch.target))
                    needs = isinstance(result, torch.Tensor) and result.requires_grad
                    result = mapped(result, lambda x: x.detach().cpu())
                    payload = pickle.dumps(_Step(seen, result, needs))
                except Exception as error:
                    where = f"stage {stage} on rank {_global(group, rank)}"
                    known = isinstance(error, ModelError)
                    text = f"{where}: {error if known else f'{type(error).__name__}: {error}'}"
                    payload, cause = pickle.dumps(_Step({}, None, False, text)), error
            said = [payload]
            if group is not None:
                with collective_errors(f"the first forward of stage {stage}"):
                    dist.broadcast_object_list(said, group=group, group_src=owner)
            step: _Step = pickle.loads(said[0])
            if step.failure:
                raise ModelError(step.failure) from cause
            for path, calls in mapped(step.seen, partial(_here, device), TensorSpec).items():
                found.seen.setdefault(path, []).extend(calls)
            found.result = mapped(step.result, lambda x: x.to(device))
            if stage < last or loss_fn is not None:
                hidden = found.result.requires_grad_(step.requires_grad)
                found.travels.append(TensorSpec.of(hidden))
    return found


def _here(device: torch.device, spec: TensorSpec) -> TensorSpec:
    """On another rank the model is on another device."""
    return replace(spec, device=device) if spec.device.type == device.type else spec


def _loss(loss: object) -> torch.Tensor:
    """The loss, if backward can start from it."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        of = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise ModelError(
            f"loss_fn returned a {type(loss).__name__}{of}; allowed: a floating-point tensor of "
            "one element, the mean over the samples"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ModelError("the loss requires no gradient; is every parameter before it frozen?")
    return loss.reshape(())


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return dist.get_global_rank(group, rank) if group is not None else rank


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers and random states are afterwards what they were before."""
    buffers = [(name, buffer, buffer.clone()) for name, buffer in model.named_buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for name, buffer, before in buffers:
                path, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(path), attribute, buffer)
                buffer.copy_(before)
