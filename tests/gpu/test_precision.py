"""The battery of every precision on CUDA: one process, and two ranks that share one GPU by gloo."""

from __future__ import annotations

import pytest
import torch

import slipstream
from tests.harness.ranks import Ranks
from tests.precision.battery import CASES, build, holds, losses

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "codec" not in str(c)])
def test_every_precision_holds_on_one_process(name: str) -> None:
    holds(CASES[name], "cuda")


@pytest.mark.parametrize("name", CASES)
def test_every_precision_holds_on_two_ranks(two: Ranks, name: str) -> None:
    two.run(holds, CASES[name], "cuda")


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "plain" in n])
def test_it_learns(name: str) -> None:
    first, last = losses(CASES[name], "cuda")
    assert last < 0.5 * first


def test_tf32_is_for_the_time_of_a_session() -> None:
    model, optimizer = build("cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    with slipstream.accelerate(model, optimizer, None, {"compute": {"tf32": True}}) as session:
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert "active" in session.report()
    assert torch.backends.cuda.matmul.fp32_precision == before
