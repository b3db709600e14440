"""Kept samples: the same as read, read once, within bounds, shared by processes, never left."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import slipstream
from slipstream.data.cache import cached, store
from slipstream.data.cache.dataset import FOLDER
from slipstream.data.pickled import pickled
from slipstream.errors import DataError, ModelError
from slipstream.strategy import CacheConfig


class Rows(Dataset[Any]):
    """Views of one tensor, with what else samples are made of; counts how often each is read."""

    def __init__(self, size: int, width: int = 4, value: float = 0.0) -> None:
        self.rows = torch.arange(float(size * width)).view(size, width) + value
        self.reads = Counter[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        row = self.rows[index]
        return {"row": row, "half": row.bfloat16(), "array": row.numpy(), "words": ("a", index)}


def assert_equal(one: Any, other: Any) -> None:
    assert torch.equal(one["row"], other["row"])
    assert torch.equal(one["half"], other["half"])
    assert np.array_equal(one["array"], other["array"])
    assert one["words"] == other["words"]


@pytest.fixture
def config(tmp_path: Path) -> CacheConfig:
    return CacheConfig(folder=str(tmp_path), gigabytes=0.01)


def test_samples_are_those_of_the_dataset_and_read_once(config: CacheConfig) -> None:
    data = Rows(6)
    kept = cached(data, config, key="rows")
    for _ in range(3):
        for index in range(6):
            assert_equal(kept[index], Rows(6)[index])
    assert set(data.reads.values()) == {1}
    assert kept.report_rows()[0].value == "6 of 6 samples"
    assert kept.rows is data.rows
    kept.close()
    kept.close()
    again = cached(data, config, key="rows")  # on disk it stays
    assert_equal(again[2], data[2])
    assert data.reads[2] == 2  # the one of this line
    again.close()


def test_what_is_kept_of_a_view_is_no_more_than_the_view() -> None:
    rows = torch.zeros(1000, 1000)
    assert len(pickled(rows[3])) < 8000
    assert len(pickle.dumps(rows[3])) > 4_000_000


def test_a_view_of_one_value_is_kept_whatever_its_stride() -> None:
    value = torch.tensor([2.0], dtype=torch.bfloat16)
    assert pickled(value[0].expand(1)) == pickled(value)


def test_a_full_cache_keeps_what_it_has_and_reads_the_others(config: CacheConfig) -> None:
    data = Rows(40, width=50_000)
    kept = cached(data, config)
    for _ in range(2):
        for index in range(40):
            assert torch.equal(kept[index]["row"], data.rows[index])
    [row] = kept.report_rows()
    assert "it is full" in row.note
    assert 0 < int(row.value.split()[0]) < 40
    kept.close()


def test_another_dataset_has_another_cache(config: CacheConfig) -> None:
    first, second = cached(Rows(5), config), cached(Rows(5, value=1.0), config)
    assert first[1]["row"][0] + 1 == second[1]["row"][0]
    first.close()
    second.close()


def test_folds_have_caches_of_their_own(config: CacheConfig) -> None:
    """Of ten folds, whose eight samples that are looked at are equal."""
    data = Rows(100)
    folds = [Subset(data, [i for i in range(100) if i // 10 != fold]) for fold in (8, 9)]
    for _ in range(2):
        first, second = (cached(fold, config) for fold in folds)
        assert_equal(first[85], data[95])
        assert_equal(second[85], data[85])
        first.close()
        second.close()
        folds = [Subset(fold, range(90)) for fold in folds]


def test_folds_put_together_have_caches_of_their_own(config: CacheConfig) -> None:
    data = Rows(100)
    parts = [Subset(data, torch.arange(10 * n, 10 * n + 10)) for n in range(10)]  # type: ignore[arg-type]
    folds = [ConcatDataset([part for part in parts if part is not parts[out]]) for out in (8, 9)]
    first, second = (cached(fold, config) for fold in folds)
    assert_equal(first[85], data[95])
    assert_equal(second[85], data[85])
    first.close()
    second.close()


def test_random_samples_are_refused(config: CacheConfig) -> None:
    class Noise(Rows):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(3)

    with pytest.raises(ModelError, match=r"Noise gives another sample 0 each time.*draw from that"):
        cached(Noise(5), config)


def test_samples_that_change_with_the_epoch_are_refused(config: CacheConfig) -> None:
    class Epochs(Rows):
        def set_epoch(self, epoch: int) -> None:
            self.rows = self.rows + epoch

    with pytest.raises(ModelError, match="Epochs has set_epoch, so its samples change"):
        cached(Epochs(5), config)


def test_no_room_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"are asked for, .* GiB are free; set data.cache.gigabyte"):
        cached(Rows(5), CacheConfig(folder=str(tmp_path), gigabytes=1e6))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data.cache cannot use .*file"):
        cached(Rows(5), CacheConfig(folder=str(tmp_path / "file")))
    (tmp_path / "link").symlink_to("/nonexistent/scratch")
    with pytest.raises(DataError, match=r"data.cache cannot use .*link"):
        cached(Rows(5), CacheConfig(folder=str(tmp_path / "link")))


FILLS_UP = """
import os, shutil, torch
from slipstream.data.cache import cached
from slipstream.strategy import CacheConfig

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((2**12,), float(index))  # 16 KiB

kept = cached(Rows(), CacheConfig(folder="/mnt", gigabytes=2 / 2**10))
for index in range(8):
    kept[index]
with open("/mnt/other", "wb") as other:
    other.write(bytes(shutil.disk_usage("/mnt").free - 2**17))
for epoch in range(2):
    for index in range(64):
        assert kept[index].eq(index).all() and kept[index].numel() == 2**12
print(kept.report_rows())
"""


@pytest.mark.namespace
@pytest.mark.process
def test_a_disk_that_fills_up_ends_the_keeping_and_nothing_else() -> None:
    """In a mount namespace with a disk of 4 MiB, which another process fills."""
    mounted = 'mount -t tmpfs -o size=4m tmpfs /mnt && exec "$0" -c "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted]
    done = subprocess.run(
        [*command, sys.executable, FILLS_UP], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "full" in done.stdout


def test_caches_that_nobody_uses_make_room(
    tmp_path: Path, config: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, used = cached(Rows(5), config, key="old"), cached(Rows(5), config, key="used")
    old.close()
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=0))
    with pytest.raises(DataError, match=r"0\.00 GiB are free"):
        cached(Rows(5), config, key="new")
    root = tmp_path / FOLDER
    names = {path.name.partition("-")[0] for path in root.iterdir()}
    assert names == {"used"}
    used.close()


def test_a_folder_of_another_user_is_refused(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = cached(Rows(5), CacheConfig(gigabytes=0.01))
    [root] = memory.iterdir()
    assert root.stat().st_mode & 0o77 == 0
    kept.close()
    other = os.getuid() + 1
    (memory / f"{FOLDER}-{other}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(DataError, match="belongs to another user"):
        cached(Rows(5), CacheConfig(gigabytes=0.01))


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(store, "MEMORY", tmp_path / "memory")
    return tmp_path / "memory"


def test_in_memory_the_last_one_removes_it(memory: Path) -> None:
    config = CacheConfig(gigabytes=0.01)
    first, second = cached(Rows(5), config), cached(Rows(5), config)
    [root] = memory.iterdir()
    assert_equal(first[3], Rows(5)[3])
    first.close()
    assert_equal(second[3], Rows(5)[3])
    assert len([*root.iterdir()]) == 1
    second.close()
    assert not root.exists()


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("take", [copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
def test_a_copy_is_a_user_of_its_own_from_its_first_read(
    memory: Path, take: Callable[[Any], Any], is_read: bool
) -> None:
    kept = cached(Rows(5), CacheConfig(gigabytes=0.01))
    other, forgotten = take(kept), take(kept)
    if is_read:
        assert_equal(other[3], Rows(5)[3])
        assert_equal(forgotten[3], Rows(5)[3])
    del forgotten
    kept.close()
    assert is_read == bool([*memory.iterdir()])
    other.close()
    assert not [*memory.iterdir()]
    assert_equal(other[3], Rows(5)[3])


def test_a_shallow_copy_is_closed_with_it(memory: Path) -> None:
    kept = cached(Rows(5), CacheConfig(gigabytes=0.01))
    other = copy.copy(kept)
    assert_equal(other[3], kept[3])
    kept.close()
    assert not [*memory.iterdir()]
    assert_equal(other[3], Rows(5)[3])


@pytest.mark.process
def test_workers_that_live_longer_remove_it(memory: Path) -> None:
    kept = cached(Rows(6), CacheConfig(gigabytes=0.01))
    loader = DataLoader(
        kept,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
        collate_fn=lambda rows: rows[0]["row"],
    )
    assert len([*loader]) == 6
    kept.close()
    assert [*memory.iterdir()]  # workers read from it
    assert len([*loader]) == 6
    del loader
    assert not [*memory.iterdir()]


@pytest.mark.process
def test_workers_share_it_and_a_killed_one_leaves_it_intact(config: CacheConfig) -> None:
    data = Rows(64)
    kept = cached(data, config)

    def read(stop_at: int) -> None:
        for index in range(64):
            kept[index]
            if index == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)

    fork = multiprocessing.get_context("fork")
    readers = [fork.Process(target=read, args=(stop_at,)) for stop_at in (20, 50, 99)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers] == [-9, -9, 0]
    assert kept.report_rows()[0].value == "64 of 64 samples"
    data.reads.clear()
    for index in range(64):
        assert torch.equal(kept[index]["row"], data.rows[index])
    assert not data.reads
    kept.close()


@pytest.mark.process
@pytest.mark.parametrize("prefetch", [None, {"workers": 1}])
def test_a_session_keeps_samples(tmp_path: Path, prefetch: Any) -> None:
    data = Rows(12)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"folder": str(tmp_path), "gigabytes": 0.01}
    strategy = {"data": {"cache": settings, "prefetch": prefetch}}
    loader = DataLoader(
        data, batch_size=3, collate_fn=lambda rows: torch.stack([r["row"] for r in rows])
    )
    with slipstream.accelerate(model, optimizer, loader, strategy=strategy) as session:
        for _ in range(2):
            seen = []
            for batch in session.loader:
                seen.append(batch)
                session.backward(session.model(batch).mean())
                session.step()
            assert torch.equal(torch.cat(seen), data.rows)
        assert "12 of 12 samples" in session.report()


def test_streams_and_lists_are_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ModelError, match="this is a list: give a DataLoader"):
        slipstream.accelerate(model, optimizer, [1], strategy={"data": {"cache": {}}})


@pytest.mark.parametrize("looks", [1, 2])
def test_a_folder_that_its_last_user_removes_meanwhile_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    root, stat, seen = tmp_path / "kept" / "samples", Path.stat, []

    def removed_meanwhile(path: Path, **given: Any) -> os.stat_result:
        if path == root and os.path.isdir(root):
            seen.append(path)
            if len(seen) == looks:
                root.rmdir()
        return stat(path, **given)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", removed_meanwhile)
        with store._alone_in(root):
            assert os.path.isdir(root)
    assert not root.exists()
    assert len(seen) >= looks
