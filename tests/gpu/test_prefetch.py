"""Batches that are read ahead onto the device: as those of the loader, in its order."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream.data.prefetch import prefetch
from slipstream.strategy import PrefetchConfig

pytestmark = pytest.mark.gpu


@pytest.mark.process
@pytest.mark.parametrize("threads", [True, False])
def test_batches_come_on_the_device_while_the_one_before_is_computed_with(threads: bool) -> None:
    data = TensorDataset(torch.arange(4_000_000.0).view(40, -1))
    loading = DataLoader(data, batch_size=3)
    config = PrefetchConfig(workers=1, threads=threads, to_device=True)
    loader = prefetch(loading, config, device=torch.device("cuda"))
    for _ in range(2):
        sums = []
        for (batch,) in loader:
            assert batch.is_cuda
            for _ in range(20):  # which the next copy must not disturb
                product = batch @ batch.T
            sums.append((batch.sum(), product.trace()))
        for (one, traced), (plain,) in zip(sums, loading, strict=True):
            torch.testing.assert_close(one.cpu(), plain.sum())
            torch.testing.assert_close(traced.cpu(), plain.square().sum())
    loader.close()


def test_batches_are_pinned_where_they_are_copied_from() -> None:
    loading = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    loader = prefetch(loading, PrefetchConfig(threads=True, workers=1), device=torch.device("cuda"))
    assert all(batch.is_pinned() for (batch,) in loader)
    loader.close()
