"""All checks of ``accelerate()`` in one call, before anything is installed.

Each room checks what it installs; here their checks are put in order. Nothing communicates, and
nothing changes the model or the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.cluster.connect import Cluster
from slipstream.fusion.checks import check_compute, compute_warnings
from slipstream.gradients.checks import check_gradients, gradient_warnings
from slipstream.gradients.segments import parameters_of
from slipstream.memory.checks import check_memory
from slipstream.parallel.checks import check_parallel
from slipstream.parallel.dims import mesh_of
from slipstream.precision.model_precision import check_precision, precision_warnings
from slipstream.session.checks import (
    buffer_warnings,
    check_closure,
    check_loader,
    check_model,
    check_optimizer,
    model_warnings,
)
from slipstream.sharding.checks import check_sharded
from slipstream.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Validation:
    """A rank's findings about a model and a strategy that fit each other.

    Attributes:
        fingerprint: what must be equal on all ranks, subject to value:
            ``{"parameter a": "torch.float32 (2,)", ...}``.
        warnings: what works, but is most often a mistake.
    """

    fingerprint: Mapping[str, str]
    warnings: tuple[str, ...]


def validate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any] | None,
    strategy: Strategy,
    cluster: Cluster,
) -> Validation:
    """Refuse what would only fail later.

    Raises:
        ModelError: the model or the optimizer cannot be accelerated; names the parameter. Or the
            loader is a strategy.
        StrategyError: the strategy does not fit the model, the machine or the number of ranks.
        UsageError: activations of the model are recomputed or offloaded already; no compiler.
        OffloadError: there is no room for what is offloaded.
    """
    check_model(model)  # first: the other checks need parameters with shapes and values
    check_optimizer(model, optimizer)
    check_loader(loader)
    trainables = parameters_of(model, trainable=True)
    check_gradients(trainables, optimizer, strategy.gradients)
    check_precision(model, optimizer, strategy.precision)
    check_sharded(model, optimizer, trainables, strategy)
    check_parallel(model, optimizer, strategy, cluster.world_size)
    check_closure(optimizer)
    local_ranks = cluster.environment.local_world_size
    check_compute(model, strategy)
    check_memory(model, strategy, local_ranks=local_ranks, rank=cluster.rank)
    settings = strategy.document()
    for group in ("trace", "checks"):  # where a rank writes is its own affair
        settings.get(group, {}).pop("folder", None)
    fingerprint = {
        "the strategy": json.dumps(settings),
        "the optimizer": type(optimizer).__name__,
        "the loader": "none" if loader is None else "given",
    }
    for name, p in model.named_parameters():
        frozen = "" if p.requires_grad else ", frozen"
        strides = "" if p.is_contiguous() else f", strides {tuple(p.stride())}"
        fingerprint[f"parameter {name}"] = f"{p.dtype} {tuple(p.shape)}{strides}{frozen}"
    for name, b in model.named_buffers():
        fingerprint[f"buffer {name}"] = f"{b.dtype} {tuple(b.shape)}"
    many = mesh_of(strategy.parallel, cluster.world_size).data > 1
    found = (
        *(buffer_warnings(model) if many else ()),
        *(model_warnings(model) if many and strategy.local is None else ()),
        *gradient_warnings(trainables, strategy.gradients),
        *precision_warnings(model, strategy.precision),
        *compute_warnings(model, strategy.compute),
    )
    return Validation(fingerprint, found)
