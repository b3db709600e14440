"""Gradient clipping by the norm of a model whose gradients are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from slipstream.comm import Group
from slipstream.transport.consistency import collective_errors


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    counted: Sequence[torch.Tensor],
    max_norm: float,
    group: Group,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` where each rank has some of the gradients. Collective.

    Args:
        parameters: whose gradients this rank scales.
        counted: those that this rank counts in the norm: each gradient counts on one rank only.
        max_norm: upper bound of the norm of all gradients.
        group: the ranks of one copy of the model.

    Returns:
        The norm before clipping, in fp64, the same on every rank.
    """
    gradients = [p.grad for p in counted if p.grad is not None]
    norms = [torch.linalg.vector_norm(g).double().to(group.device) for g in gradients]
    square = torch.zeros((), dtype=torch.float64, device=group.device)
    if norms:
        square = torch.stack(norms).square().sum()
    if group.size > 1:
        with collective_errors("the norm of the gradients"):
            dist.all_reduce(square, group=group.members)
    norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
