"""A script that skips an update on one rank, as torch's GradScaler does, stays in step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import slipstream
from tests.harness.ranks import Ranks
from tests.local.reference import flat
from tests.local.test_training import build, loss_of


def skipping(at: int, steps: int) -> tuple[int, Tensor]:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    session = slipstream.accelerate(model, optimizer, None, {"local": {"steps": steps}})
    for update in range(1, 7):
        session.backward(loss_of(model, session.rank, update))
        if not (update == at and session.rank):
            optimizer.step()
        optimizer.zero_grad()
    skipped = session.skipped
    session.close()
    return skipped, flat(model.parameters())


@pytest.mark.parametrize("at", [2, 4, 6])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_ranks_meet_though_one_has_skipped_an_update(two: Ranks, at: int, steps: int) -> None:
    (none, first), (one, second) = two.run(skipping, at, steps)
    assert (none, one) == (0, int(at < 6))  # the last shows when the session closes
    assert torch.equal(first, second)
