"""The state of ranks' optimizers is averaged where they keep the same, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import slipstream
from slipstream.errors import ExchangeError, ModelError
from tests.harness.ranks import Ranks
from tests.local.test_training import build, loss_of

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


def with_a_later_optimizer(inner_state: str) -> list[Tensor]:
    """What an optimizer that is made later keeps of its layer, after a meeting."""
    model = build()
    held = [p for name, p in model.named_parameters() if not name.startswith("1.")]
    first = Adam(held, lr=0.02)
    strategy = {"local": {"steps": 4, "inner_state": inner_state}}
    with slipstream.accelerate(model, first, None, strategy) as session:
        second = Adam(model[1].parameters(), lr=0.02)
        for update in range(4):
            session.backward(loss_of(model, session.rank, update))
            second.step()
            session.step()
        return [state["exp_avg"].clone() for state in second.state.values()]


def test_the_state_of_another_optimizer_is_averaged_and_forgotten_too(two: Ranks) -> None:
    first, second = two.run(with_a_later_optimizer, "averaged")
    assert len(first) == 2
    assert all(map(torch.equal, first, second))
    assert two.run(with_a_later_optimizer, "reset") == [[], []]


def diverging_by_two_optimizers() -> list[bool]:
    """Whether the parameters are finite after each update, of which one rank's second is not."""
    model, finite = build(), []
    first, second = Adam([model.scale], lr=0.02), Adam(model[1].parameters(), lr=0.02)
    strategy = {"local": {"steps": 3}, "checks": {"nonfinite": "allow"}}
    with (
        warnings.catch_warnings(action="ignore"),
        slipstream.accelerate(model, first, None, strategy) as session,
    ):
        for update in range(1, 8):
            bad = update == 2 and session.rank == 1
            session.backward(loss_of(model, session.rank, update) * (torch.nan if bad else 1.0))
            second.step()
            session.step()
            finite.append(all(bool(p.isfinite().all()) for p in model.parameters()))
    return finite


def test_a_rank_that_diverges_forgets_the_state_of_all_its_optimizers(two: Ranks) -> None:
    fine, cured = two.run(diverging_by_two_optimizers)
    assert all(fine)
    assert cured == [True, False] + [True] * 5


class Masters(torch.optim.Optimizer):
    """Steps on fp32 copies of the parameters, as fused optimizers of some libraries do."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.float().clone())
                master -= 0.1 * p.grad
                p.copy_(master)


@pytest.mark.parametrize("delay", [0, 1])
def test_an_optimizer_that_keeps_copies_of_its_parameters_is_refused(
    two: Ranks, delay: int
) -> None:
    for said in two.run(stepped_on_copies, delay):
        assert "Masters keeps a copy of its parameters (state 'master')" in said


def stepped_on_copies(delay: int) -> str:
    model = nn.Linear(3, 1).bfloat16()
    strategy = {"local": {"steps": 2, "delay": delay}}
    session = slipstream.accelerate(model, Masters(model.parameters()), None, strategy)
    said = ""
    for _ in range(4):
        session.backward(model(torch.ones(2, 3).bfloat16() + session.rank).mean())
        try:
            session.step()
        except ModelError as error:
            said = str(error)
            break
    with suppress(ExchangeError):
        session.close()
    return said


def with_its_average() -> int:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.ASGD(model.parameters())  # keeps the parameters themselves until t0
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 2}}) as session:
        for _ in range(4):
            session.backward(model(torch.ones(2, 3) + session.rank).mean())
            session.step()
        return session.updates


def test_an_optimizer_that_keeps_an_average_is_no_copy(two: Ranks) -> None:
    assert two.run(with_its_average) == [4, 4]
