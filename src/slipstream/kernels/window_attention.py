"""Attention inside windows, as Swin computes it, in one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import UsageError
from slipstream.kernels._window_attention_plain import dropped_out, gradients, probabilities
from slipstream.kernels.surroundings import as_in_product, needs_plain_functions, outside_autocast

if torch.version.cuda is None:  # without Triton, which takes half a second to import
    OnCuda: Any = None
else:
    from slipstream.kernels._window_attention_triton import WindowAttention as OnCuda


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Query, key, value, bias and mask."""
NEVER = -69.0
"""A score so far below the largest of its row has a probability of 1e-30, which is taken as 0."""
MOST_IN_KERNEL = 64
"""Positions of a window: the kernels hold all keys of a row, 144 need more memory than an H200 has
for a block. In fp32 they took three times as long as torch's functions there."""


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
    probabilities, which are kept for backward. On CUDA one kernel of Triton computes them, in 16
    bits for windows of up to 64 positions, and backward computes the probabilities again, so that
    nothing of their size is kept; other types and larger windows take torch's functions. On a CPU
    scale, bias and mask ride on the first product, and the probabilities are kept. Swin's mask
    subtracts 100, which leaves probabilities below the smallest normal number of fp32: processors
    of Intel take up to 26 times as long to multiply such numbers, so here they are 0.

    Args:
        query, key, value: (windows, heads, positions, channels), in any order of memory, of one
            floating type; autocast casts them, as it does operands of products.
        bias: (heads, positions, positions), by relative position, of any floating type.
        mask: (masks, positions, positions), added to the scores, for windows that hold pieces of
            the map that do not belong together; window ``w`` takes mask ``w % masks``. Of any
            floating type, without a gradient.
        scale: None: 1 / sqrt(channels).
        dropout: the chance of each probability to become 0.

    Returns:
        (windows, heads, positions, channels), laid out so that ``.transpose(1, 2)`` is contiguous.

    Bias and mask are added in the type of the query, as ``scaled_dot_product_attention`` does under
    autocast. Second derivatives, transforms of ``torch.func`` and ``torch.jit.trace`` are computed
    by torch's functions.

    Exactness: reordered. Dropout draws other values than torch's on CUDA.

    Raises:
        UsageError: shapes, types or devices that do not fit, or a mask that requires a gradient.

    Source: Liu et al., "Swin Transformer" (2021), arXiv 2103.14030; recomputation in backward as in
    Dao et al., "FlashAttention" (2022), arXiv 2205.14135.

    Example:
        >>> q, k, v = torch.randn(3, 8, 2, 49, 32)
        >>> window_attention(q, k, v, torch.zeros(2, 49, 49)).shape
        torch.Size([8, 2, 49, 32])
    """
    query, key, value = as_in_product(query), as_in_product(key), as_in_product(value)
    _check(query, key, value, bias, mask, dropout)
    bias, mask = bias.to(query.dtype), None if mask is None else mask.to(query.dtype)
    kernel = _kernel(query)
    if kernel is None:
        plain = reference(query, key, value, bias, mask, scale=scale, dropout=dropout)
        return plain.transpose(1, 2).contiguous().transpose(1, 2)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    bias = bias.contiguous()  # here: a copy that the kernel makes has no second derivatives
    with outside_autocast(query.device):
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
    scale = max(int(query.shape[-1]), 1) ** -0.5 if scale is None else scale
    return F.dropout(probabilities(query, key, bias, mask, scale), dropout) @ value


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
        windows, heads, positions, _ = query.shape
        added = bias if mask is None else bias + mask.unsqueeze(1)
        scores = added.repeat(windows * heads * positions**2 // added.numel(), 1, 1, 1)[:windows]
        scores = scores.view(-1, positions, positions)
        scores.baddbmm_(_flat(query), _flat(key).transpose(1, 2), alpha=scale)
        if mask is not None:
            scores.sub_(scores.amax(-1, keepdim=True))
            F.threshold(scores, NEVER, float("-inf"), inplace=True)
        chances = scores.softmax(-1)
        kept = dropped_out(chances, dropout) if dropout else None
        out = torch.bmm(chances if kept is None else chances * kept, _flat(value))
        ctx.save_for_backward(query, key, value, bias, mask, chances, kept)
        ctx.scale = scale
        sides = out.view(query.shape).transpose(1, 2)
        return sides.contiguous().transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, chances, kept = ctx.saved_tensors
        compute = _recorded_gradients if torch.is_grad_enabled() else _gradients
        with outside_autocast(gradient.device):
            return *compute(tuple(inputs), ctx.scale, chances, kept, gradient), None, None, None


def _gradients(
    inputs: Inputs, scale: float, chances: Tensor, kept: Tensor | None, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Compute gradients of query, key, value and bias from the probabilities."""
    query, key, value, bias, _ = inputs
    gradient = _flat(gradient)
    moved = torch.bmm(gradient, _flat(value).transpose(1, 2))
    dropped = chances
    if kept is not None:
        moved, dropped = moved * kept, chances * kept
    dvalue = torch.bmm(dropped.transpose(1, 2), gradient)
    dscores = torch.ops.aten._softmax_backward_data(moved, chances, -1, chances.dtype)
    dbias = dscores.view(-1, *bias.shape).sum(0)
    unused = dvalue  # where beta is 0
    dquery = torch.baddbmm(unused, dscores, _flat(key), beta=0, alpha=scale)
    dkey = torch.baddbmm(unused, dscores.transpose(1, 2), _flat(query), beta=0, alpha=scale)
    return *(t.view(query.shape) for t in (dquery, dkey, dvalue)), dbias


def _recorded_gradients(
    inputs: Inputs, scale: float, chances: Tensor, kept: Tensor | None, gradient: Tensor
) -> tuple[Tensor, ...]:
    """The same, differentiable."""
    whole = None if kept is None else kept.view(*inputs[0].shape[:2], *kept.shape[1:])
    return gradients(inputs, scale, whole, gradient)


def _flat(tensor: Tensor) -> Tensor:
    """Windows and heads as one axis."""
    return tensor.reshape(-1, *tensor.shape[2:])


def _kernel(query: Tensor) -> Any:
    """The autograd function for a query; None: torch's functions, see `window_attention`."""
    if needs_plain_functions() or not query.numel():
        return None
    if not query.is_cuda:
        return _OnCpu
    return OnCuda if query.dtype.itemsize == 2 and query.shape[2] <= MOST_IN_KERNEL else None


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
    if any(
        t.dtype != query.dtype or t.device != query.device or not t.is_floating_point()
        for t in (query, key, value)
    ):
        raise UsageError(
            f"query, key and value are {_kinds(query, key, value)}; allowed: one floating type on "
            "one device"
        )
    for name, added in (("bias", bias), ("mask", mask)):
        if added is not None and (not added.is_floating_point() or added.device != query.device):
            raise UsageError(
                f"{name} is {_kinds(added)}; allowed: a floating type on {query.device}; it is "
                f"added to the scores: for a bool, torch.where({name}, 0.0, -100.0)"
            )
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            "mask requires a gradient, which window_attention does not compute; allowed: "
            "mask.detach(), or what learns as part of bias"
        )


def _kinds(*tensors: Tensor) -> str:
    return ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
