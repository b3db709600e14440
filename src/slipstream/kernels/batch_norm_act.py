"""Batch normalisation, a residual and an activation, in one operation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.activations import ACTIVATIONS, ActivationName
from slipstream.kernels.compiled import compiled
from slipstream.kernels.surroundings import differentiates_plainly, needs_plain_functions

SMALL = 1 << 19
"""Values below which torch's functions are faster, as the checks before a compiled kernel take
50 us a call."""


Statistics = tuple[Tensor, Tensor]
"""Mean and biased variance of each channel of a batch."""


class BatchNormed(NamedTuple):
    """The result of `batch_norm_act`, and the statistics of the batch, without gradient."""

    values: Tensor
    mean: Tensor
    """(channels,), fp32, or fp64 for fp64."""
    variance: Tensor
    """(channels,), biased."""


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: ActivationName,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    statistics: Statistics | None = None,
) -> BatchNormed:
    """``activation((x - mean) / sqrt(variance + eps) * weight + bias + residual)``.

    Mean and variance are those of each channel of the batch, as in training. Torch's functions read
    and write all values once for each of the three; here one kernel reads them for the statistics
    and one writes the result. Backward computes again what the activation is given, so nothing is
    kept but x and, with a residual, that or the result. Second derivatives, transforms of
    ``torch.func`` and ``torch.jit.trace`` take torch's functions.

    Args:
        x: (batch, channels, ...), floating, with more than one value a channel; 16 bits are
            computed in fp32.
        weight, bias: (channels,); None: 1 and 0.
        residual: of the shape and type of ``x``.
        statistics: those of x, where they are known already (`batch_statistics`).

    Exactness: reordered.

    Source: ``fuse_bn_act_ops`` and ``fuse_bn_add_act_ops`` of Paddle; Ioffe and Szegedy (2015),
    arXiv 1502.03167.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> batch_norm_act(x, None, None, "relu").values.flatten()
        tensor([0.0000, 1.0000])
    """
    if is_small(x) or needs_plain_functions():
        return reference(x, weight, bias, activation, residual=residual, eps=eps)
    operation: Any = BatchNormAct
    return BatchNormed(*operation.apply(x, weight, bias, residual, activation, eps, statistics))


def is_small(x: Tensor) -> bool:
    """Whether torch's functions are faster on this tensor."""
    return x.numel() < SMALL


def batch_statistics(x: Tensor) -> Statistics:
    """Compute mean and variance of x: (batch, channels, ...), in fp32, or fp64 for fp64; without
    gradient."""
    mean, variance = compiled(_statistics_of, x.dtype, x.ndim)(x)
    return mean, variance


def _statistics_of(x: Tensor) -> Statistics:
    return _statistics(_wide(x))


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: ActivationName,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> BatchNormed:
    """The same by torch's functions, one after another."""
    normal = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    values = ACTIVATIONS[activation].forward(normal if residual is None else normal + residual)
    with torch.no_grad():
        wide = x.float() if x.dtype != torch.float64 else x
        variance, mean = torch.var_mean(wide, _around_channels(x), correction=0)
    return BatchNormed(values, mean, variance)


class BatchNormAct(torch.autograd.Function):
    """Named for traces."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: ActivationName,
        eps: float,
        statistics: Statistics | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.key = activation, x.dtype, x.ndim, weight is None, bias is None, residual is None
        values, mean, variance, rstd = compiled(_forward, *ctx.key, statistics is None)(
            x, weight, bias, residual, activation, eps, *(statistics or ())
        )
        keeps_output = residual is not None and ACTIVATIONS[activation].keeps_output
        kept = (values, None) if keeps_output else (None, residual)
        ctx.save_for_backward(x, weight, bias, mean, rstd, *kept)
        ctx.activation, ctx.eps = activation, eps
        ctx.mark_non_differentiable(mean, variance)
        return values, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd, *kept = ctx.saved_tensors
        if differentiates_plainly(gradient):
            # for second derivatives, which go through the statistics, too
            compute: Any = _backward
            variance, mean = torch.var_mean(_wide(x), _around_channels(x), correction=0)
            rstd = torch.rsqrt(variance + ctx.eps)
        else:
            compute = compiled(_backward, *ctx.key, gradient.dtype)
        given = (x, weight, bias, mean, rstd, *kept, ctx.activation, ctx.needs_input_grad[3])
        moved, dweight, dbias, dresidual = compute(gradient, *given)
        return (
            moved,
            dweight if ctx.needs_input_grad[1] else None,
            dbias if ctx.needs_input_grad[2] else None,
            *(dresidual, None, None, None),
        )


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: ActivationName,
    eps: float,
    *statistics: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = _wide(x)
    mean, variance = statistics or _statistics(wide)
    rstd = torch.rsqrt(variance + eps)
    total = _normalised(wide, weight, bias, residual, mean, rstd)
    return ACTIVATIONS[activation].forward(total).to(x.dtype), mean, variance, rstd


def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    values: Tensor | None,
    residual: Tensor | None,
    activation: ActivationName,
    residual_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients, with n values a channel, z the sum before the activation, and
    u = (x - mean) * rstd:
    dx = weight * rstd * (dz - u * sum(dz * u) / n - sum(dz) / n)."""
    act, wide = ACTIVATIONS[activation], _wide(x)
    if values is None:
        total = _normalised(wide, weight, bias, residual, mean, rstd)
        kept = act.forward(total) if act.keeps_output else total
    else:
        kept = _wide(values)
    dz = act.backward(_wide(gradient), kept)
    around = _around_channels(x)
    dbias = dz.sum(around)
    centred = wide - _channelwise(mean, x)
    dweight = (dz * centred).sum(around) * rstd
    values_a_channel = x.numel() // x.shape[1]
    factor = rstd if weight is None else rstd * weight
    slope, offset = rstd * dweight / values_a_channel, dbias / values_a_channel
    dx = dz - centred * _channelwise(slope, x) - _channelwise(offset, x)
    dx = dx * _channelwise(factor, x)
    dresidual = dz.to(x.dtype) if residual_learns else None
    return dx.to(x.dtype), dweight, dbias, dresidual


def _statistics(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel.

    On a CPU from two sums in one pass, as torch's algorithm (Welford) divides at every value. What
    is summed are the distances from the mean of the first sample, which lies so near the mean that
    the difference of the sums loses at most log2(batch) bits.
    """
    around = _around_channels(wide)
    if wide.device.type != "cpu":
        variance, mean = torch.var_mean(wide, around, correction=0)
        return mean, variance
    near = wide[:1].mean(around)
    distance, number = wide - _channelwise(near, wide), wide.numel() // wide.shape[1]
    offset = distance.sum(around) / number
    variance = (distance * distance).sum(around) / number - offset * offset
    return near + offset, variance.clamp_min(0)


def _normalised(
    wide: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> Tensor:
    scale = rstd if weight is None else rstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    total = wide * _channelwise(scale, wide) + _channelwise(shift, wide)
    return total if residual is None else total + _wide(residual)


def _channelwise(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.ndim - 2))


def _around_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
