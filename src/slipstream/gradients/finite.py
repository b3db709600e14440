"""Whether gradients are finite, with few calls where they are many and small."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slipstream.codecs.compressor import any_infinite

SMALL = 16 * 1024
"""Elements below which a call costs more than its work."""


def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether no value is infinite or NaN.

    Example:
        >>> all_finite([torch.ones(3), torch.tensor([1.0, torch.inf])])
        False
    """
    values = [_real(stored(gradient)) for gradient in gradients]
    small = [v for v in values if v.numel() < SMALL and v.numel() and v.is_floating_point()]
    large = [v for v in values if v.numel() >= SMALL or not v.is_floating_point()]
    found = [any_infinite(v) for v in large]
    if small:
        norms = torch.stack(torch._foreach_norm(small))
        found.append(norms.isfinite().all().logical_not())
    if not found or not torch.stack(found).any():
        return True
    # A norm overflows sooner than a value.
    return not torch.stack([any_infinite(v) for v in values if v.numel()]).any()


def first_nonfinite(gradients: Iterable[tuple[str, torch.Tensor | None]]) -> str:
    """The name of the first gradient that is not finite; empty: there is none."""
    found = (name for name, one in gradients if one is not None and not all_finite([one]))
    return next(found, "")


def stored(gradient: torch.Tensor) -> torch.Tensor:
    """The values that a gradient stores: of a sparse one those of its rows."""
    return gradient._values() if gradient.is_sparse else gradient


def _real(values: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
