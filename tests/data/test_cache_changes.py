"""A dataset that is changed while its samples are kept: no sample of before is given out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from slipstream.data.cache import cached, cached_loader
from slipstream.data.prefetch import prefetch
from slipstream.errors import DataError
from slipstream.strategy import CacheConfig, PrefetchConfig
from tests.data.datasets import Scale, Scaled

pytest.importorskip("lmdb")


def another(data: Scaled) -> None:
    data.transform = Scale(2.0)


def inside(data: Scaled) -> None:
    data.transform.factor = 2.0


def values(data: Scaled) -> None:
    data.values.add_(1)


@pytest.mark.parametrize("change", [another, inside, values])
def test_it_is_refused_where_the_next_epoch_begins(
    tmp_path: Path, change: Callable[[Scaled], None]
) -> None:
    data = Scaled(6)
    kept = cached(data, CacheConfig(folder=str(tmp_path), gigabytes=0.01))
    for _ in range(2):
        assert [float(kept[i]) for i in range(6)] == [0, 1, 2, 3, 4, 5]
    change(data)
    with pytest.raises(DataError, match=r"Scaled was changed after sample . was kept"):
        kept[1]
    kept.close()


def test_another_attribute_is_seen_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    data = Scaled(6)
    kept = cached(data, CacheConfig(folder=str(tmp_path), gigabytes=0.01))
    _ = [kept[i] for i in range(6)], kept[0]
    another(data)
    with pytest.raises(DataError, match="was changed"):
        kept[1]
    kept.close()


def test_what_does_not_change_samples_may_be_set(tmp_path: Path) -> None:
    data: Any = Scaled(6)
    kept = cached(data, CacheConfig(folder=str(tmp_path), gigabytes=0.01))
    for epoch in range(3):
        assert [float(kept[i]) for i in range(6)] == [0, 1, 2, 3, 4, 5]
        data.epoch = epoch
    kept.close()


def test_a_sample_that_is_changed_in_place_is_kept_as_it_was(tmp_path: Path) -> None:
    kept = cached(Scaled(6), CacheConfig(folder=str(tmp_path), gigabytes=0.01))
    for _ in range(2):
        sample = kept[3]
        assert float(sample) == 3
        sample.zero_()
    kept.close()


def test_it_is_refused_where_prefetch_reads_in_this_process(tmp_path: Path) -> None:
    """From a copy of the dataset, which later workers share no files with."""
    data = Scaled(6)
    config = CacheConfig(folder=str(tmp_path), gigabytes=0.01)
    loader, kept = cached_loader(DataLoader(data, batch_size=2), config)
    ahead = prefetch(loader, PrefetchConfig())
    assert torch.equal(torch.cat([*ahead]), data.values)
    another(data)
    with pytest.raises(DataError, match=r"Scaled was changed after sample . was kept"):
        list(ahead)
    kept.close()
    assert torch.equal(torch.cat([*ahead]), 2 * data.values)
    ahead.close()


def test_what_is_set_on_the_cached_dataset_is_set_on_the_users(tmp_path: Path) -> None:
    """As ``session.loader.dataset.transform = ...`` does."""
    data = Scaled(6)
    kept: Any = cached(data, CacheConfig(folder=str(tmp_path), gigabytes=0.01))
    assert [float(kept[i]) for i in range(6)] == [0, 1, 2, 3, 4, 5]
    kept.transform = Scale(2.0)
    assert data.transform is kept.transform
    with pytest.raises(DataError, match="Scaled was changed"):
        kept[1]
    kept.close()
