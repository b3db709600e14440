"""Models and optimizers that cannot be accelerated, found before anything is installed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from os import PathLike
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from slipstream.comm.signature import COMPLEX, FLOATS
from slipstream.errors import ModelError, StrategyError, UsageError
from slipstream.local.shared_buffers import learned_buffers
from slipstream.strategy import Strategy
from slipstream.strategy.validate import shown

_DTYPES = (*FLOATS, *COMPLEX)
ACCELERATED: WeakSet[nn.Module] = WeakSet()
"""Models of sessions that are open."""
SHARDED: WeakSet[nn.Module] = WeakSet()
"""Models left sharded by a session that ended with an error."""


def device_of(model: nn.Module) -> torch.device:
    """The device of the parameters.

    Raises:
        ModelError: not a module.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"accelerate() takes a torch.nn.Module, not a {type(model).__name__}")
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def check_model(model: nn.Module) -> None:
    """Refuse modules, parameters and buffers that cannot be trained on several ranks.

    Raises:
        ModelError: names the module, parameter or buffer by its path.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is a ScriptModule, which takes no hooks; pass the plain module, and script "
            "a copy of it where one is saved: torch.jit.script(copy.deepcopy(model))"
        )
    # of whoever has such a model, as the import takes a second
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ModelError(
                f"module {path or '(the model)'} is wrapped in DistributedDataParallel, which "
                "averages gradients itself; pass the plain module: accelerate(ddp.module, ...)"
            )
        if isinstance(module, fsdp):
            raise ModelError(
                f"module {path or '(the model)'} is wrapped in FullyShardedDataParallel, which "
                "splits parameters and averages gradients itself; pass the plain module"
            )
    left = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
    if ignored := [n for n, p in model.named_parameters() if n in left and p.requires_grad]:
        raise ModelError(
            f"DistributedDataParallel was told to leave {ignored[0]} alone, which a session would "
            "average, and broadcast from the first rank; pass a module without what each rank has "
            "for itself, as nn.ModuleList([body, head]), and step that by an optimizer of its own; "
            "or del model._ddp_params_and_buffers_to_ignore"
        )
    device = device_of(model)
    for name, p in model.named_parameters():
        if problem := _parameter_problem(p, device):
            raise ModelError(f"parameter {name} {problem}")
    for name, b in model.named_buffers():
        dense = b.layout == torch.strided and not b.is_conj()
        if not dense or any(
            stride == 0 and size > 1 for stride, size in zip(b.stride(), b.shape, strict=True)
        ):
            raise ModelError(
                f"buffer {name} is a sparse tensor or a view (expanded, conjugated) that other "
                "ranks' values cannot be written to; register a dense copy: tensor.to_dense(), "
                "tensor.clone(memory_format=torch.contiguous_format) or tensor.resolve_conj()"
            )


def check_unused(model: nn.Module) -> None:
    """Refuse a model of which a session trains a part, or has left one sharded.

    Raises:
        UsageError: says which.
    """
    together = (
        "train both in one session, of nn.ModuleList([one, other]), with the second optimizer "
        "beside its step(), or close() that one's session"
    )
    for path, module in model.named_modules():
        if module in ACCELERATED:
            raise UsageError(
                f"module {path} is in a model that is accelerated already; {together}"
                if path
                else "this model is accelerated already; close() its session before a second "
                "accelerate()"
            )
    trained = {p for module in ACCELERATED for p in module.parameters(recurse=False)}
    for name, p in model.named_parameters():
        if p in trained and p.requires_grad:
            raise UsageError(
                f"parameter {name} is in a model that is accelerated already, as that of an "
                f"encoder whose weights two networks share: both sessions would average its "
                f"gradients; {together}"
            )
    if any(module in SHARDED for module in model.modules()):
        raise UsageError(
            "a session that ended with an error has left this model sharded: this rank has only a "
            "part of it; build it anew, and load a checkpoint"
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is none, or that steps parameters of another model.

    Raises:
        ModelError: names the parameter group and the parameter.
    """
    missing = [n for n in ("step", "zero_grad", "param_groups") if not hasattr(optimizer, n)]
    if missing:
        raise ModelError(
            f"accelerate() takes an optimizer as its second argument, not a "
            f"{type(optimizer).__name__} (it has no {', '.join(missing)})"
        )
    in_model = {id(p) for p in model.parameters()}
    narrow = any(p.is_floating_point() and p.itemsize == 2 for p in model.parameters())
    masters = "; of fp32 copies of 16-bit weights set precision: half_weights, which makes them"
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in in_model:
                raise ModelError(
                    f"the optimizer's group {number} holds a parameter of shape "
                    f"{tuple(parameter.shape)} (number {position}) that is not in the model: its "
                    "gradient would never be averaged; build the optimizer from "
                    "model.parameters() of the model that you pass, after all changes to it; of "
                    "several models pass nn.ModuleList([one, other])"
                    f"{masters if narrow else ''}"
                )


def model_warnings(model: nn.Module) -> list[str]:
    """Tables that forward changes by the batch of its rank, so that ranks drift apart."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    found = (name for name, m in model.named_modules() if isinstance(m, tables) and m.max_norm)
    return [
        f"module {name or '(the model)'} has max_norm: each rank changes the rows of its own batch "
        "in forward, so that ranks drift apart, as under DistributedDataParallel; leave it out, "
        "and behind each update let all ranks change all rows: with torch.no_grad(): "
        "weight.renorm_(2, 0, max_norm)"
        for name in found
    ]


def buffer_warnings(model: nn.Module) -> list[str]:
    """Buffers that ``DistributedDataParallel`` was told to leave alone, and a session does not,
    where they may be statistics of each rank; constants are alike in any case."""
    left = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
    found = [name for name in learned_buffers(model) if name in left]
    if not found:
        return []
    return [
        f"DistributedDataParallel was told to leave buffer {found[0]} alone"
        f"{f', and {len(found) - 1} more' if len(found) > 1 else ''}, but all ranks of a session "
        "have buffers alike: what each rank has for itself belongs in a plain attribute of the "
        "module; constants are right as they are"
    ]


def check_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose ``step()`` cannot be called without an argument, as LBFGS.

    Raises:
        ModelError: names it.
    """
    try:
        _, *others = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError):  # no function of Python's
        return
    if any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in others):
        raise ModelError(
            f"{type(optimizer).__name__}.step() needs a closure, which computes gradients inside "
            "the step; a session averages them in backward(), before it: use another optimizer"
        )


def check_loader(loader: object) -> None:
    """Refuse a strategy in the place of the loader, as the run would train under another one.

    Raises:
        ModelError: shows it.
    """
    if isinstance(loader, str | PathLike | Mapping | Strategy):
        raise ModelError(
            f"the third argument of accelerate() is the loader, which gives batches, not "
            f"{shown(loader)}; name a strategy: accelerate(model, optimizer, strategy=...)"
        )


def check_local_loader(strategy: Strategy, loader: object) -> None:
    """Refuse a loader of which all ranks must take a batch at the same time.

    Raises:
        StrategyError: says what to do with it.
    """
    local = strategy.local
    if local is None or loader is None:
        return
    if local.stretch:
        raise StrategyError(
            "local.stretch with a loader: ranks of different speed take different numbers of "
            "batches, and session.loader keeps them in step; leave it out of accelerate(), and "
            "iterate over it by yourself while session.all_updates is below what you want"
        )
    if local.rendezvous is not None:
        raise StrategyError(
            "local.rendezvous with a loader: which share of the data a job has is known after "
            "accelerate(); make the loader then, by session.data_rank and session.data_size"
        )


def _parameter_problem(p: Any, device: torch.device) -> str | None:
    if hasattr(p, "device_mesh"):  # a DTensor
        return (
            "is split over ranks already, by fully_shard or a tensor parallel plan; pass a plain "
            "module, or, under fully_shard, use slipstream.adapters.fsdp2.accelerate_fsdp()"
        )
    if is_lazy(p):
        return "has no shape yet (a lazy module); run one forward before accelerate()"
    if p.device.type == "meta":
        return (
            "is on the meta device and holds no values; call model.to_empty(device=...) and "
            "initialise it before accelerate()"
        )
    if p.device != device:
        return f"is on {p.device}, others on {device}; a rank's parameters must be on one device"
    if p.requires_grad and p.dtype not in _DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        return f"is {p.dtype}, which gloo cannot add up; allowed: {allowed}"
    return None
