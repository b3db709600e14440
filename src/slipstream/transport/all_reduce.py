"""The flat transport: one all-reduce over all ranks.

A transport is a function ``(tensor, group) -> [work, ...]``: when the works are done, the tensor
holds the sum.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to leave the sum over ``group`` in ``tensor`` on every rank; one collective.

    Bytes that each of p ranks sends and receives (ring): ``2 (p - 1) / p * tensor.nbytes``.
    Exactness: reordered (bitwise on two ranks, where a sum has one order).
    """
    work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return [work] if work is not None else []
