"""Cross entropy of logits whose vocabulary is split over ranks; no rank holds all logits."""

from __future__ import annotations

from typing import Literal

import torch

from slipstream import comm
from slipstream.errors import CommError
from slipstream.parallel.tensor import regions
from slipstream.parallel.tensor.shard import even_sizes


def vocabulary_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    vocabulary: int,
    group: comm.Group,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` of logits that are split along their last axis.

    With ``m`` the largest logit, ``loss = log(sum_v exp(x_v - m)) - (x_target - m)``: two
    collectives of one and two values a row, instead of a gather of all logits. Under autocast in
    fp32, as torch's.

    Args:
        logits: this rank's columns, ``[..., v]``, the output of a column layer without ``gather``.
        target: whole, ``[...]``; indices into the whole vocabulary, the same on every rank.
        vocabulary: size of the whole vocabulary.
        group: the ranks that share the vocabulary.
        ignore_index: rows with this target do not count.
        reduction: as torch's; the loss is whole, the same on every rank.

    Exactness: reordered.

    Raises:
        CommError: a target outside the vocabulary, or shapes that do not fit.

    Example:
        >>> x, t = torch.randn(3, 7), torch.tensor([1, 6, -100])
        >>> loss = vocabulary_cross_entropy(x, t, 7, comm.group())
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(x, t))
        True

    Source: Megatron-LM, Shoeybi et al. 2019, section 3.
    """
    sizes = even_sizes(vocabulary, group.size)
    expected = (*target.shape, sizes[group.rank])
    if logits.shape != expected or min(sizes) < 1:
        raise CommError(
            f"rank {group.rank} of {group} holds logits of {list(logits.shape)} for a target of "
            f"{list(target.shape)}; allowed: {list(expected)}, its share of {vocabulary} words, "
            "at least one a rank"
        )
    if torch.is_autocast_enabled(logits.device.type) and logits.itemsize < 4:
        logits = logits.float()
    counted = target != ignore_index
    outside = target[counted & ((target < 0) | (target >= vocabulary))]
    if outside.numel():
        raise CommError(
            f"target {int(outside[0])}; allowed: 0 .. {vocabulary - 1}, or ignore_index "
            f"{ignore_index}"
        )
    with torch.no_grad():
        largest = comm.all_reduce_max(logits.amax(-1, keepdim=True), group)
    shifted = logits - largest
    local_target = target - sum(sizes[: group.rank])
    is_local = counted & (local_target >= 0) & (local_target < logits.shape[-1])
    picked = shifted.gather(-1, local_target.masked_fill(~is_local, 0).unsqueeze(-1)).squeeze(-1)
    sums = torch.stack([shifted.exp().sum(-1), picked.masked_fill(~is_local, 0)])
    exp_sum, target_logit = regions.reduce_from_region(sums, group).unbind()
    losses = (exp_sum.log() - target_logit).masked_fill(~counted, 0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()
