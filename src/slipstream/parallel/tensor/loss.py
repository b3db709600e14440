"""Cross entropy of logits whose vocabulary is split over ranks: no rank ever holds them whole."""

from __future__ import annotations

from typing import Literal

import torch

from slipstream import comm
from slipstream.errors import CommError
from slipstream.parallel.tensor import regions


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
    collectives of one and two values a row, instead of a gather of all logits.

    Args:
        logits: this rank's columns, ``[..., v]``, as a column layer without ``gather`` leaves them.
        target: whole, ``[...]``; indices into the whole vocabulary, the same on every rank.
        vocabulary: how many words there are.
        group: the ranks that share the vocabulary.
        ignore_index: rows with this target count nothing.
        reduction: as torch's; the loss is whole, the same on every rank.

    Exactness: reordered.

    Raises:
        CommError: a target outside of the vocabulary, or shapes that do not fit.

    Example:
        >>> x, t = torch.randn(3, 7), torch.tensor([1, 6, -100])
        >>> own = vocabulary_cross_entropy(x, t, 7, comm.group())
        >>> torch.allclose(own, torch.nn.functional.cross_entropy(x, t))
        True

    Source: Megatron-LM, Shoeybi et al. 2019, section 3.
    """
    sizes = regions.even(vocabulary, group)
    due = (*target.shape, sizes[group.rank])
    if logits.shape != due or min(sizes) < 1:
        raise CommError(
            f"rank {group.rank} of {group} holds logits of {list(logits.shape)} for a target of "
            f"{list(target.shape)}; allowed: {list(due)}, its share of {vocabulary} words, "
            "at least one a rank"
        )
    counted = target != ignore_index
    odd = target[counted & ((target < 0) | (target >= vocabulary))]
    if odd.numel():
        raise CommError(
            f"target {int(odd[0])}; allowed: 0 .. {vocabulary - 1}, or ignore_index {ignore_index}"
        )
    with torch.no_grad():
        largest = comm.all_reduce_max(logits.amax(-1, keepdim=True), group)
    shifted = logits - largest
    own = target - sum(sizes[: group.rank])
    here = counted & (own >= 0) & (own < logits.shape[-1])
    picked = shifted.gather(-1, own.masked_fill(~here, 0).unsqueeze(-1)).squeeze(-1)
    both = torch.stack([shifted.exp().sum(-1), picked.masked_fill(~here, 0)])
    total, chosen = regions.reduce_from_region(both, group).unbind()
    losses = (total.log() - chosen).masked_fill(~counted, 0)
    match reduction:
        case "mean":
            return losses.sum() / counted.sum()
        case "sum":
            return losses.sum()
    return losses
