"""A loader that one rank cannot use is refused on all of them: nobody waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from slipstream.errors import MismatchError, ModelError
from tests.harness.ranks import Ranks
from tests.session.training import loss_of, opened


def given(kind: str) -> None:
    data: Any = [1.0, 2.0, 3.0, 4.0]
    loader: Any = DataLoader(data, batch_size=2)
    strategy: dict[str, Any] = {}
    if kind == "prefetch":
        strategy = {"data": {"prefetch": {"threads": True, "workers": 1}}}
    if dist.get_rank() == 1:
        loaders = {"empty": DataLoader(data[:1], batch_size=2, drop_last=True), "prefetch": [1, 2]}
        loader = loaders.get(kind)
    opened(strategy, loader).close()


@pytest.mark.parametrize(
    ("kind", "own", "others"),
    [
        (
            "empty",
            "has no batch on this rank",
            "rank 1 cannot go on: ModelError: the loader has no",
        ),
        ("prefetch", "give a DataLoader", "rank 1 cannot go on: ModelError: data.prefetch reads"),
    ],
)
def test_a_loader_that_one_rank_cannot_use(two: Ranks, kind: str, own: str, others: str) -> None:
    errors = two.fail(given, kind)
    assert type(errors[1]) is ModelError
    assert own in str(errors[1])
    assert type(errors[0]) is MismatchError
    assert others in str(errors[0])


def test_a_loader_on_some_ranks_only(two: Ranks) -> None:
    for error in two.fail(given, "none").values():
        assert type(error) is MismatchError
        assert "the loader: none on rank 1, given on rank 0" in str(error)


def seen_again(strategy: Any) -> list[int]:
    """Batches of a pass over the loader of a session that is over; rank 1 has fewer."""
    loader: Any = [*range(4 - 2 * dist.get_rank())]
    for _ in range(3):
        with opened(strategy, loader) as session:
            loader, seen = session.loader, []
            for batch in loader:
                seen.append(batch)
                session.backward(loss_of(session))
                session.step()
    return seen


def test_the_loader_of_a_session_that_is_over_keeps_ranks_in_step_again(two: Ranks) -> None:
    assert two.run(seen_again, {}) == [[0, 1, 2, 3], [0, 1, 1, 1]]
