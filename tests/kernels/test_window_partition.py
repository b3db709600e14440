"""Windows in one pass against torch's three functions, bit for bit, and back."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from slipstream.errors import UsageError
from slipstream.kernels import window_merge, window_partition
from slipstream.kernels.window_partition import reference_merge, reference_partition

SIZES = st.tuples(st.integers(1, 17), st.integers(1, 17))


@given(st.integers(0, 3), SIZES, st.integers(1, 8), st.integers(0, 7), st.integers(1, 3))
def test_all_sizes_are_bitwise(
    images: int, size: tuple[int, int], window: int, shift: int, channels: int
) -> None:
    shift %= window
    maps = torch.randn(images, *size, channels)
    windows = window_partition(maps, window, shift)
    assert windows.equal(reference_partition(maps, window, shift))
    assert window_merge(windows, window, size, shift).equal(maps)
    other = torch.randn_like(windows)
    merged = window_merge(other, window, size, shift)
    assert merged.equal(reference_merge(other, window, size, shift))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_any_dtype_and_layout(dtype: torch.dtype) -> None:
    maps = torch.randint(0, 2, (2, 3, 9, 5)).to(dtype).permute(0, 2, 3, 1)
    windows = window_partition(maps, 4, 1)
    assert windows.equal(reference_partition(maps, 4, 1))
    flat = windows.flatten(1, 2)  # as attention sees them
    assert window_merge(flat, 4, (9, 5), 1).equal(maps)


@pytest.mark.parametrize(("size", "shift"), [*product([(5, 7), (8, 4)], [0, 2])])
def test_gradients(size: tuple[int, int], shift: int) -> None:
    maps = torch.randn(2, *size, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: window_partition(m, 4, shift), (maps,))
    assert torch.autograd.gradgradcheck(lambda m: window_partition(m, 4, shift), (maps,))
    windows = window_partition(maps.detach(), 4, shift).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: window_merge(w, 4, size, shift), (windows,))


def test_one_copy_each_way() -> None:
    maps = torch.randn(1, 8, 8, 4)
    window_merge(window_partition(maps, 4, 2), 4, (8, 8), 2)  # indices are made once
    with torch.profiler.profile() as profile:
        window_merge(window_partition(maps, 4, 2), 4, (8, 8), 2)
    names = [event.key for event in profile.key_averages()]
    assert not {"aten::roll", "aten::copy_"} & {*names}
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::index_select"] == 2


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\(2, 3, 4\); allowed"):
        window_partition(torch.zeros(2, 3, 4), 2)
    with pytest.raises(UsageError, match="shift 4; allowed"):
        window_partition(torch.zeros(1, 8, 8, 1), 4, 4)
    with pytest.raises(UsageError, match="multiples of 4 windows"):
        window_merge(torch.zeros(3, 4, 4, 1), 4, (8, 8))
