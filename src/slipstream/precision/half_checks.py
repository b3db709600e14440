"""Refuse models and optimizers that half weights cannot serve, before anything changes."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from slipstream.errors import ModelError
from slipstream.precision.casts import HALF_TYPES
from slipstream.precision.float_modules import Modules, check_not_tied
from slipstream.strategy import HalfType


def check_half_weights(
    model: nn.Module, optimizer: Optimizer, dtype: HalfType, floats: Modules
) -> None:
    """Refuse a model and an optimizer that do not fit ``dtype``, the fp32 modules or each other.

    Raises:
        ModelError: the model has half weights already; the optimizer is not a
            torch.optim.Optimizer,
            computes gradients itself or holds no parameter of the model; no parameter would change;
            or fp16 parameters would mix with bf16.
        StrategyError: a parameter is tied to one of a module that stays fp32.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype in HALF_TYPES.values() and parameter.grad_dtype == torch.float32:
            raise ModelError(
                f"precision half_weights on a model that already has half weights ({name} is "
                f"{parameter.dtype} with fp32 gradients) or is a copy of such a model; call "
                "close() first, and copy the model before half_weights"
            )
    if problem := _problem(model, optimizer):
        name = type(optimizer).__name__
        raise ModelError(f"precision half_weights with {name}{problem}")
    check_not_tied(model, floats)
    _check_types(model, dtype, floats)


def _problem(model: nn.Module, optimizer: object) -> str | None:
    """Why an optimizer cannot step on masters; None: it can."""
    if not isinstance(optimizer, Optimizer):
        return (
            ", which is not a torch.optim.Optimizer and has no step hooks; use a "
            "torch.optim.Optimizer, or precision autocast"
        )
    if not hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
        return (
            ", whose __init__ does not call Optimizer.__init__(), so that there are no hooks where "
            "its state is loaded; use the optimizer inside of it, or precision autocast"
        )
    if isinstance(optimizer, LBFGS):
        return (
            ": it computes losses inside its step, where the parameters are the fp32 masters; use "
            "another optimizer, or precision autocast"
        )
    if callable(getattr(optimizer, "eval", None)):
        return (
            ": its eval() and train() change parameters outside of step(), where these are 16-bit; "
            "use another optimizer, or precision autocast"
        )
    own = {*model.parameters()}
    if any(p in own for group in optimizer.param_groups for p in group["params"]):
        return None
    return (
        ", which holds no parameter of the model; build it from model.parameters() of the model "
        "that you pass"
    )


def _check_types(model: nn.Module, dtype: HalfType, floats: Modules) -> None:
    """Refuse a mix of fp16 and bf16, and a model of which no parameter would change."""
    if dtype == "bf16" and any(p.dtype == torch.float16 for p in model.parameters()):
        raise ModelError(
            "precision half_weights with dtype bf16 on a model with fp16 parameters; "
            "allowed: dtype fp16, or model.float() first"
        )
    wide = {p for module in floats.values() for p in module.parameters()}
    others = {name: p.dtype for name, p in model.named_parameters() if p not in wide}
    if not {torch.float32, HALF_TYPES[dtype]} & {*others.values()}:
        seen = ", ".join(f"{name} is {its}" for name, its in [*others.items()][:3])
        raise ModelError(
            "precision half_weights would change no parameter: outside of the modules that stay "
            f"fp32, none is fp32 ({seen or 'there is none'}); call model.float() first, or name "
            "fewer float_modules"
        )
