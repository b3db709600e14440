"""Sessions opened where a framework prepares a model and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import ModelError, UsageError
from slipstream.session.accelerate import accelerate
from slipstream.session.session import Session
from slipstream.strategy import Strategy

GivenStrategy = Strategy | Mapping[str, Any] | str | Path | None
"""A strategy as ``slipstream.accelerate`` takes it."""


def open_session(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: GivenStrategy,
    *,
    framework: str,
    accumulation: str,
    precision: str | None,
) -> Session[Any, Any]:
    """Open a session, and refuse what the strategy and the framework would both do.

    Args:
        framework: its name, for messages.
        accumulation: the framework's own setting for it.
        precision: the framework's own setting, where one is at work.

    Raises:
        UsageError: both accumulate gradients, or both choose a precision.
    """
    session = accelerate(model, optimizer, strategy=strategy)
    twice, wanted = "", session.strategy
    if wanted.gradients.accumulate > 1:
        twice = (
            f"gradients.accumulate {wanted.gradients.accumulate} under {framework}, which "
            f"accumulates by itself: leave it out, and set {accumulation}"
        )
    elif wanted.precision is not None and precision is not None:
        twice = f"precision in the strategy and {precision} of {framework}: leave one of them out"
    if twice:
        session.close()
        raise UsageError(twice)
    return session


def several(what: str, prepared_by: str) -> ModelError:
    """Say that a session has one model and one optimizer."""
    return ModelError(
        f"{prepared_by} got several {what}: a session trains one model with one optimizer; call "
        "slipstream.accelerate() for each of them in a loop of your own"
    )
