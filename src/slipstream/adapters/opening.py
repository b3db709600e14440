"""Sessions opened where a framework prepares a model and its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import ModelError, StrategyError, UsageError, warn
from slipstream.session.accelerate import accelerate, strategy_of
from slipstream.session.session import Session
from slipstream.strategy import DataConfig, Strategy, keeps_state
from slipstream.trace.event import OWING_CODEC, Framework

GivenStrategy = Strategy | Mapping[str, Any] | str | Path | None
"""A strategy as ``slipstream.accelerate`` takes it."""


SESSION_FILE = "session.pt"
"""In a checkpoint of a framework, beside the model's, the optimizer's and the scheduler's files."""


def open_session(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: GivenStrategy,
    *,
    framework: str,
    accumulation: str,
    precision: str | None,
    scaler: object | None,
    compiled_copy: str | None = None,
) -> Session[Any, Any]:
    """Open a session, and refuse what the strategy and the framework would both do.

    Args:
        framework: its name, for messages.
        accumulation: the framework's own setting for it.
        precision: the framework's own setting, where one is at work.
        scaler: the framework's own, which scales losses.
        compiled_copy: the framework's own setting by which the script trains a copy of the model's
            outermost module.

    Raises:
        UsageError: both accumulate gradients, deal out data or choose a precision; a codec would
            keep gradients under a scale that the framework changes; or ranks would not stay in
            step, as the framework's own collectives need.
    """
    with suppress(StrategyError):  # accelerate() raises it, on all ranks alike
        wanted = strategy_of(strategy)
        for problem in _problems(wanted, framework, accumulation, precision, scaler):
            raise UsageError(problem)
        if wanted.precision is not None and compiled_copy is not None:
            raise UsageError(
                f"precision in the strategy and {compiled_copy} of {framework}, which trains a "
                "copy of the model's outermost module, without it: leave one of them out, or let "
                f"{framework} choose the precision"
            )
        if wanted.precision is not None and type(model) is nn.ModuleList:
            raise UsageError(
                "precision in the strategy with several models, which the script calls one by one: "
                f"leave it out, and let {framework} choose the precision: mixed_precision='bf16'"
            )
    try:
        session = accelerate(model, optimizer, strategy=strategy)
    except ModelError as error:
        if _holds_others(optimizer, model):
            error.add_note(
                f"under {framework}: where they are those of a loss, make its module a part of the "
                "model before the trainer is made: model.head = loss.classifier (of a "
                "SentenceTransformer, which runs its parts in turn: model[0].head), or prepare() "
                "it beside the model, where the script does; freeze what is not to train, as the "
                "guide of a loss: guide.requires_grad_(False)"
            )
        raise
    codec = None if scaler is None else precision
    own = {"gradients.accumulate": accumulation, "precision": precision, OWING_CODEC: codec}
    session.loop_is_of(Framework(framework, {key: name for key, name in own.items() if name}))
    return session


def _holds_others(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    own = {id(p) for p in model.parameters()}
    return any(id(p) not in own for group in optimizer.param_groups for p in group["params"])


def _problems(
    wanted: Strategy,
    framework: str,
    accumulation: str,
    precision: str | None,
    scaler: object | None,
) -> Iterator[str]:
    if wanted.gradients.accumulate > 1:
        yield (
            f"gradients.accumulate {wanted.gradients.accumulate} under {framework}, which "
            f"accumulates by itself: leave it out, and set {accumulation}"
        )
    if wanted.precision is not None and precision is not None:
        yield f"precision in the strategy and {precision} of {framework}: leave one of them out"
    codec = wanted.gradients.codec
    if scaler is not None and codec is not None and keeps_state(codec):
        yield (
            f"the codec {codec.kind}, which owes a part of the gradients to later updates, under "
            f"{precision} of {framework}, whose loss scale changes meanwhile: leave that out, and "
            "set precision: {kind: autocast, dtype: fp16} in the strategy"
        )
    if scaler is not None and wanted.gradients.transport.kind == "sharded":
        yield (
            f"transport sharded under {precision} of {framework}, whose scaler reads all gradients "
            "where a rank has a share: leave that out, and set precision: {kind: autocast, "
            "dtype: fp16} in the strategy"
        )
    if wanted.data != DataConfig():
        yield f"data in the strategy under {framework}, which has its own loaders: leave it out"
    if wanted.parallel.active:
        yield (
            f"parallel in the strategy under {framework}, whose loop runs whole models: write a "
            "loop with slipstream.accelerate(), or leave it out"
        )
    if wanted.local is not None and (wanted.local.stretch or wanted.local.rendezvous):
        name = "stretch" if wanted.local.stretch else "rendezvous"
        yield (
            f"local.{name} under {framework}, which keeps ranks in step, and deals out data to the "
            "ranks of one job: write a loop with slipstream.accelerate(), or leave it out"
        )


def several(what: str, prepared_by: str, ended_by: str = "") -> ModelError:
    """Say that a session has one model and one optimizer; ``ended_by``: a call that ends the one
    before."""
    over = f"; where an earlier training is over, end it first: {ended_by}" if ended_by else ""
    if what == "models":
        over += "; freeze one that is not trained: teacher.requires_grad_(False)"
    return ModelError(
        f"{prepared_by} got several {what}: a session trains one model with one optimizer; call "
        f"slipstream.accelerate() for each of them in a loop of your own{over}"
    )


def check_backward(arguments: Sequence[object], named: Mapping[str, object]) -> None:
    """Refuse arguments of ``Tensor.backward`` that a session's does not take.

    Raises:
        UsageError: another than ``retain_graph``.
    """
    if arguments or set(named) - {"retain_graph"}:
        seen = ", ".join([*map(repr, arguments), *sorted(set(named) - {"retain_graph"})])
        raise UsageError(f"backward({seen}) under a session; allowed: retain_graph")


def check_clips_all(session: Session[Any, Any], clipped: Iterable[torch.Tensor]) -> None:
    """Refuse the norm of some gradients: a session's is that of all.

    Raises:
        UsageError: parameters of the model that are trained are not among ``clipped``.
    """
    held = {id(p) for p in clipped}
    named = session.model.named_parameters()
    left = [name for name, p in named if p.requires_grad and id(p) not in held]
    if left:
        raise UsageError(
            f"clipping by a norm without {left[0]}; a session clips the 2-norm of all gradients of "
            "the model: clip all parameters, or freeze those that you do not train, before the "
            "session opens: parameter.requires_grad_(False)"
        )


def warn_inside_window(saved: object) -> None:
    """Warn of a checkpoint of a framework that has no state of the session."""
    warn(
        f"{saved} is saved inside an accumulation window, whose gradients it lacks, as it would "
        "under DDP; it lacks the session's state, too: codecs and local training start anew from "
        "it. Save and validate where a window ends",
    )
