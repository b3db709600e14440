"""The outer parameters in the model for a while: as it evaluates, and is saved, best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.local.meeting import Meeting


@contextmanager
def outer_view(
    model: nn.Module,
    meetings: Sequence[Meeting],
    trained: Iterable[nn.Parameter],
    frozen: Sequence[tuple[str, nn.Parameter]],
) -> Iterator[None]:
    """Inside, a model has the outer parameters, and buffers as of the last meetings; afterwards its
    own.

    Args:
        model: of this rank.
        meetings: of its fragments.
        trained, frozen: its parameters at the start.

    Raises:
        UsageError: what is frozen was changed inside.
    """
    with torch.no_grad(), _merged_out(model, frozen):
        # also those of a module that the script takes out while it evaluates
        own = [*trained, *(p for _, p in frozen)]
        kept = {p: p.detach().clone() for p in dict.fromkeys([*model.parameters(), *own])}
        buffers = [meeting.buffers.read() for meeting in meetings]
        held = dict(model.named_buffers(remove_duplicate=False))
        counters = [(b, b.clone()) for b in held.values() if _counts(b)]
        for meeting in meetings:
            meeting.write(meeting.outer)
            if meeting.done:
                meeting.buffers.write(meeting.buffers.shared)
    try:
        yield
    finally:
        with torch.no_grad(), _merged_out(model, frozen):
            changed = [name for name, p in frozen if _apart(p, kept[p])]
            for p, value in kept.items():
                p.copy_(value)
            for meeting, values in zip(meetings, buffers, strict=True):
                meeting.buffers.write(values, held)
            for buffer, value in counters:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
    if changed:
        raise UsageError(
            f"{changed[0]}, which is frozen, was changed inside session.evaluating(), after which "
            "all parameters are as before; layers that merge LoRA weights in model.eval() must "
            "unmerge them in it, too: call model.train() inside the with block"
        )


@contextmanager
def modes_kept(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Refuse that an optimizer changes between the parameters of ``train()`` and ``eval()`` inside,
    as schedule-free ones do: afterwards parameters are as before, and would be changed once more.

    Raises:
        UsageError: one is in another mode than before.
    """
    before = [(optimizer, _modes(optimizer)) for optimizer in optimizers]
    yield
    for optimizer, modes in before:
        if _modes(optimizer) != modes:
            name = type(optimizer).__name__
            raise UsageError(
                f"{name}.eval() or train() was called inside session.evaluating(), after which all "
                "parameters are as before, and no longer those of its mode: call optimizer.eval() "
                "before the with block, and train() after it (in a LightningModule in "
                "on_validation_model_eval() and on_validation_model_train())"
            )


def _modes(optimizer: torch.optim.Optimizer) -> list[dict[str, bool]]:
    if not all(callable(getattr(optimizer, verb, None)) for verb in ("eval", "train")):
        return []
    groups = optimizer.param_groups
    return [{k: v for k, v in group.items() if isinstance(v, bool)} for group in groups]


def _merged_out(
    model: nn.Module, frozen: Sequence[tuple[str, nn.Parameter]]
) -> AbstractContextManager[None]:
    return _adapters_out(model) if frozen and not model.training else nullcontext()


def _counts(buffer: torch.Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.is_inference())


def _apart(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether more than rounding lies between them, as where values are added and taken off."""
    if not now.is_floating_point():  # quantized anew where something was merged
        return False
    far = torch.linalg.vector_norm(now - before)
    return bool(far > 8 * torch.finfo(now.dtype).eps * torch.linalg.vector_norm(before))


@contextmanager
def _adapters_out(model: nn.Module) -> Iterator[None]:
    """Inside, a model that evaluates is as in training: adapters that ``eval()`` merges into frozen
    weights, as loralib's, come out with the values that went in, and go in again with those of
    then."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        model.eval()
        for module, mode in modes:
            module.training = mode
