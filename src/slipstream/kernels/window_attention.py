"""Attention inside windows, as Swin computes it, in one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import UsageError

if torch.version.cuda is None:  # without Triton, which takes half a second to import
    OnCuda: Any = None
else:
    from slipstream.kernels._window_attention_triton import WindowAttention as OnCuda


NEVER = -69.0
"""A score so far below the largest of its row has a probability of 1e-30, which is taken as 0."""


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """``dropout(softmax(scale query key^T + bias + mask)) value``, window by window.

    Written with torch's functions these are seven operations and as many passes over all
    probabilities, which are kept for backward. On CUDA one kernel of Triton computes them,
    and backward computes the probabilities again, so that nothing of their size is kept. On a CPU
    scale, bias and mask ride on the first product, and the probabilities are kept. Swin's mask
    subtracts 100, which leaves probabilities below the smallest normal number of fp32: processors
    of Intel take up to 26 times as long to multiply such numbers, so here they are 0.

    Args:
        query, key, value: (windows, heads, positions, channels), in any order of memory.
        bias: (heads, positions, positions), by relative position.
        mask: (masks, positions, positions), added to the scores, for windows that hold pieces of
            the map that do not belong together; window ``w`` takes mask ``w % masks``. No gradient.
        scale: None: 1 / sqrt(channels).
        dropout: the chance of each probability to become 0.

    Returns:
        (windows, heads, positions, channels), laid out so that ``.transpose(1, 2)`` is contiguous.

    Exactness: reordered. Dropout draws other values than torch's on CUDA.

    Raises:
        UsageError: shapes that do not fit.

    Source: Liu et al., "Swin Transformer" (2021), arXiv 2103.14030; recomputation in backward as in
    Dao et al., "FlashAttention" (2022), arXiv 2205.14135.

    Example:
        >>> q, k, v = torch.randn(3, 8, 2, 49, 32)
        >>> window_attention(q, k, v, torch.zeros(2, 49, 49)).shape
        torch.Size([8, 2, 49, 32])
    """
    _check(query, key, value, bias, mask, dropout)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    kernel = _kernel(query.device)
    result: Tensor = kernel.apply(query, key, value, bias, mask, scale, dropout)
    return result


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The same by torch's functions, one after another."""
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(2, 3)
    scores = scores + bias
    if mask is not None:
        windows, heads, positions, _ = scores.shape
        scores = scores.view(-1, len(mask), heads, positions, positions) + mask.unsqueeze(1)
        scores = scores.view(windows, heads, positions, positions)
    return F.dropout(scores.softmax(-1), dropout) @ value


class _OnCpu(torch.autograd.Function):
    """Scale, bias and mask in the first product; probabilities are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        mask: Tensor | None,
        scale: float,
        dropout: float,
    ) -> Tensor:
        windows, heads, positions, channels = query.shape
        query, key, value = (t.reshape(-1, positions, channels) for t in (query, key, value))
        added = bias if mask is None else bias + mask.unsqueeze(1)
        scores = added.repeat(windows * heads * positions**2 // added.numel(), 1, 1, 1)[:windows]
        scores = scores.view(-1, positions, positions)
        scores.baddbmm_(query, key.transpose(1, 2), alpha=scale)
        if mask is not None:
            scores.sub_(scores.amax(-1, keepdim=True))
            F.threshold(scores, NEVER, float("-inf"), inplace=True)
        chances = scores.softmax(-1)
        kept = (
            torch.empty_like(chances).bernoulli_(1 - dropout) / (1 - dropout) if dropout else None
        )
        out = torch.bmm(chances if kept is None else chances * kept, value)
        ctx.save_for_backward(query, key, value, chances, kept)
        ctx.scale, ctx.shape = scale, (windows, heads, positions, channels)
        sides = out.view(ctx.shape).transpose(1, 2)
        return sides.contiguous().transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, chances, kept = ctx.saved_tensors
        windows, heads, positions, channels = ctx.shape
        gradient = gradients[0].reshape(-1, positions, channels)
        moved = torch.bmm(gradient, value.transpose(1, 2))
        dropped = chances
        if kept is not None:
            moved, dropped = moved * kept, chances * kept
        dvalue = torch.bmm(dropped.transpose(1, 2), gradient)
        dscores = torch.ops.aten._softmax_backward_data(moved, chances, -1, chances.dtype)
        dbias = dscores.view(windows, heads, positions, positions).sum(0)
        unused = dvalue  # where beta is 0
        dquery = torch.baddbmm(unused, dscores, key, beta=0, alpha=ctx.scale)
        dkey = torch.baddbmm(unused, dscores.transpose(1, 2), query, beta=0, alpha=ctx.scale)
        return (
            *(t.view(ctx.shape) for t in (dquery, dkey, dvalue)),
            *(dbias, None, None, None),
        )


def _kernel(device: torch.device) -> Any:
    """The autograd function for a device."""
    if device.type != "cuda":
        return _OnCpu
    return OnCuda


def _check(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, dropout: float
) -> None:
    if query.ndim != 4 or not query.shape == key.shape == value.shape:
        raise UsageError(
            f"query, key and value have the shapes {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}; allowed: one shape (windows, heads, positions, channels)"
        )
    windows, heads, positions, _ = query.shape
    if bias.shape != (heads, positions, positions):
        raise UsageError(
            f"bias has the shape {tuple(bias.shape)}; allowed: {(heads, positions, positions)}, "
            "(heads, positions, positions)"
        )
    if mask is not None and (
        mask.shape[1:] != (positions, positions) or not len(mask) or windows % len(mask)
    ):
        raise UsageError(
            f"mask has the shape {tuple(mask.shape)}; allowed: (masks, {positions}, {positions}) "
            f"with a number of masks that divides {windows} windows"
        )
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout is {dropout}; allowed: from 0 on and below 1")
