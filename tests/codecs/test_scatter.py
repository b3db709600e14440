"""The coded reduce-scatter: driven by hand for all ranks, against plain sums."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream.codecs import Int8Codec, OneBitCodec, Ranks, ScatterCompressor
from slipstream.codecs.blocks import BlockCodec
from slipstream.codecs.int4 import Int4Codec
from slipstream.transport.requests import AllToAll

CODECS: Sequence[BlockCodec] = (Int8Codec(32), Int4Codec(8), OneBitCodec(64))


def scattered(
    compressors: Sequence[ScatterCompressor], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What each rank gets when all exchange rows of theirs."""
    outs = [rows.new_empty(rows.shape[1]) for rows in given]
    steps = [c.exchange(rows.clone(), out) for c, rows, out in zip(compressors, given, outs)]  # noqa: B905
    requests = [next(one) for one in steps]
    for rank, request in enumerate(requests):
        assert isinstance(request, AllToAll)
        for sender, other in enumerate(requests):
            assert isinstance(other, AllToAll)
            request.receive[sender] = other.send[rank]
    assert [list(one) for one in steps] == [[]] * len(given)
    return outs


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("width", [1, 100, 70_000])
def test_what_is_sent_and_what_is_owed_are_all_of_it(codec: BlockCodec, width: int) -> None:
    count = 3
    compressors = [ScatterCompressor(codec, Ranks(r, count), feedback=True) for r in range(count)]
    torch.manual_seed(0)
    total, got = torch.zeros(count, width), torch.zeros(count, width)
    for _ in range(3):
        given = [torch.randn(count, width) for _ in range(count)]
        total += sum(given)
        got += torch.stack(scattered(compressors, given))
    owed = torch.zeros(count, width)
    for rank, compressor in enumerate(compressors):
        assert compressor.error is not None
        owed[[r for r in range(count) if r != rank]] += compressor.error
    torch.testing.assert_close(got + owed, total, rtol=1e-4, atol=1e-4)
    assert width == 1 or owed.abs().max() > 0


def test_one_rounding_of_int8_and_none_of_what_is_ones_own() -> None:
    compressors = [ScatterCompressor(Int8Codec(8), Ranks(r, 2), feedback=False) for r in range(2)]
    own, other = torch.tensor([[1e-6, 3.0], [0.0, 0.0]]), torch.tensor([[127.0, 1.4], [0.0, 0.0]])
    first, _ = scattered(compressors, [own, other])
    assert first.tolist() == [pytest.approx(127.000001), 4.0]
    assert compressors[0].error is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    compressors = [ScatterCompressor(Int8Codec(8), Ranks(r, 2), feedback=True) for r in range(2)]
    given = [torch.randn(2, 24).to(dtype) for _ in range(2)]
    outs = scattered(compressors, given)
    assert [out.dtype for out in outs] == [dtype] * 2
    plain = (given[0].double() + given[1].double()).to(dtype)
    torch.testing.assert_close(torch.stack(outs), plain, rtol=0.0, atol=0.05)


def test_what_is_not_finite_is_told_to_all_and_owed_by_none() -> None:
    compressors = [ScatterCompressor(Int4Codec(8), Ranks(r, 2), feedback=True) for r in range(2)]
    scattered(compressors, [torch.randn(2, 10) for _ in range(2)])
    before = [c.error.clone() for c in compressors if c.error is not None]
    bad = [torch.randn(2, 10), torch.full((2, 10), torch.inf)]
    assert all(out.isnan().all() for out in scattered(compressors, bad))
    after = [c.error for c in compressors if c.error is not None]
    torch.testing.assert_close(after, before)
    assert all(o.isfinite().all() for o in scattered(compressors, [torch.ones(2, 10)] * 2))


def test_stochastic_rounding_differs_by_call_and_rank() -> None:
    codec, half = Int8Codec(8, "stochastic"), torch.full((2, 8), 0.5)
    half[:, 0] = 127.0
    compressors = [ScatterCompressor(codec, Ranks(r, 2), feedback=False) for r in range(2)]
    first, second = (scattered(compressors, [half, half]) for _ in range(2))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])
