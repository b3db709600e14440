"""The sum of sparse gradients: the rows of all ranks, gathered and added up.

Never makes a dense tensor of the parameter's shape, and never communicates: it yields requests.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from slipstream.transport.requests import AllGather, Request

_UNUSED = -1


def sum_over_ranks(
    sparse: torch.Tensor, ranks: int, *, used: bool = True
) -> Generator[Request, None, torch.Tensor | None]:
    """The sum over ``ranks`` of a sparse COO tensor whose number of rows differs between ranks.

    Returns None where no rank has ``used`` the parameter. That differs from a gradient without
    rows, which still moves an optimizer's momentum.

    Gathers counts, then indices and values padded to the largest count: torch's own sparse
    all-reduce on gloo fails for fp16 and for complex numbers. Exactness: reordered.
    """
    sparse = sparse.coalesce()
    indices, values = sparse.indices(), sparse.values()
    counts = torch.empty(ranks, 1, dtype=torch.int64, device=values.device)
    yield AllGather(counts.new_tensor([values.shape[0] if used else _UNUSED]), counts)
    longest = int(counts.max())
    if longest <= 0:
        return None if longest == _UNUSED else sparse
    all_indices = yield from _gather_padded(indices.t(), longest, ranks)
    all_values = yield from _gather_padded(values, longest, ranks)
    present = torch.arange(longest, device=values.device) < counts
    return torch.sparse_coo_tensor(
        all_indices[present].t(), all_values[present], sparse.shape, check_invariants=False
    ).coalesce()


def _gather_padded(
    rows: torch.Tensor, longest: int, ranks: int
) -> Generator[Request, None, torch.Tensor]:
    """The rows of all ranks as ``[ranks, longest, ...]``, zeros behind those of each rank."""
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty(ranks, *padded.shape)
    if padded.numel():  # a row may be empty
        yield AllGather(padded, gathered)
    return gathered
