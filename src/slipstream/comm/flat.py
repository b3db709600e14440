"""The flat transport: one all-reduce over all ranks.

A transport is a function ``(tensor, group) -> None`` that leaves the sum over the group in the tensor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Leave the sum over ``group`` in ``tensor`` on every rank; one collective.

    Bytes that each of p ranks sends and receives (ring): ``2 (p - 1) / p * tensor.nbytes``.
    Exactness: reordered (bitwise on two ranks, where a sum has one order).
    """
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
