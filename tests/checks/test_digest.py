"""Digests and sketches: what they tell apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from slipstream.checks.digest import CHUNK, digest
from slipstream.checks.sketch import (
    EXACT,
    AverageSample,
    Sketched,
    divided_again,
    wrong_average,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)
SIZES = (1, 7, CHUNK - 1, CHUNK, 2 * CHUNK + 3)


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_one_changed_value_changes_both_sums(dtype, size):
    tensor = values(size, dtype)
    before = digest([tensor])
    assert digest([tensor.clone()]) == before
    for place in {0, size // 2, size - 1}:
        other = tensor.clone()
        other[place] = ~other[place] if dtype == torch.bool else other[place] + 1
        assert digest([other])[0] != before[0]
        assert digest([other])[1] != before[1]


@given(bit=st.integers(0, 31), place=st.integers(0, 199))
@settings(max_examples=50, deadline=None)
def test_each_bit_counts(bit, place):
    tensor = torch.linspace(-3, 3, 200)
    other = tensor.clone()
    other.view(torch.int32)[place] ^= torch.tensor(1 << bit).to(torch.int32)
    assert digest([tensor]) != digest([other])


@pytest.mark.parametrize("size", [2, 4, 8 * CHUNK])
def test_repetitions_and_changed_places_are_seen(size):
    ones, twos = torch.ones(size), torch.full((size,), 2.0)
    assert digest([ones]) != digest([twos])  # an exclusive or of even repetitions is 0 for both
    mixed = torch.cat([ones, twos])
    assert digest([mixed]) != digest([mixed.flip(0)])
    assert digest([mixed]) != digest([torch.cat([twos, ones])])


def test_a_single_value_may_have_any_stride():
    """As the momentum that begins with a gradient of `mean.expand_as(bias)`."""
    one = torch.full((1,), 2.0)
    assert digest([torch.tensor(2.0).expand(1).clone()]) == digest([one])
    assert digest([one.as_strided((1, 1), (7, 3))]) == digest([one])


def test_many_small_tensors_are_one():
    small = [torch.randn(k % 7 + 1) for k in range(300)]
    before = digest(small)
    assert digest([one.clone() for one in small]) == before
    small[150] = small[150] + 1e-3
    assert digest(small) != before
    assert digest([]) == digest([torch.zeros(0)])


def test_the_order_in_memory_does_not_count():
    image = torch.randn(2, 3, 4, 5)
    assert digest([image]) == digest([image.to(memory_format=torch.channels_last)])


# Sketches.


def sketches(gradients: list[torch.Tensor], *averages: torch.Tensor) -> dict[int, Sketched]:
    """Of all ranks: their gradients, and the average that each of them got."""
    found = {}
    for rank, gradient in enumerate(gradients):
        sample = AverageSample(7, ["w"], 1 / len(gradients))
        sample.own("w", gradient)
        average = averages[rank if len(averages) > 1 else 0]
        sample.average("w", average)
        sample.used("w", average)
        found[rank] = sample.result()
    return found


GRADIENTS = [torch.randn(50, 3, generator=torch.Generator().manual_seed(k)) for k in range(4)]
MEAN = sum(GRADIENTS) / 4


@pytest.mark.parametrize(
    ("average", "words"),
    [
        (MEAN, None),
        (MEAN * (1 + 1e-6), None),
        (MEAN / 4, "was divided by the number of ranks twice"),
        (MEAN * 4, "was not divided by the number of ranks"),
        (MEAN - GRADIENTS[2] / 4, "the gradients of rank 2 are missing in the average"),
        (GRADIENTS[1] / 4, "the average is the gradients of rank 1 alone"),
        (MEAN * 1.5, "about 1.5 times that"),
    ],
)
def test_a_wrong_average_is_explained(average, words):
    found = wrong_average(sketches(GRADIENTS, average), in_parts=False, tolerance=EXACT)
    assert found is None if words is None else words in str(found)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-25, 1e-22, 1e20, 1e35])
def test_averages_of_any_size_are_right(scale):
    gradients = [scale * gradient for gradient in GRADIENTS]
    average = (sum(gradient.double() for gradient in gradients) / 4).float()
    found = wrong_average(sketches(gradients, average), in_parts=False, tolerance=EXACT)
    assert found is None


def test_a_rank_that_got_another_average_is_named():
    each = [MEAN, MEAN, GRADIENTS[2], MEAN]
    found = wrong_average(sketches(GRADIENTS, *each), in_parts=False, tolerance=EXACT)
    assert found == "rank 2 did not get the average of all ranks, but has its own gradients"


def test_parts_add_up():
    parts = [torch.zeros(50, 3) for _ in range(4)]
    for rank, part in enumerate(parts):
        part[rank::4] = MEAN[rank::4]
    whole = sketches(GRADIENTS, *parts)
    assert wrong_average(whole, in_parts=True, tolerance=EXACT) is None
    parts[3].zero_()
    wrong = sketches(GRADIENTS, *parts)
    assert wrong_average(wrong, in_parts=True, tolerance=EXACT) is not None


def test_what_the_script_divides_again_is_seen():
    ranks = [*sketches(GRADIENTS, MEAN).values()]
    assert not divided_again(ranks)
    quarter = [
        Sketched(r.own, r.norm, r.average, (r.average[0] / 4, r.average[1] / 4)) for r in ranks
    ]
    assert divided_again(quarter)
    assert not divided_again(quarter[:1])
