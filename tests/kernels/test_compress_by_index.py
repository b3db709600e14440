"""Rows by an index on the device, against mmdetection3d's indexing with a list."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from slipstream.errors import UsageError
from slipstream.kernels import compress_by_index
from slipstream.kernels.compress_by_index import reference


@given(st.integers(0, 40), st.integers(1, 9), st.lists(st.integers(0, 4), max_size=2))
def test_all_shapes_are_bitwise(points: int, rows: int, rest: list[int]) -> None:
    values = torch.randn(points, rows, *rest)
    index = torch.randint(rows, (points,))
    assert compress_by_index(values, index).equal(reference(values, index))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.bool])
def test_any_dtype_and_layout(dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (4, 7, 3)).to(dtype).transpose(0, 1)
    index = torch.randint(4, (7,))
    assert compress_by_index(values, index).equal(reference(values, index))


def test_gradients_go_to_the_rows_that_were_taken() -> None:
    values = torch.randn(6, 4, 3, dtype=torch.float64, requires_grad=True)
    index = torch.randint(4, (6,))
    assert torch.autograd.gradcheck(lambda v: compress_by_index(v, index), (values,))
    expected = torch.autograd.grad(reference(values, index).square().sum(), values)[0]
    given = torch.autograd.grad(compress_by_index(values, index).square().sum(), values)[0]
    assert given.equal(expected)


def test_nothing_is_made_on_the_host() -> None:
    """On a device that has no values a copy from the host would raise."""
    values = torch.empty(9, 3, 4, device="meta")
    index = torch.empty(9, dtype=torch.int64, device="meta")
    assert compress_by_index(values, index).shape == (9, 4)


def test_what_does_not_fit_is_refused() -> None:
    values = torch.zeros(3, 2, 4)
    with pytest.raises(UsageError, match=r"index \(4,\); allowed"):
        compress_by_index(values, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"torch.int32 on cpu; allowed: torch.int64"):
        compress_by_index(values, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(IndexError, match="from 0 to 2, out of bounds for 2 rows"):
        compress_by_index(values, torch.tensor([0, 2, 1]))
