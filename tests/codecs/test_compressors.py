"""One battery over all codecs: what ranks exchange, what they keep, and what they may forget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.codecs import (
    DgcCodec,
    DgcCompressor,
    HalfCodec,
    Int8Codec,
    Momentum,
    PowerSgdCodec,
    PowerSgdCompressor,
    Ranks,
)
from slipstream.codecs.dgc import largest
from slipstream.strategy import Dgc, Half, Int8, OneBit, PowerSgd
from tests.codecs.compressors import FED_BACK, SHAPES, WISHES, Team, run_together

RANKS = (1, 2, 3, 4, 5)
every_codec = pytest.mark.parametrize("name", WISHES)


@every_codec
@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_end_with_the_same_bits_and_the_same_flags(name, ranks) -> None:
    team = Team(WISHES[name], ranks)
    for step in range(4):
        results = team.exchange(team.gradients(step), step)
        assert all(torch.equal(results[0], other) for other in results)
        raised = [1] * min(ranks, 2) + [0] * (2 - min(ranks, 2))
        assert [flags.tolist() for flags in team.flags] == [raised] * ranks


@pytest.mark.parametrize("name", FED_BACK)
@pytest.mark.parametrize("ranks", RANKS)
def test_what_was_sent_and_what_is_left_is_what_came_in(name, ranks) -> None:
    team = Team(WISHES[name], ranks)
    came, sent = torch.zeros(team.size, dtype=torch.float64), 0.0
    for step in range(6):
        gradients = team.gradients(step)
        came += sum(gradients)
        sent = sent + team.exchange(gradients, step)[0].double()
        torch.testing.assert_close(sent + team.kept(), came, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FED_BACK)
def test_nothing_is_held_back_for_ever(name) -> None:
    team = Team(WISHES[name], 3)
    gradients, total = team.gradients(0), 0.0
    for step in range(150):
        total = total + team.exchange(gradients, step)[0].double()
    mean = sum(gradients).double()
    error = (total / 150 - mean).norm() / mean.norm()
    assert error < 0.25  # of one exchange alone it is 0.6 (onebit) to 0.9 (dgc)


@every_codec
def test_a_step_that_does_not_count_leaves_no_trace(name) -> None:
    team, other = Team(WISHES[name], 3), Team(WISHES[name], 3)
    for step in range(3):
        gradients = team.gradients(step)
        team.exchange([torch.full_like(g, 7.0) for g in gradients], step, counts=False)
        results = team.exchange(gradients, step)
        assert torch.equal(results[0], other.exchange(gradients, step)[0])
    for mine, theirs in zip(team.compressors, other.compressors, strict=True):
        for state, same in zip(mine.state(), theirs.state(), strict=True):
            assert state.keys() == same.keys()
            assert all(torch.equal(state[key], same[key]) for key in state)


@every_codec
@pytest.mark.parametrize(
    ("poison", "at"),
    [
        (float("inf"), 0),
        (-float("inf"), 17 * 23 + 2),
        (float("nan"), 17 * 23 + 5 + 60),
        (float("inf"), 17 * 23 + 5 + 60),
        (float("nan"), -1),
    ],
)
def test_what_is_not_finite_on_one_rank_is_known_to_all(name, poison, at) -> None:
    """Where it stands must not matter: in a matrix, a vector, a part that is not sent."""
    team, other = Team(WISHES[name], 3, num_flags=4), Team(WISHES[name], 3, num_flags=4)
    for step in range(3):
        gradients = team.gradients(step)
        for poisoned in ([step], [0, 1, 2]):
            bad = [g.clone() for g in gradients]
            for rank in poisoned:
                bad[rank][at] = poison
            team.exchange(bad, step, counts=False)
            assert [flags.tolist() for flags in team.flags] == [[1, 1, 1, 1]] * 3
        results = team.exchange(gradients, step)
        assert [flags.tolist() for flags in team.flags] == [[1, 1, 1, 0]] * 3
        assert torch.equal(results[0], other.exchange(gradients, step)[0])


@every_codec
@pytest.mark.parametrize("shapes", [SHAPES, [(40, 40)]])
def test_a_sum_that_overflows_is_known_to_all(name, shapes) -> None:
    team = Team(WISHES[name], 3, shapes, num_flags=4)
    team.exchange([torch.full((team.size,), 3e38) for _ in range(3)], counts=False)
    assert [flags.tolist() for flags in team.flags] == [[1, 1, 1, 1]] * 3


@every_codec
@pytest.mark.parametrize("at", [3, 70_000, 139_999])
def test_every_part_of_a_large_gradient_is_looked_at(name, at) -> None:
    team = Team(WISHES[name], 2, [(140, 1000)], num_flags=3)
    gradients = team.gradients(0)
    gradients[1][at] = float("nan")
    team.exchange(gradients, counts=False)
    assert [flags.tolist() for flags in team.flags] == [[1, 1, 1]] * 2
    first, second = team.exchange(team.gradients(1), 1)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_infinity_is_found_where_powersgd_looks_along_zeros() -> None:
    team = Team(PowerSgd(rank=1, start_step=0), 2, [(40, 40)], num_flags=3)
    dead = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    dead[:, 7] = 0  # so is Q there, from the second step on
    for step in range(2):
        team.exchange([dead.flatten()] * 2, step)
    dead[3, 7] = float("inf")
    team.exchange([dead.flatten()] * 2, 2, counts=False)
    assert [flags.tolist() for flags in team.flags] == [[1, 1, 1]] * 2


@every_codec
def test_a_state_goes_on_bit_for_bit(name) -> None:
    team, resumed = Team(WISHES[name], 3), Team(WISHES[name], 3)
    for step in range(3):
        team.exchange(team.gradients(step), step)
    for old, new in zip(team.compressors, resumed.compressors, strict=True):
        new.load(old.state())
    for step in range(3, 6):
        gradients = team.gradients(step)
        assert torch.equal(team.exchange(gradients, step)[0], resumed.exchange(gradients, step)[0])


@pytest.mark.parametrize("name", FED_BACK)
def test_nothing_is_lost_when_gradients_move_to_other_buckets(name) -> None:
    team = Team(WISHES[name], 3)
    for step in range(3):
        team.exchange(team.gradients(step), step)
    left = team.kept()
    halves = [Team(WISHES[name], 3, SHAPES[:3]), Team(WISHES[name], 3, SHAPES[3:])]
    for rank, compressor in enumerate(team.compressors):
        states = compressor.state()
        halves[0].compressors[rank].load(states[:3])
        halves[1].compressors[rank].load(states[3:])
    near = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(torch.cat([half.kept() for half in halves]), left, **near)
    again = Team(WISHES[name], 3)
    for rank, compressor in enumerate(again.compressors):
        compressor.load(halves[0].compressors[rank].state() + halves[1].compressors[rank].state())
    torch.testing.assert_close(again.kept(), left, **near)


SPECIAL = {
    "zero": 0.0,
    "constant": 0.125,
    "huge": 1e30,
    "tiny": 1e-37,
    "denormal": 1e-41,
    "negative": -3.0,
}


@every_codec
@pytest.mark.parametrize("value", SPECIAL.values(), ids=SPECIAL)
def test_special_values_come_through(name, value) -> None:
    team = Team(WISHES[name], 2)
    shares = [torch.full((team.size,), value / 2)] * 2
    total = 0.0
    for step in range(2):
        (result, _), team_total = team.exchange(shares, step), total
        assert result.isfinite().all()
        assert result.abs().max() <= 2.1 * abs(value) + 1e-37
        total = team_total + result.double()
    if abs(value) < 1e-40:  # what fp32 can hardly hold may be lost
        assert value or not total.any()
    else:
        assert (total * value).sum() > 0.02 * total.numel() * value * value


@every_codec
@pytest.mark.parametrize("shapes", [[(0,)], [(1,)], [(1, 1)], [(7, 0), (3,)], [(1023,), (1025,)]])
def test_odd_and_empty_sizes(name, shapes) -> None:
    for ranks in (1, 2, 5):
        team = Team(WISHES[name], ranks, shapes)
        for step in range(3):
            results = team.exchange(team.gradients(step), step)
            assert all(torch.equal(results[0], other) for other in results)
            assert results[0].isfinite().all()


@every_codec
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
)
def test_every_dtype_has_an_exchange(name, dtype) -> None:
    team = Team(WISHES[name], 2, dtype=dtype)
    wide = dtype in (torch.float64, torch.complex128)
    assert team.compressors[0].works_in == (torch.float64 if wide else torch.float32)
    for step in range(3):
        results = team.exchange(team.gradients(step), step)
        assert results[0].dtype == team.compressors[0].works_in
        assert torch.equal(results[0], results[1])
        assert results[0].any()


# What p ranks send of 40 x 40 values, in bytes; riders and alignment left out.


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("config", "payload"),
    [
        (Int8(block=64), lambda p: 1600 + 1600 // 64 * 4),
        (OneBit(block=64, start_step=0), lambda p: 1600 // 8 + 1600 // 64 * 4),
        (OneBit(block=64, start_step=9), lambda p: -(-1600 // (64 * p)) * 64 * p * 4),
        (PowerSgd(rank=2, start_step=0), lambda p: 2 * (40 + 40) * 4),
        (PowerSgd(rank=2, start_step=9), lambda p: 1600 * 4),
    ],
)
def test_bytes_are_those_of_the_payload(config, payload, ranks) -> None:
    team = Team(config, ranks, [(40, 40)], num_flags=0)
    team.exchange(team.gradients(0))
    exact = 2 * (ranks - 1) / ranks * payload(ranks)
    padding = 2 * (ranks - 1) * (64 + 4 + 8)  # each piece: whole blocks, and 8 bytes to align
    assert exact <= team.sent <= exact + (padding if isinstance(config, Int8 | OneBit) else 0)


def test_a_bit_a_value_is_a_thirty_second() -> None:
    team = Team(OneBit(start_step=0), 4, [(1024, 1024)])
    team.exchange(team.gradients(0))
    dense = 2 * 3 / 4 * 4 * 2**20
    assert team.sent / dense == pytest.approx(1 / 32 + 1 / 1024, rel=0.001)


def test_dgc_sends_an_index_and_a_value_for_each_of_few() -> None:
    team = Team(Dgc(density=0.001, warmup_steps=0), 4, [(100, 1000)], num_flags=0)
    team.exchange(team.gradients(0))
    assert team.sent == 3 * 100 * 8


# Against plain torch.


def mean(gradients: list[torch.Tensor]) -> torch.Tensor:
    return sum(gradients[1:], gradients[0].clone())


def quantised(x: torch.Tensor, block: int) -> torch.Tensor:
    blocks = x.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return torch.where(scale > 0, (blocks / scale).round() * scale, blocks * 0).view(-1)


def test_int8_is_two_roundings_whatever_the_number_of_ranks() -> None:
    team = Team(Int8(block=8), 3, [(240,)])
    gradients = team.gradients(0)
    sent = [quantised(g, 8) for g in gradients]
    expected = quantised(sent[0] + sent[1] + sent[2], 8)
    torch.testing.assert_close(team.exchange(gradients)[0], expected)


def test_stochastic_rounding_is_right_on_average_and_independent_between_ranks() -> None:
    team = Team(Int8(rounding="stochastic"), 4, [(512,)])
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
    team = Team(OneBit(block=block, start_step=0), ranks, [(2 * block * ranks - 5,)])
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
    team = Team(OneBit(block=64, start_step=0), 1, [(64,)])
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(team.exchange([x])[0], x.sign() * x.abs().mean())


def test_powersgd_of_full_rank_is_dense() -> None:
    team = Team(PowerSgd(start_step=0), 3, [(40, 30), (12, 500)])
    team.compressors = [
        PowerSgdCompressor(
            PowerSgdCodec(rank=30, min_compression_rate=0.01),
            team.shapes,
            torch.float32,
            Ranks(rank, 3),
            torch.device("cpu"),
            start_step=0,
            warm_start=True,
            feedback=True,
            num_flags=2,
        )
        for rank in range(3)
    ]
    for step in range(3):
        gradients = team.gradients(step)
        result = team.exchange(gradients, step)[0]
        torch.testing.assert_close(result, mean(gradients), atol=1e-5, rtol=1e-4)


def test_powersgd_follows_a_low_rank_sum() -> None:
    team = Team(PowerSgd(rank=2, start_step=0), 3, [(60, 50)])
    random = torch.Generator().manual_seed(3)
    shares = [
        (torch.randn(60, 2, generator=random) @ torch.randn(2, 50, generator=random)) for _ in "abc"
    ]
    basis = torch.linalg.svd(sum(shares)).U[:, :2]
    shares = [basis @ basis.T @ share for share in shares]  # all ranks in one plane
    for step in range(2):
        result = team.exchange([share.flatten() for share in shares], step)[0]
    torch.testing.assert_close(result.view(60, 50), sum(shares), atol=1e-4, rtol=1e-3)


def test_dgc_at_density_one_is_sgd_with_momentum() -> None:
    for nesterov in (False, True):
        weight = torch.nn.Parameter(torch.ones(8, 8))
        twin = torch.nn.Parameter(torch.ones(8, 8))
        sgd = torch.optim.SGD([twin], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
        compressors = [
            DgcCompressor(
                DgcCodec(1.0),
                [(8, 8)],
                torch.float32,
                Ranks(rank, 2),
                torch.device("cpu"),
                momenta=[Momentum(0.9, nesterov, 0.01, weight)],
            )
            for rank in range(2)
        ]
        for step in range(5):
            random = torch.Generator().manual_seed(step)
            shares = [torch.randn(64, generator=random) / 2 for _ in range(2)]
            twin.grad = (shares[0] + shares[1]).view(8, 8)
            sgd.step()
            num_flags = [torch.zeros(0, dtype=torch.uint8)] * 2
            values = [share.clone() for share in shares]
            every = zip(compressors, values, num_flags, strict=True)
            run_together([c.exchange(v, r, step) for c, v, r in every])
            for compressor in compressors:
                compressor.commit()
            weight.data.sub_(0.1 * values[0].view(8, 8))
            torch.testing.assert_close(weight, twin)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_is_momentum_that_gathers_until_it_is_among_the_largest(nesterov, decay) -> None:
    ranks, size, count, m = 3, 400, 20, 0.9
    weight = torch.linspace(-1, 1, size).view(20, 20)
    compressors = [
        DgcCompressor(
            DgcCodec(count / size),
            [(20, 20)],
            torch.float32,
            Ranks(rank, ranks),
            torch.device("cpu"),
            momenta=[Momentum(m, nesterov, decay, weight)],
        )
        for rank in range(ranks)
    ]
    u, v = torch.zeros(2, ranks, size)
    for step in range(8):
        random = torch.Generator().manual_seed(step)
        shares = torch.randn(ranks, size, generator=random) / ranks
        expected = torch.zeros(size)
        for rank in range(ranks):
            g = shares[rank] + decay / ranks * weight.flatten()
            u[rank] = m * (u[rank] + g) if nesterov else m * u[rank] + g
            v[rank] += u[rank] + g if nesterov else u[rank]
            largest = v[rank].abs().topk(count).indices
            expected[largest] += v[rank, largest]
            v[rank, largest] = u[rank, largest] = 0
        values = list(shares.clone())
        num_flags = [torch.zeros(1, dtype=torch.uint8) for _ in values]
        every = zip(compressors, values, num_flags, strict=True)
        run_together([c.exchange(x, r, step) for c, x, r in every])
        for compressor, result in zip(compressors, values, strict=True):
            compressor.commit()
            torch.testing.assert_close(result, expected)


def test_dgc_finds_the_largest_of_many_part_by_part() -> None:
    team = Team(Dgc(density=0.001, warmup_steps=0), 1, [(300, 1000)])
    x = torch.randn(team.size, generator=torch.Generator().manual_seed(4))
    sent = team.exchange([x])[0].nonzero().view(-1)
    assert torch.equal(sent.sort().values, largest(x, 300, 0.01, 0).sort().values)
    assert 240 <= len(sent) <= 300
    assert set(sent.tolist()) <= set(x.abs().topk(300).indices.tolist())
    assert {int(i) * 4 // 300_000 for i in sent} == {0, 1, 2, 3}  # all over it


def test_dgc_sends_the_largest_and_masks_their_momentum() -> None:
    team = Team(Dgc(density=0.1, warmup_steps=0), 1, [(10, 10)])
    x = torch.arange(100.0)
    result = team.exchange([x])[0]
    assert torch.equal(result.nonzero().view(-1), torch.arange(90, 100))
    (state,) = team.compressors[0].state()
    assert not state["velocity"][90:].any()
    assert not state["momentum"][90:].any()
    assert torch.equal(state["velocity"][:90], x[:90])


def test_dgc_clips_what_comes_in() -> None:
    clipped = Team(Dgc(density=1, warmup_steps=0, clip=1.0), 4, [(10, 10)])
    gradients = [torch.full((100,), 3.0) for _ in range(4)]
    result = clipped.exchange(gradients)[0]
    # Each rank's share: its norm is at most clip / sqrt(4) / 4, and there are four of them.
    assert float(result.norm()) == pytest.approx(0.5, rel=1e-5)


def test_dgc_warms_up() -> None:
    team = Team(WISHES["dgc, warm-up"], 1, [(100, 100)])
    shares = [(team.exchange(team.gradients(s), s)[0] != 0).float().mean().item() for s in range(5)]
    assert shares[0] == 1.0
    assert shares[1] == pytest.approx(0.5, abs=0.01)
    assert shares[2] == pytest.approx(0.1, abs=0.03)
    assert shares[3] == pytest.approx(0.05, abs=0.02)


def test_16_bits_need_no_coder() -> None:
    for dtype, far in (("bf16", 2**-8), ("fp16", 2**-11)):
        codec, x = HalfCodec(dtype), torch.randn(1000, generator=torch.Generator().manual_seed(1))
        back = codec.decode(codec.encode(x), torch.float32)
        assert ((back - x).abs() <= far * x.abs() + 1e-7).all()
        pair = torch.complex(x[:10], x[10:20])
        assert (codec.decode(codec.encode(pair), torch.complex64) - pair).abs().max() < 0.02
    assert Half().exactness == "lossy"
