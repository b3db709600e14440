"""The mean of sparse gradients: all ranks' rows gathered and added up, beside the dense exchanges.

Never makes a dense tensor of the parameter's shape.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_UNUSED = -1


def all_reduce_sum(
    sparse: torch.Tensor, group: dist.ProcessGroup, *, used: bool = True
) -> torch.Tensor | None:
    """The sum over ranks of a sparse COO tensor whose number of rows differs between ranks.

    None where no rank has ``used`` it: a gradient without rows still moves an optimizer's momentum,
    no gradient does not.

    Gathers counts, then indices and values padded to the largest count: torch's own sparse
    all-reduce on gloo fails for fp16 and for complex numbers. Exactness: reordered.
    """
    sparse = sparse.coalesce()
    indices, values = sparse.indices(), sparse.values()
    world = dist.get_world_size(group)
    counts = torch.empty(world, dtype=torch.int64, device=values.device)
    own = values.shape[0] if used else _UNUSED
    dist.all_gather(list(counts.split(1)), counts.new_tensor([own]), group=group)
    longest = int(counts.max())
    if longest <= 0:
        return None if longest == _UNUSED else sparse
    all_indices = _gather_padded(indices.t().contiguous(), longest, world, group)
    all_values = _gather_padded(values.contiguous(), longest, world, group)
    kept = torch.arange(longest, device=values.device).expand(world, -1) < counts.unsqueeze(1)
    return torch.sparse_coo_tensor(
        all_indices[kept].t(), all_values[kept], sparse.shape, check_invariants=False
    ).coalesce()


def _gather_padded(
    rows: torch.Tensor, longest: int, world: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """All ranks' rows as ``[world, longest, ...]``; what is behind a rank's own rows is zero."""
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty(world, *padded.shape)
    dist.all_gather(list(gathered.unbind()), padded, group=group)
    return gathered
