"""DGC against plain torch: momentum, the largest values, clipping and warm-up."""

from __future__ import annotations

import pytest
import torch

from slipstream.codecs import (
    DgcCodec,
    DgcCompressor,
    Momentum,
    Ranks,
)
from slipstream.codecs.dgc import largest
from slipstream.strategy import DgcConfig
from tests.codecs.compressors import CONFIGS, Team, run_together


def test_dgc_sends_an_index_and_a_value_for_each_of_few() -> None:
    team = Team(DgcConfig(density=0.001, warmup_steps=0), 4, [(100, 1000)], num_flags=0)
    team.exchange(team.gradients(0))
    assert team.sent == 3 * 100 * 8


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
    team = Team(DgcConfig(density=0.001, warmup_steps=0), 1, [(300, 1000)])
    x = torch.randn(team.size, generator=torch.Generator().manual_seed(4))
    sent = team.exchange([x])[0].nonzero().view(-1)
    assert torch.equal(sent.sort().values, largest(x, 300, 0.01, 0).sort().values)
    assert 240 <= len(sent) <= 300
    assert set(sent.tolist()) <= set(x.abs().topk(300).indices.tolist())
    assert {int(i) * 4 // 300_000 for i in sent} == {0, 1, 2, 3}  # all over it


def test_dgc_sends_the_largest_and_masks_their_momentum() -> None:
    team = Team(DgcConfig(density=0.1, warmup_steps=0), 1, [(10, 10)])
    x = torch.arange(100.0)
    result = team.exchange([x])[0]
    assert torch.equal(result.nonzero().view(-1), torch.arange(90, 100))
    (state,) = team.compressors[0].state()
    assert not state["velocity"][90:].any()
    assert not state["momentum"][90:].any()
    assert torch.equal(state["velocity"][:90], x[:90])


def test_dgc_clips_what_comes_in() -> None:
    clipped = Team(DgcConfig(density=1, warmup_steps=0, clip=1.0), 4, [(10, 10)])
    gradients = [torch.full((100,), 3.0) for _ in range(4)]
    result = clipped.exchange(gradients)[0]
    # Each rank's share: its norm is at most clip / sqrt(4) / 4, and there are four of them.
    assert float(result.norm()) == pytest.approx(0.5, rel=1e-5)


def test_dgc_warms_up() -> None:
    team = Team(CONFIGS["dgc, warm-up"], 1, [(100, 100)])
    shares = [(team.exchange(team.gradients(s), s)[0] != 0).float().mean().item() for s in range(5)]
    assert shares[0] == 1.0
    assert shares[1] == pytest.approx(0.5, abs=0.01)
    assert shares[2] == pytest.approx(0.1, abs=0.03)
    assert shares[3] == pytest.approx(0.05, abs=0.02)
