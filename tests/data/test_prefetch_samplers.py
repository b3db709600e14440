"""Prefetch: samplers that draw whole batches, or from other generators than torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
)

from slipstream.data.lengths import certain_length, epoch_of
from slipstream.data.prefetch import prefetch
from slipstream.strategy import PrefetchConfig
from tests.data.datasets import Numbers, generator

IN_THREADS = PrefetchConfig(threads=True, workers=1, depth=7)


class Rows(Dataset[torch.Tensor]):
    """Its samples are batches, asked for by the indices that a sampler draws together."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, indices: Any) -> torch.Tensor:
        return torch.tensor(indices)


class OfThisEpoch(Sampler[int]):
    """One of the user's, that is told the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, 14))

    def __len__(self) -> int:
        return 14


INNER: dict[str, Callable[[], Sampler[int]]] = {
    "a share": lambda: DistributedSampler(Rows(), num_replicas=2, rank=0),
    "the user's": OfThisEpoch,
    "shuffled": lambda: RandomSampler(Rows(), generator=generator()),
}


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("lengths", [[None] * 3, [2, None, 1, None]])
@pytest.mark.parametrize("kind", INNER)
def test_a_sampler_may_draw_whole_batches(
    kind: str, lengths: list[int | None], batch_size: int | None
) -> None:
    """A `BatchSampler` as the sampler: the epoch and the generator of what it draws from count."""

    def seen(ahead: bool) -> list[Any]:
        inner: Any = INNER[kind]()
        sampler = BatchSampler(inner, 3, drop_last=True)
        loader: Any = DataLoader(Rows(), batch_size, sampler=sampler, collate_fn=lambda rows: rows)
        if ahead:
            loader = prefetch(loader, IN_THREADS)
        found = []
        for epoch, length in enumerate(lengths):
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)
            found.append([[*map(str, batch)] for batch in islice(loader, length)])
        if ahead:
            loader.close()
        return found

    assert seen(ahead=True) == seen(ahead=False)


def test_what_is_known_of_whole_batches_is_known_of_what_they_are_drawn_from() -> None:
    def loader_of(inner: Any) -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(), batch_size=None, sampler=BatchSampler(inner, 3, drop_last=False))

    share, own = INNER["a share"](), OfThisEpoch()
    own.set_epoch(2)
    assert (certain_length(loader_of(share)), epoch_of(loader_of(share))) == (3, 0)
    assert (certain_length(loader_of(own)), epoch_of(loader_of(own))) == (None, 2)


class Drawn(Sampler[int]):
    """Draws from a generator that is none of torch's."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(7)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(6).tolist())

    def __len__(self) -> int:
        return 6


def test_a_sampler_may_have_a_generator_of_numpy() -> None:
    plain = DataLoader(Numbers(6), 2, sampler=Drawn())
    ahead = prefetch(DataLoader(Numbers(6), 2, sampler=Drawn()), IN_THREADS)
    for _ in range(2):
        assert [batch.tolist() for batch in ahead] == [batch.tolist() for batch in plain]
    ahead.close()


class DrawnByBatch(Sampler[list[int]]):
    """Draws each batch as it is asked for it."""

    def __init__(self) -> None:
        self.generator = generator()

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(4):
            yield torch.randint(6, (3,), generator=self.generator).tolist()


def test_the_generator_of_a_batch_sampler_is_where_the_training_is() -> None:
    def seen(loader: Any) -> list[Any]:
        return [[batch.tolist() for batch in islice(loader, length)] for length in (None, 2, None)]

    ahead = prefetch(DataLoader(Numbers(6), batch_sampler=DrawnByBatch()), IN_THREADS)
    assert seen(ahead) == seen(DataLoader(Numbers(6), batch_sampler=DrawnByBatch()))
    ahead.close()


def test_batches_may_be_sparse() -> None:
    """This process reads the first ones, and would ask how many bytes they have."""
    data: Any = torch.eye(4)
    loader = DataLoader(data, 2, collate_fn=lambda rows: torch.stack(rows).to_sparse())
    ahead = prefetch(loader)
    assert torch.equal(torch.cat([*ahead]).to_dense(), data)
    ahead.close()
