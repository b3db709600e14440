"""PowerSGD against plain torch: full rank, and a sum of low rank."""

from __future__ import annotations

import torch

from slipstream.codecs import (
    PowerSgdCodec,
    PowerSgdCompressor,
    Ranks,
)
from slipstream.strategy import PowerSgdConfig
from tests.codecs.compressors import Team

# Against plain torch.


def mean(gradients: list[torch.Tensor]) -> torch.Tensor:
    return sum(gradients[1:], gradients[0].clone())


def test_powersgd_of_full_rank_is_dense() -> None:
    team = Team(PowerSgdConfig(start_step=0), 3, [(40, 30), (12, 500)])
    team.compressors = [
        PowerSgdCompressor(
            PowerSgdCodec(rank=30, min_compression_rate=0.01),
            team.shapes,
            torch.float32,
            Ranks(rank, 3),
            torch.device("cpu"),
            start_step=0,
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
    team = Team(PowerSgdConfig(rank=2, start_step=0), 3, [(60, 50)])
    random = torch.Generator().manual_seed(3)
    shares = [
        (torch.randn(60, 2, generator=random) @ torch.randn(2, 50, generator=random)) for _ in "abc"
    ]
    basis = torch.linalg.svd(sum(shares)).U[:, :2]
    shares = [basis @ basis.T @ share for share in shares]  # all ranks in one plane
    for step in range(2):
        result = team.exchange([share.flatten() for share in shares], step)[0]
    torch.testing.assert_close(result.view(60, 50), sum(shares), atol=1e-4, rtol=1e-3)
