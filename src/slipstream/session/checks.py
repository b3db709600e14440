"""What cannot be accelerated or looks like a slip, found before anything is installed; and what all
ranks must agree on.

Never changes the model or the optimizer.
"""

from __future__ import annotations

import json
import warnings
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from slipstream.errors import ModelError, StrategyError
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.gradients.momentum import check_momentum_correction
from slipstream.gradients.segments import parameters_of
from slipstream.memory.recompute.recompute import check_recompute
from slipstream.optim.layerwise import Layerwise
from slipstream.parallel.pipeline.schedules import check_schedule
from slipstream.parallel.pipeline.split_points import SplitPoints
from slipstream.parallel.tensor.assign import assign
from slipstream.parallel.tensor.plans import plan_of
from slipstream.precision.model_precision import check_precision, has_bf16
from slipstream.strategy import (
    Adaptive,
    ByIndex,
    ByName,
    Checkpoints,
    Codec,
    Every,
    HalfWeights,
    Optimal,
    Precision,
    Strategy,
)
from slipstream.strategy.parallel import Sequence, Switch

_OF_WHOLE_PARAMETERS = (
    Layerwise,
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []),
)

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)


def device_of(model: nn.Module) -> torch.device:
    """The device of the parameters.

    Raises:
        ModelError: not a module.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"accelerate() takes a torch.nn.Module, not a {type(model).__name__}")
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def check(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Refuse what could only fail later.

    Raises:
        ModelError: names the parameter by its path.
        StrategyError: the split does not fit the number of gradients, or the precision the machine.
    """
    _check_model(model)
    _check_buffers(model)
    _check_optimizer(model, optimizer)
    trainables = parameters_of(model, trainable=True)
    gradients = [Gradient(t.name, t.layer, t.parameter.nbytes) for t in trainables]
    plan_segments(gradients, strategy.gradients.split)
    check_momentum_correction(optimizer, trainables, strategy.gradients.codec)
    check_precision(model, optimizer, strategy.precision)
    _check_parallel(model, optimizer, strategy)
    _check_memory(model, strategy)


def warn_of_idle_rules(model: nn.Module, codec: Codec | None) -> None:
    """Say which rules of ``by_name`` no trainable parameter matches: maybe a slip of the pen."""
    if not isinstance(codec, ByName):
        return
    names = [t.name for t in parameters_of(model, trainable=True)]
    for number, rule in enumerate(codec.rules):
        if not any(fnmatchcase(name, rule.match) for name in names):
            known = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            warnings.warn(
                f"gradients.codec.rules.{number}.match {rule.match!r} matches no trainable "
                f"parameter ({known}); * and ? stand for anything",
                stacklevel=4,
            )


def warn_of_slow_types(model: nn.Module, config: Precision | None) -> None:
    """Say where 16 bits take longer than 32: without instructions for bf16."""
    device = device_of(model)
    if config is not None and config.dtype == "bf16" and not has_bf16(device):
        warnings.warn(
            f"precision.dtype bf16 on a {device.type} without instructions for it is slower than "
            "fp32; precision: null is faster here",
            stacklevel=4,
        )


def fingerprint(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy
) -> dict[str, str]:
    """What must be equal on all ranks, subject to value."""
    found = {
        "the strategy": json.dumps(strategy.document()),
        "the optimizer": type(optimizer).__name__,
    }
    for name, p in model.named_parameters():
        frozen = "" if p.requires_grad else ", frozen"
        found[f"parameter {name}"] = f"{p.dtype} {tuple(p.shape)}{frozen}"
    for name, b in model.named_buffers():
        found[f"buffer {name}"] = f"{b.dtype} {tuple(b.shape)}"
    return found


def _check_parallel(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Refuse what does not go with ranks that share a model, and say why."""
    tensor, pipeline = strategy.parallel.tensor, strategy.parallel.pipeline
    if not strategy.parallel.active:
        return
    assignments = []
    if tensor is not None:
        assignments = assign(model, plan_of(tensor, model), tensor.ranks)
    if pipeline is not None:
        stages = SplitPoints.of(model, pipeline.cut).num_stages
        check_schedule(pipeline.schedule, stages, pipeline.ranks, pipeline.micro_batches)
        parts = [a for a in assignments if getattr(a.style, "sequence", False)]
        parts += [a for a in assignments if isinstance(a.style, Sequence | Switch)]
        if parts:
            raise StrategyError(
                f"parallel.pipeline with {parts[0].path} split along the sequence or the batch: a "
                "stage does not know how long the whole is that an earlier one has split; allowed: "
                "one of the two"
            )
        _check_stages(model, SplitPoints.of(model, pipeline.cut), pipeline.ranks)
        if isinstance(strategy.gradients.split, ByIndex):
            raise StrategyError(
                "parallel.pipeline with gradients.split by_index: each stage has gradients of its "
                "own number; use a split that does not count them (by_bytes, by_percent)"
            )
        if isinstance(strategy.precision, HalfWeights):
            raise StrategyError(
                "parallel.pipeline with precision half_weights: a rank knows the parameters of its "
                "own stages alone, and gathers them without their masters; use precision autocast"
            )
    if tensor is not None and isinstance(optimizer, _OF_WHOLE_PARAMETERS):
        raise StrategyError(
            f"parallel.tensor with {type(optimizer).__name__}: it works with whole parameters, but "
            "a rank holds a share of them; use one that treats values one by one (SGD, AdamW)"
        )
    if isinstance(strategy.gradients.split, Optimal):
        raise StrategyError(
            "parallel with gradients.split optimal: it measures the network between all "
            "ranks, not between those that exchange gradients here; use another split (by_bytes)"
        )
    if isinstance(strategy.gradients.codec, Adaptive):
        raise StrategyError(
            "parallel with gradients.codec adaptive: it measures the network between all "
            "ranks, not between those that exchange gradients here; use its codec as it is"
        )


def _check_memory(model: nn.Module, strategy: Strategy) -> None:
    """Refuse what does not fit the model, and what does not go with a pipeline."""
    config = strategy.memory.recompute
    if config is None:
        return
    check_recompute(model, config)
    one_by_one = isinstance(config, Checkpoints) or (
        isinstance(config, Every) and config.every == 1
    )
    if strategy.parallel.pipeline is not None and not one_by_one:
        raise StrategyError(
            f"memory.recompute {config.kind} with parallel.pipeline: a region of several blocks "
            "could reach over a cut; allowed: {every: 1} and checkpoints"
        )


def _check_stages(model: nn.Module, split_points: SplitPoints, ranks: int) -> None:
    """Refuse a pipeline in which a rank would have nothing to train."""
    holders = split_points.tensor_stages(model)
    trained = [holders[name] for name, p in model.named_parameters() if p.requires_grad]
    for rank in range(ranks):
        if not any(stage % ranks == rank for stages in trained for stage in stages):
            raise ModelError(
                f"parallel.pipeline: the stages of pipeline rank {rank} have no parameter that "
                "requires a gradient; cut such that every rank has one"
            )


def _check_model(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ModelError(
                f"module {path or '(the model)'} is wrapped in DistributedDataParallel, which "
                "averages gradients itself; pass the plain module: accelerate(ddp.module, ...)"
            )
    device = device_of(model)
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ModelError(
                f"parameter {name} has no shape yet (a lazy module); run one forward before "
                "accelerate()"
            )
        if p.device.type == "meta":
            raise ModelError(
                f"parameter {name} is on the meta device and holds no values; "
                "call model.to_empty(device=...) and initialise it before accelerate()"
            )
        if p.device != device:
            raise ModelError(
                f"parameter {name} is on {p.device}, others on {device}; all parameters of a rank "
                "must be on one device"
            )
        if p.requires_grad and p.dtype not in _DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
            raise ModelError(
                f"parameter {name} is {p.dtype}, which gloo cannot add up; allowed: {allowed}"
            )


def _check_buffers(model: nn.Module) -> None:
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


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    missing = [n for n in ("step", "zero_grad", "param_groups") if not hasattr(optimizer, n)]
    if missing:
        raise ModelError(
            f"accelerate() takes an optimizer as its second argument, not a "
            f"{type(optimizer).__name__} (it has no {', '.join(missing)})"
        )
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ModelError(
                    f"the optimizer's group {number} holds a parameter of shape "
                    f"{tuple(parameter.shape)} (number {place}) that is not in the model, so its "
                    "gradient would never be averaged; build the optimizer from "
                    "model.parameters() of the model that you pass, after all changes to it"
                )
