"""The spool file returns the same bytes, works beside the computation, and leaves nothing."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref

import pytest
import torch

from slipstream.errors import OffloadError
from slipstream.memory.offload import disk_store
from slipstream.memory.offload.disk_store import DiskStore


class BlockedStore(DiskStore):
    """A disk that reads and writes only when it is allowed to."""

    def __init__(self, *args, **kwargs):
        self.may_write, self.may_read = threading.Event(), threading.Event()
        self.reads = threading.Event()
        self.began = []
        super().__init__(*args, **kwargs)

    def _write(self, buffer, position):
        self.began.append("write")
        assert self.may_write.wait(60)
        super()._write(buffer, position)

    def _read(self, buffer, position):
        self.began.append("read")
        self.reads.set()
        assert self.may_read.wait(60)
        super()._read(buffer, position)

    def close(self):
        self.may_write.set()
        self.may_read.set()
        super().close()


@pytest.fixture
def store(tmp_path):
    store = BlockedStore(tmp_path)
    yield store
    store.close()


def some(number: int = 1000) -> torch.Tensor:
    return torch.randint(256, (number,), dtype=torch.uint8)


def test_bytes_come_back_several_times(store, tmp_path):
    store.may_write.set()
    store.may_read.set()
    given = [some(n) for n in (1, 4096, 100_003)]
    tickets = [store.put(raw, "x") for raw in given]
    for _ in range(2):
        for raw, ticket in reversed([*zip(given, tickets, strict=True)]):
            store.settle(ticket)
            store.fetch(ticket)
            back = store.take(ticket)
            assert torch.equal(back, raw)
            assert back.data_ptr() != raw.data_ptr()
    assert store.traffic.bytes_out == sum(raw.nbytes for raw in given)
    assert store.traffic.bytes_back == 2 * store.traffic.bytes_out
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_tensors_not_written_yet_are_taken_from_memory(store):
    raw = some()
    ticket = store.put(raw, "x")
    store.fetch(ticket)
    assert store.take(ticket).data_ptr() == raw.data_ptr()
    assert store.traffic.bytes_back == 0
    store.drop(ticket)


def test_memory_is_freed_once_it_is_written(store):
    raw = some()
    gone = threading.Event()
    ticket = store.put(raw, "x")
    weakref.finalize(raw.untyped_storage(), gone.set)
    del raw
    gc.collect()
    assert not gone.is_set()
    store.may_write.set()
    store.settle(ticket)
    assert gone.is_set()


def test_nobody_waits_before_the_bytes_are_needed(store):
    ticket = store.put(some(), "x")
    store.may_write.set()
    store.settle(ticket)
    store.fetch(ticket)
    store.fetch(ticket)  # once is enough
    assert store.traffic.seconds_waited < 60
    assert not ticket.read.done()
    store.may_read.set()
    store.take(ticket)
    assert store.began == ["write", "read"]


def test_a_ticket_dropped_early_is_never_written(store):
    tickets = [store.put(some(), "x") for _ in range(3)]
    store.drop(tickets[1])
    store.may_write.set()
    store.settle(tickets[2])
    assert store.began == ["write", "write"]


def test_slots_are_reused(store):
    store.may_write.set()
    store.may_read.set()
    for sizes in ([9000, 50_000], [70_000, 3000], [8000, 49_000]) * 20:
        tickets = [store.put(some(n), "x") for n in sizes]
        for ticket in tickets:
            store.settle(ticket)
            store.take(ticket)
            store.drop(ticket)
    assert store.reserved_bytes == disk_store.SLAB_BYTES


def test_a_slot_is_not_reused_while_it_is_read(store):
    store.may_write.set()
    ticket = store.put(some(), "x")
    store.settle(ticket)
    store.fetch(ticket)
    read = ticket.read
    assert store.reads.wait(60)
    store.drop(ticket)
    assert store.put(some(), "y").slot != ticket.slot
    store.may_read.set()
    read.result(60)
    assert store.put(some(), "z").slot == ticket.slot


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_an_error_at_once(tmp_path, monkeypatch):
    store = DiskStore(tmp_path, rank=3)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(
        OffloadError,
        match=r"rank 3: memory.offload cannot write an activation of encoder\.4 to .*"
        r"No space left on device.*free some disk space, name another folder, or offload less",
    ):
        store.put(some(), "encoder.4")
    store.close()


def test_a_budget_is_kept_and_named_in_errors(tmp_path):
    store = DiskStore(tmp_path, 2**20)
    with pytest.raises(
        OffloadError, match=r"0\.06 GiB would be needed, but the budget .* 0\.00 GiB"
    ):
        store.put(some(), "x")
    store.close()


def test_a_failed_write_raises_where_it_is_awaited(tmp_path, monkeypatch):
    store = DiskStore(tmp_path)
    monkeypatch.setattr(os, "pwrite", no_space)
    ticket = store.put(some(), "encoder.4")
    with pytest.raises(OffloadError, match=r"cannot write an activation of encoder\.4"):
        store.settle(ticket)
    store.close()


def test_any_error_in_a_thread_raises_where_it_is_awaited(tmp_path, monkeypatch):
    def oops(*_):
        raise ValueError("oops")

    store = DiskStore(tmp_path)
    ticket = store.put(some(), "encoder.4")
    store.settle(ticket)
    monkeypatch.setattr(os, "preadv", oops)
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"cannot read .* encoder\.4 from .*oops"):
            store.take(ticket)
    store.close()


def test_a_short_read_is_an_error(tmp_path):
    store = DiskStore(tmp_path)
    ticket = store.put(some(), "encoder.4")
    store.settle(ticket)
    os.ftruncate(store._file, 10)
    with pytest.raises(OffloadError, match=r"cannot read .* encoder\.4 from .*ends at byte 10"):
        store.take(ticket)
    store.close()


def test_a_folder_that_cannot_be_written_to(tmp_path):
    with pytest.raises(OffloadError, match=r"cannot write to the folder .*No such file"):
        DiskStore(tmp_path / "nowhere")


def test_close_ends_the_threads(tmp_path):
    before = {*threading.enumerate()}
    store = DiskStore(tmp_path)
    ticket = store.put(some(), "x")
    store.settle(ticket)
    store.take(ticket)
    own = {*threading.enumerate()} - before
    assert len(own) == 2
    store.close()
    assert not any(thread.is_alive() for thread in own)


def test_a_collected_store_ends_its_threads_and_closes_its_file():
    gc.collect()
    threads, files = {*threading.enumerate()}, len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        store = DiskStore()
        store.settle(store.put(some(), "x"))
    del store
    gc.collect()
    deadline = time.monotonic() + 60
    while {*threading.enumerate()} - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not {*threading.enumerate()} - threads
    assert len(os.listdir("/proc/self/fd")) == files
