"""The sum of sparse tensors, against the sum of the dense ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from slipstream.strategy import FlatConfig
from slipstream.transport import sparse
from slipstream.transport.requests import ExchangeSteps
from slipstream.transport.transport import make_transport, run
from tests.harness.ranks import PerRank, Ranks

Rows = list[int]

ROWS: dict[str, tuple[Rows, Rows, Rows]] = {
    "as many on each": ([0, 4], [1, 4], [2, 3]),
    "more on some": ([0], [4, 3, 2, 1, 0], [1, 3]),
    "none on one": ([1, 2], [], [2]),
    "none on the first": ([], [4], []),
    "none on all": ([], [], []),
    "twice the same": ([1, 1, 4, 1], [4, 4], [0]),
}

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]

SHAPES = [((5, 3), 1), ((5,), 1), ((5, 5), 2), ((5, 2, 3), 1), ((5, 5, 2), 2), ((5, 0), 1)]


def coo(rows: Rows, dtype: torch.dtype, shape: torch.Size, sparse_dim: int) -> torch.Tensor:
    """Whole numbers, so that no order of the sum rounds."""
    indices = torch.tensor([rows] * sparse_dim, dtype=torch.int64).reshape(sparse_dim, len(rows))
    values = torch.arange(1.0, 1 + len(rows) * shape[sparse_dim:].numel())
    values = values.reshape(len(rows), *shape[sparse_dim:]).to(dtype)
    if dtype.is_complex:
        values = values * (1 + 2j)
    return torch.sparse_coo_tensor(indices, values * (dist.get_rank() + 1), shape)


def summed(mine: torch.Tensor) -> torch.Tensor:
    totals: list[torch.Tensor | None] = []

    def exchange() -> ExchangeSteps:
        totals.append((yield from sparse.sum_over_ranks(mine, 3)))

    run(exchange(), make_transport(FlatConfig(), dist.group.WORLD))
    (total,) = totals
    assert total is not None
    return total


def sums(rows: Rows, dtype: torch.dtype, shape: tuple[int, ...], sparse_dim: int) -> None:
    own = coo(rows, dtype, torch.Size(shape), sparse_dim)
    before = own.to_dense()
    total = summed(own)
    dense: list[torch.Tensor | None] = [None] * 3
    dist.all_gather_object(dense, before)
    assert torch.equal(total.to_dense(), sum(dense))
    assert (total.dtype, total.shape) == (own.dtype, own.shape)
    assert (total.sparse_dim(), total.is_coalesced()) == (sparse_dim, True)
    assert torch.equal(own.to_dense(), before)  # the operand stays as it was
    everyones: list[Rows] = [[]] * 3
    dist.all_gather_object(everyones, rows)
    assert total._nnz() == len({row for each in everyones for row in each})


def sums_of_all_kinds(rows: Rows) -> None:
    for dtype in TYPES:
        for shape, sparse_dim in SHAPES:
            sums(rows, dtype, shape, sparse_dim)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_the_sum_is_that_of_the_dense_tensors(three: Ranks, rows: tuple[Rows, Rows, Rows]) -> None:
    three.run(sums_of_all_kinds, PerRank(*rows))
