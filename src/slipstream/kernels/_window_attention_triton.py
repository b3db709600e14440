"""Window attention in Triton: one kernel forward, two backward.

[Note: Whole rows] A window has 49 to 144 positions, so a program holds all keys of a row at once:
its softmax needs no running maximum. Backward computes the probabilities again, from the logarithm
of their sum, which forward leaves for each row.

[Note: Gradient of the bias] All windows of a batch share it. Programs of the first backward kernel
take one head and go through some of the windows, so that they add in registers and leave one
partial sum each; the sum over those has one order, so results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels._window_attention_plain import gradients as recorded_gradients
from slipstream.kernels.surroundings import outside_autocast


@triton.jit
def _probabilities(
    query, key, bias, mask, heads_at, window, m, n, positions, scale, has_mask: tl.constexpr
):
    """Scores of rows ``m`` and columns ``n``; minus infinity beyond the last column."""
    inside = (m[:, None] < positions) & (n[None, :] < positions)
    at = m[:, None] * positions + n[None, :]
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores += tl.load(bias + heads_at * positions * positions + at, inside, 0.0).to(tl.float32)
    if has_mask:
        scores += tl.load(mask + window * positions * positions + at, inside, 0.0).to(tl.float32)
    return tl.where(n[None, :] < positions, scores, -float("inf"))


@triton.jit
def _kept(seed, row, m, n, positions, dropout):
    """Draw a probability's factor: 0, or 1 / (1 - dropout)."""
    drawn = tl.rand(seed, (row * positions + m[:, None]) * positions + n[None, :])
    return tl.where(drawn >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _write_kept(
    kept, seed, positions, dropout, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr
):
    row = tl.program_id(0)
    m, n = tl.program_id(1) * rows + tl.arange(0, rows), tl.arange(0, columns)
    values = _kept(seed, row, m, n, positions, dropout)
    at = (row.to(tl.int64) * positions + m[:, None]) * positions + n[None, :]
    inside = (m[:, None] < positions) & (n[None, :] < positions)
    tl.store(kept + at, values.to(kept.dtype.element_ty), inside)


@triton.jit
def _load(tensor, b, h, rows, d, stride_b, stride_h, stride_n, stride_d, positions, channels):
    at = tl.cast(b, tl.int64) * stride_b + h * stride_h
    at += rows[:, None] * stride_n + d[None, :] * stride_d
    return tl.load(tensor + at, (rows[:, None] < positions) & (d[None, :] < channels), 0.0)


@triton.jit
def _store(
    tensor, values, b, h, rows, d, stride_b, stride_h, stride_n, stride_d, positions, channels
):
    at = tl.cast(b, tl.int64) * stride_b + h * stride_h
    at += rows[:, None] * stride_n + d[None, :] * stride_d
    inside = (rows[:, None] < positions) & (d[None, :] < channels)
    tl.store(tensor + at, values.to(tensor.dtype.element_ty), inside)


@triton.jit
def _forward(
    q, k, v, bias, mask, out, log_sums, seed,
    qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd, ob, oh, on, od,
    heads, masks, positions, channels, scale, dropout,
    has_mask: tl.constexpr, has_dropout: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    m = tl.program_id(1) * rows + tl.arange(0, rows)
    n, d = tl.arange(0, columns), tl.arange(0, depth)
    query = _load(q, b, h, m, d, qb, qh, qn, qd, positions, channels)
    key = _load(k, b, h, n, d, kb, kh, kn, kd, positions, channels)
    scores = _probabilities(query, key, bias, mask, h, b % masks, m, n, positions, scale, has_mask)
    highest = tl.max(scores, 1)
    chances = tl.exp(scores - highest[:, None])
    total = tl.sum(chances, 1)
    chances = chances / total[:, None]
    row = b * heads + h
    tl.store(log_sums + row * positions + m, highest + tl.log(total), m < positions)
    if has_dropout:
        chances *= _kept(seed, row, m, n, positions, dropout)
    value = _load(v, b, h, n, d, vb, vh, vn, vd, positions, channels)
    result = tl.dot(chances.to(value.dtype), value, input_precision="ieee")
    _store(out, result, b, h, m, d, ob, oh, on, od, positions, channels)


@triton.jit
def _backward_queries(
    q, k, v, bias, mask, out, log_sums, grad, dq, dbias, seed,
    qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd, ob, oh, on, od,
    gb, gh, gn, gd, db, dh, dn, dd,
    windows, heads, masks, positions, channels, scale, dropout, each,
    has_mask: tl.constexpr, has_dropout: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    h, part = tl.program_id(0), tl.program_id(2)
    m = tl.program_id(1) * rows + tl.arange(0, rows)
    n, d = tl.arange(0, columns), tl.arange(0, depth)
    sums = tl.zeros((rows, columns), tl.float32)
    for b in range(part * each, tl.minimum((part + 1) * each, windows)):
        query = _load(q, b, h, m, d, qb, qh, qn, qd, positions, channels)
        key = _load(k, b, h, n, d, kb, kh, kn, kd, positions, channels)
        value = _load(v, b, h, n, d, vb, vh, vn, vd, positions, channels)
        gradient = _load(grad, b, h, m, d, gb, gh, gn, gd, positions, channels)
        result = _load(out, b, h, m, d, ob, oh, on, od, positions, channels)
        scores = _probabilities(
            query, key, bias, mask, h, b % masks, m, n, positions, scale, has_mask
        )
        row = b * heads + h
        chances = tl.exp(scores - tl.load(log_sums + row * positions + m, m < positions)[:, None])
        delta = tl.sum(gradient.to(tl.float32) * result.to(tl.float32), 1)
        moved = tl.dot(gradient, tl.trans(value), input_precision="ieee")
        if has_dropout:
            moved *= _kept(seed, row, m, n, positions, dropout)
        dscores = tl.where(m[:, None] < positions, chances * (moved - delta[:, None]), 0.0)
        sums += dscores
        dquery = tl.dot(dscores.to(key.dtype), key, input_precision="ieee") * scale
        _store(dq, dquery, b, h, m, d, db, dh, dn, dd, positions, channels)
    at = (part * heads + h) * positions * positions + m[:, None] * positions + n[None, :]
    tl.store(dbias + at, sums, (m[:, None] < positions) & (n[None, :] < positions))


@triton.jit
def _backward_keys(
    q, k, v, bias, mask, out, log_sums, grad, dk, dv, seed,
    qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd, ob, oh, on, od,
    gb, gh, gn, gd, db, dh, dn, dd,
    heads, masks, positions, channels, scale, dropout,
    has_mask: tl.constexpr, has_dropout: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    n, d = tl.arange(0, columns), tl.arange(0, depth)
    key = _load(k, b, h, n, d, kb, kh, kn, kd, positions, channels)
    value = _load(v, b, h, n, d, vb, vh, vn, vd, positions, channels)
    dkey = tl.zeros((columns, depth), tl.float32)
    dvalue = tl.zeros((columns, depth), tl.float32)
    row = b * heads + h
    for start in range(0, positions, rows):
        m = start + tl.arange(0, rows)
        query = _load(q, b, h, m, d, qb, qh, qn, qd, positions, channels)
        gradient = _load(grad, b, h, m, d, gb, gh, gn, gd, positions, channels)
        result = _load(out, b, h, m, d, ob, oh, on, od, positions, channels)
        scores = _probabilities(
            query, key, bias, mask, h, b % masks, m, n, positions, scale, has_mask
        )
        log_sum = tl.load(log_sums + row * positions + m, m < positions, 0.0)
        chances = tl.where(m[:, None] < positions, tl.exp(scores - log_sum[:, None]), 0.0)
        delta = tl.sum(gradient.to(tl.float32) * result.to(tl.float32), 1)
        moved = tl.dot(gradient, tl.trans(value), input_precision="ieee")
        dropped = chances
        if has_dropout:
            kept = _kept(seed, row, m, n, positions, dropout)
            moved *= kept
            dropped = chances * kept
        dscores = chances * (moved - delta[:, None])
        dvalue += tl.dot(tl.trans(dropped.to(gradient.dtype)), gradient, input_precision="ieee")
        dkey += tl.dot(tl.trans(dscores.to(query.dtype)), query, input_precision="ieee")
    _store(dk, dkey * scale, b, h, n, d, db, dh, dn, dd, positions, channels)
    _store(dv, dvalue, b, h, n, d, db, dh, dn, dd, positions, channels)


class WindowAttention(torch.autograd.Function):
    """``softmax(scale q k^T + bias + mask)``, dropped out, times v."""

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
        mask = None if mask is None else mask.contiguous()
        # as the next layer reads it: all heads of a position side by side
        out = query.new_empty(windows, positions, heads, channels).transpose(1, 2)
        log_sums = query.new_empty(windows, heads, positions, dtype=torch.float32)
        ctx.scale, ctx.dropout = scale, dropout
        ctx.seed = int(torch.randint(2**31 - 1, ())) if dropout else 0
        blocks = _blocks(positions, channels)
        grid = (windows * heads, triton.cdiv(positions, blocks["rows"]))
        with torch.cuda.device_of(query):
            _forward[grid](
                query, key, value, bias, bias if mask is None else mask, out, log_sums, ctx.seed,
                *query.stride(), *key.stride(), *value.stride(), *out.stride(),
                heads, 1 if mask is None else len(mask), positions, channels, scale, dropout,
                has_mask=mask is not None, has_dropout=dropout > 0, **blocks,
            )  # fmt: skip
        ctx.save_for_backward(query, key, value, bias, mask, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.cuda.device_of(grad), outside_autocast(grad.device):
            if torch.is_grad_enabled():
                inputs, kept = ctx.saved_tensors[:5], _what_was_kept(ctx)
                return *recorded_gradients(inputs, ctx.scale, kept, grad), None, None, None
            return *_gradients(ctx, grad), None, None, None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute gradients of query, key, value and bias."""
    query, key, value, bias, mask, out, log_sums = ctx.saved_tensors
    windows, heads, positions, channels = query.shape
    blocks = _blocks(positions, channels)
    options = {"has_mask": mask is not None, "has_dropout": ctx.dropout > 0, **blocks}
    masks = 1 if mask is None else len(mask)
    # laid out as one projection's q, k and v are
    packed = query.new_empty(windows, positions, 3, heads, channels)
    dq, dk, dv = packed.permute(2, 0, 3, 1, 4).unbind()
    parts = min(windows, max(1, _PROGRAMS // heads))
    each = triton.cdiv(windows, parts)
    parts = triton.cdiv(windows, each)
    dbias = query.new_empty(parts, heads, positions, positions, dtype=torch.float32)
    given = (query, key, value, bias, bias if mask is None else mask, out, log_sums, grad)
    strides = [s for t in (query, key, value, out, grad, dq) for s in t.stride()]
    sizes = (heads, masks, positions, channels, ctx.scale, ctx.dropout)
    grid = (heads, triton.cdiv(positions, blocks["rows"]), parts)
    _backward_queries[grid](*given, dq, dbias, ctx.seed, *strides, windows, *sizes, each, **options)
    _backward_keys[(windows * heads,)](*given, dk, dv, ctx.seed, *strides, *sizes, **options)
    return dq, dk, dv, dbias.sum(0).to(bias.dtype)


def _what_was_kept(ctx: Any) -> Tensor | None:
    """Draw again the factors by which dropout multiplied the probabilities."""
    if not ctx.dropout:
        return None
    query = ctx.saved_tensors[0]
    windows, heads, positions, channels = query.shape
    kept: Tensor = query.new_empty(windows, heads, positions, positions)
    blocks = _blocks(positions, channels)
    grid = (windows * heads, triton.cdiv(positions, blocks["rows"]))
    _write_kept[grid](kept, ctx.seed, positions, ctx.dropout, **blocks)
    return kept


_PROGRAMS = 264
"""For each block of rows, about twice the multiprocessors of a large device."""


def _blocks(positions: int, channels: int) -> dict[str, int]:
    columns = max(16, triton.next_power_of_2(positions))
    return {
        "rows": min(columns, 64),
        "columns": columns,
        "depth": max(16, triton.next_power_of_2(channels)),
    }
