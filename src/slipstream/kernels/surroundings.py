"""The surroundings of a call: autocast, transforms that follow torch's functions only, Dynamo."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def needs_plain_functions() -> bool:
    """Whether a transform of ``torch.func`` or ``torch.jit.trace`` is at work.

    They look into torch's functions, but not into a kernel: a kernel then is its ``reference``.
    """
    jit: Any = torch.jit
    return torch._C._are_functorch_transforms_active() or bool(jit.is_tracing())


def differentiates_plainly(gradient: Tensor) -> bool:
    """Whether backward is differentiated itself (``create_graph``), or is under a transform, such
    as for ``is_grads_batched``: a kernel then computes by torch's functions, nothing in place."""
    batched: bool = torch._C._functorch.is_legacy_batchedtensor(gradient)
    return torch.is_grad_enabled() or batched or needs_plain_functions()


def is_compiled() -> bool:
    """Whether this runs inside of a function that ``torch.compile`` compiles: Dynamo would compile
    what is called from here on. ``torch.compiler.is_compiling()`` is about what it traces now."""
    try:
        return bool(torch._C._dynamo.eval_frame.get_eval_frame_callback())
    except AttributeError:  # torch has moved it: nobody is told
        return False


def product_type(operand: Tensor) -> torch.dtype:
    """The type of an operand in a product, which autocast may change.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     product_type(torch.zeros(1)), product_type(torch.zeros(1, dtype=torch.float64))
        (torch.bfloat16, torch.float64)
    """
    if not operand.is_floating_point() or operand.dtype == torch.float64:
        return operand.dtype
    device = operand.device.type
    return torch.get_autocast_dtype(device) if _is_autocast(device) else operand.dtype


def as_in_product(operand: Tensor) -> Tensor:
    """An operand as autocast hands it to a product."""
    wanted = product_type(operand)
    return operand if operand.dtype == wanted else operand.to(wanted)


def outside_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operations compute in the types that they are given.

    Backward needs it, too, as it runs under the autocast of who called it.
    """
    return (
        torch.autocast(device.type, enabled=False) if _is_autocast(device.type) else nullcontext()
    )


def _is_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
