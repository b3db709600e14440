"""int8, onebit and 16 bits against plain torch: what is rounded, where, and how often."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from slipstream.codecs import (
    HalfCodec,
    Int8Codec,
)
from slipstream.strategy import HalfConfig, Int8Config, OneBitConfig
from tests.codecs.compressors import Team


def quantised(x: torch.Tensor, block: int) -> torch.Tensor:
    blocks = x.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return torch.where(scale > 0, (blocks / scale).round() * scale, blocks * 0).view(-1)


def test_a_bit_a_value_is_a_thirty_second() -> None:
    team = Team(OneBitConfig(start_step=0), 4, [(1024, 1024)])
    team.exchange(team.gradients(0))
    dense = 2 * 3 / 4 * 4 * 2**20
    assert team.sent / dense == pytest.approx(1 / 32 + 1 / 1024, rel=0.001)


def test_int8_is_two_roundings_whatever_the_number_of_ranks() -> None:
    team = Team(Int8Config(block=8), 3, [(240,)])
    gradients = team.gradients(0)
    sent = [quantised(g, 8) for g in gradients]
    expected = quantised(sent[0] + sent[1] + sent[2], 8)
    torch.testing.assert_close(team.exchange(gradients)[0], expected)


def test_stochastic_rounding_is_right_on_average_and_independent_between_ranks() -> None:
    team = Team(Int8Config(rounding="stochastic"), 4, [(512,)])
    x = torch.linspace(-1, 1, 512) / 4
    errors = torch.stack([team.exchange([x] * 4, step)[0] - 4 * x for step in range(400)])
    assert errors.mean(0).abs().max() < 0.1 * errors.abs().max()
    sent = []
    for compressor in team.compressors:
        values = torch.zeros(compressor.num_values)
        values[:512] = x
        exchange = compressor.exchange(values, torch.zeros(2, dtype=torch.uint8), 0)
        sent.append(next(exchange).send.clone())
    assert not torch.equal(sent[0], sent[1])


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    seed=st.integers(0, 2**32),
)
def test_int8_is_at_most_half_a_step_off_or_one(values, rounding, seed) -> None:
    codec = Int8Codec(block=8, rounding=rounding)
    x = torch.zeros(-(-len(values) // 8) * 8)
    x[: len(values)] = torch.tensor(values)
    payload = codec.encode(x, random=torch.Generator().manual_seed(seed))
    back = codec.decode(payload, x.dtype)
    tiny = torch.finfo(x.dtype).tiny
    steps = (x.view(-1, 8).abs().amax(1, keepdim=True).double() / 127).clamp(min=tiny)
    off = (back.double() - x.double()).abs().view(-1, 8) / steps
    assert off.max() <= (0.5 if rounding == "nearest" else 1.0) + 1e-4


def test_onebit_is_signs_on_the_way_to_a_server_and_back() -> None:
    block, ranks = 64, 3
    team = Team(OneBitConfig(block=block, start_step=0), ranks, [(2 * block * ranks - 5,)])
    piece = 2 * block
    errors = [torch.zeros(piece * ranks) for _ in range(ranks)]
    served = [torch.zeros(piece) for _ in range(ranks)]

    def signs(x: torch.Tensor) -> torch.Tensor:
        blocks = x.view(-1, block)
        scale = blocks.abs().mean(1, keepdim=True)
        return torch.where(blocks >= 0, scale, -scale).view(-1)

    for step in range(4):
        gradients, sent = team.gradients(step), []
        for gradient, error in zip(gradients, errors, strict=True):
            x = torch.cat([gradient, torch.zeros(5)]) + error
            # What fills the last block up is as large as the rest of it is on average.
            x[-5:] = x[-block:-5].abs().mean()
            sent.append(signs(x))
            error.copy_(x - sent[-1])
        expected = []
        for rank, error in enumerate(served):
            part = slice(rank * piece, (rank + 1) * piece)
            total = sent[0][part] + sent[1][part] + sent[2][part] + error
            if rank == ranks - 1:
                total[-5:] = total[-block:-5].abs().mean()
            expected.append(signs(total))
            error.copy_(total - expected[-1])
        result = team.exchange(gradients, step)[0]
        torch.testing.assert_close(result, torch.cat(expected)[:-5])


def test_onebit_is_sign_and_mean_magnitude() -> None:
    team = Team(OneBitConfig(block=64, start_step=0), 1, [(64,)])
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(team.exchange([x])[0], x.sign() * x.abs().mean())


def test_16_bits_need_no_compressor() -> None:
    for dtype, far in (("bf16", 2**-8), ("fp16", 2**-11)):
        codec, x = HalfCodec(dtype), torch.randn(1000, generator=torch.Generator().manual_seed(1))
        back = codec.encode(x).to(torch.float32)
        assert ((back - x).abs() <= far * x.abs() + 1e-7).all()
        pair = torch.complex(x[:10], x[10:20])
        back = torch.view_as_complex(codec.encode(pair).to(torch.float32))
        assert (back - pair).abs().max() < 0.02
    assert HalfConfig().exactness == "lossy"
