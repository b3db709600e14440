"""Prefetch: what goes wrong is said, with the samples; nothing hangs, nothing stays."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from slipstream.data.prefetch import prefetch
from slipstream.errors import DataError, ModelError, UsageError
from slipstream.strategy import PrefetchConfig
from tests.data.datasets import Config, Numbers, Stream, Waits
from tests.harness.scripts import Script


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("a bad sample")
        return index


@pytest.mark.process
@pytest.mark.parametrize("config", [{"workers": 2}, {"workers": 2, "threads": True}, {}])
def test_an_error_names_the_sample_and_the_next_pass_begins_anew(config: Config) -> None:
    loader = prefetch(DataLoader(Broken(8), batch_size=2), PrefetchConfig(**config))
    for _ in range(2):
        with pytest.raises(ValueError, match="a bad sample") as caught:
            list(loader)
        said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert "while sample 5 of the dataset was read" in said
    loader.close()
    assert not active_children()  # at once, not when the garbage collector comes


class BrokenAtOnce(Broken):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.mark.process
@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (BrokenAtOnce(8), "samples 4, 5 of the dataset were read at once"),
        (Subset(BrokenAtOnce(8), [0, 5, 1]), "samples 0, 1 of the dataset were read at once"),
        (Subset(Subset(Broken(8), [0, 5, 1]), [0, 1]), "sample 1 of the dataset was read"),
    ],
    ids=["at once", "a part of it", "a part of a part, one by one"],
)
def test_an_error_names_what_was_asked_for_at_once(dataset: Any, named: str, threads: bool) -> None:
    config = PrefetchConfig(workers=1, threads=threads)
    loader = prefetch(DataLoader(dataset, batch_size=2), config)
    with pytest.raises(ValueError, match="a bad sample") as caught:
        list(loader)
    said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert f"while {named}" in said
    loader.close()


DYING = """
import os, signal, sys, time
from torch.utils.data import DataLoader, IterableDataset
from slipstream.data.prefetch import prefetch
from slipstream.strategy import PrefetchConfig

def read(index):
    if index == 5:
        while not os.path.exists(sys.argv[3]):  # earlier batches have arrived
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return index

class Samples:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return read(index)

class Stream(IterableDataset):
    def __iter__(self):
        return map(read, range(8))

dataset = {"samples": Samples, "stream": Stream}[sys.argv[1]]()
loader = prefetch(DataLoader(dataset, batch_size=2, num_workers=1), PrefetchConfig(depth=8))
seen = []
try:
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            open(sys.argv[3], "w").close()
        time.sleep(float(sys.argv[2]))  # the model computes
except Exception as error:
    print(seen, type(error).__name__, error, flush=True)
"""


@pytest.mark.process
@pytest.mark.parametrize("computing", ["0", "1"])
@pytest.mark.parametrize(
    ("kind", "named"),
    [("samples", "samples 4, 5 were"), ("stream", "batch 2 of the pass, counted from 0, was")],
)
def test_a_worker_that_dies_is_an_error_of_the_batch_that_does_not_come(
    kind: str, named: str, computing: str, tmp_path: Path
) -> None:
    """In a process of its own, as in the training no SIGCHLD was handled yet."""
    script, log = tmp_path / "dying.py", tmp_path / "log"
    script.write_text(DYING)
    words = [kind, computing, str(tmp_path / "arrived")]
    code, printed = Script(script, *words, log=log).wait(120), log.read_text()
    assert printed.startswith("[[0, 1], [2, 3]] DataError DataLoader worker"), printed
    assert f"while {named} awaited; read the dataset alone" in printed
    assert (code, "Traceback" in printed, "Warning" in printed) == (0, False, False)


FULL = """
import os, torch
from torch.utils.data import DataLoader
from slipstream.data.prefetch import prefetch
from slipstream.errors import DataError
from slipstream.strategy import PrefetchConfig

class Large:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(2**18)  # 1 MiB

for config in ({"workers": 1, "depth": 2}, {}):
    loader = prefetch(DataLoader(Large(), batch_size=2), PrefetchConfig(**config))
    try:
        for batch in loader:
            pass
        print("all was read")
    except DataError as error:
        print(str(error).replace("\\n", " "), flush=True)
    loader.close()
os._exit(0)
"""


@pytest.mark.namespace
@pytest.mark.process
def test_a_full_shared_memory_is_an_error_that_names_it_and_the_samples() -> None:
    """In a mount namespace, whose /dev/shm has 1 MiB."""
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", small]
    done = subprocess.run(
        [*command, sys.executable, FULL], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stdout + done.stderr
    for line in said:
        assert "/dev/shm" in line
        assert ("samples 0, 1" in line) or "a batch has 2.0 MiB" in line


def test_a_thread_that_hangs_is_an_error_that_names_the_samples() -> None:
    data = Waits(8, at=5)
    config = PrefetchConfig(workers=1, threads=True, timeout=2.0)
    loader = prefetch(DataLoader(data, batch_size=2), config)
    with pytest.raises(DataError, match=r"samples 4, 5 were not read within 2 s"):
        list(loader)
    data.goes_on.set()
    loader.close()


class Sleeping(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            time.sleep(30)
        return index


@pytest.mark.process
def test_a_worker_that_hangs_is_an_error_that_names_the_samples() -> None:
    loader = prefetch(DataLoader(Sleeping(8), batch_size=2), PrefetchConfig(workers=1, timeout=2.0))
    with pytest.raises(DataError, match=r"sent no batch for 2 s while samples 4, 5 were awaited"):
        list(loader)
    loader.close()


@pytest.mark.process
def test_an_error_in_a_stream_is_raised_and_the_next_pass_begins_anew() -> None:
    loader = prefetch(DataLoader(Stream(8, fails_at=5)))
    for _ in range(2):
        seen: list[int] = []
        with pytest.raises(ValueError, match="a bad sample") as caught:
            seen.extend(int(batch) for batch in loader)
        said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert "while sample 5 of the stream of worker 0 was read, counted from 0" in said
        assert "while batch 5 of the pass, counted from 0, was awaited" in said
        assert seen == [0, 1, 2, 3, 4]
    loader.close()
    assert not active_children()


class Filtered(DataLoader[int]):
    """Yields something else than its samplers say."""

    def __iter__(self) -> Any:
        return (batch + 1 for batch in super().__iter__())


@pytest.mark.parametrize(
    ("loader", "says"),
    {
        "a list": ([1, 2], "the loader is a list: give a DataLoader"),
        "an own class": (Filtered(Numbers(3)), "iterates as torch's does; the loader is a Filt"),
        "a state": (StatefulDataLoader(Numbers(3)), "give it num_workers of 1 or more"),
    }.values(),
)
def test_what_cannot_be_read_ahead_is_refused(loader: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        prefetch(loader)


def test_threads_end_with_close_and_a_later_pass_starts_them_again() -> None:
    loader = prefetch(DataLoader(Numbers(4)), PrefetchConfig(threads=True, workers=2))
    before = {*threading.enumerate()}
    for _ in range(2):
        assert len(list(loader)) == 4
        own = {*threading.enumerate()} - before
        assert len(own) == 2
        loader.close()
        loader.close()
        assert not any(thread.is_alive() for thread in own)


def test_a_loader_that_is_forgotten_leaves_no_thread() -> None:
    before = {*threading.enumerate()}
    loader = prefetch(DataLoader(Numbers(4)), PrefetchConfig(threads=True, workers=2))
    next(iter(loader))
    own = {*threading.enumerate()} - before
    del loader
    gc.collect()
    assert len(own) == 2
    assert not any(thread.is_alive() for thread in own)


@pytest.mark.process
def test_a_loader_that_is_closed_in_the_middle_says_so() -> None:
    for inner in (DataLoader(Numbers(8)), DataLoader(Stream(8))):
        loader = prefetch(inner, PrefetchConfig(threads=True, workers=1))
        batches = iter(loader)
        next(batches)
        loader.close()
        with pytest.raises(UsageError, match="closed while it was iterated over"):
            list(batches)
