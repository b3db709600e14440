"""The state of ranks' optimizers is averaged where they keep the same, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import slipstream
from tests.harness.ranks import Ranks

AVERAGED = {"local": {"steps": 2, "inner_state": "averaged"}}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def of_two_experts() -> list[tuple[Tensor, Tensor]]:
    """Of each expert that this rank has used: what Adam keeps before and after a meeting."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    optimizer = Adam(model.parameters())
    with slipstream.accelerate(model, optimizer, None, AVERAGED) as session:
        own = model[session.rank]
        session.backward(own(torch.ones(2, 3) + session.rank).mean())
        session.step()
        before = optimizer.state[own.weight]["exp_avg"].clone()
        session.backward(own(torch.ones(2, 3) + session.rank).mean() * 0.0)
        session.step()
        after = optimizer.state[own.weight]["exp_avg"].clone()
    return [(before, after)]


def test_states_of_different_parameters_are_not_averaged(two: Ranks) -> None:
    for [(before, after)] in two.run(of_two_experts):
        torch.testing.assert_close(after, 0.9 * before)  # a gradient of zero


def of_complex_numbers() -> Tensor:
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model = nn.ParameterList([weight])
    optimizer = Adam(model.parameters())
    with slipstream.accelerate(model, optimizer, None, AVERAGED) as session:
        for _ in range(2):
            session.backward((weight * (1 + session.rank)).abs().square().mean())
            session.step()
        found: Tensor = optimizer.state[weight]["exp_avg"].clone()
    return found


def test_the_state_of_complex_parameters_is_averaged_too(two: Ranks) -> None:
    first, second = two.run(of_complex_numbers)
    assert torch.equal(first, second)
