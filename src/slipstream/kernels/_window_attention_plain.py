"""Window attention by torch's functions: probabilities, and gradients that lead on to the inputs.

[Note: Second derivatives]
A kernel's backward computes with numbers that lead nowhere: probabilities it kept, or computed
again. Where backward is recorded itself (``create_graph``), it therefore starts from the inputs and
takes torch's functions, whose derivatives torch knows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(
    query: Tensor, key: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """``softmax(scale query key^T + bias + mask)``."""
    scores = query * scale @ key.transpose(2, 3) + bias
    if mask is not None:
        windows, heads, positions, _ = scores.shape
        masks = len(mask)
        scores = scores.view(windows // masks, masks, heads, positions, positions)
        scores = (scores + mask.unsqueeze(1)).view(windows, heads, positions, positions)
    return scores.softmax(-1)


def gradients(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    scale: float,
    kept: Tensor | None,
    gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute gradients of query, key, value and bias, see [Note: Second derivatives].

    Args:
        inputs: query, key, value, bias and mask.
        scale: of the scores.
        kept: what dropout multiplied the probabilities by.
        gradient: of the result.
    """
    query, key, value, bias, mask = inputs
    chances = probabilities(query, key, bias, mask, scale)
    moved, dropped = gradient @ value.transpose(2, 3), chances
    if kept is not None:
        moved, dropped = moved * kept, chances * kept
    dscores = chances * (moved - (moved * chances).sum(-1, keepdim=True))
    return (
        dscores @ key * scale,
        dscores.transpose(2, 3) @ query * scale,
        dropped.transpose(2, 3) @ gradient,
        dscores.sum(0),
    )


def dropped_out(chances: Tensor, dropout: float) -> Tensor:
    """Draw the factors of dropout for probabilities: 0, or 1 / (1 - dropout)."""
    return torch.empty_like(chances).bernoulli_(1 - dropout) / (1 - dropout)
