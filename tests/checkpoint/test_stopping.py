"""Signals: all ranks save at the same update, and end."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from slipstream.checkpoint import Checkpoints, stopping
from slipstream.errors import UsageError
from tests.harness.counters import collectives
from tests.harness.ranks import RankFailure, Ranks
from tests.harness.scripts import Script
from tests.session.training import opened, update


def stopped(folder: str, victim: int, at: int = 5) -> tuple[Any, int, list[int]]:
    """Train until one rank gets SIGTERM; the exit code, the updates, and what the script saw."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    updates = 0
    try:
        with opened() as session:
            saved = Checkpoints(folder, on_signal=(signal.SIGTERM,))
            saved.restore(session)
            while True:
                update(session)
                updates = session.updates
                if updates == at and session.rank == victim:
                    os.kill(os.getpid(), signal.SIGTERM)
                saved.step(session, every=10**6)
                assert updates < 10_000
    except SystemExit as end:
        now = signal.getsignal(signal.SIGTERM)
        assert getattr(now, "__name__", "") == "<lambda>"  # the script's own again
        return end.code, updates, seen
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_of_one_rank_stops_all_at_one_update(
    victim: int, two: Ranks, tmp_path: Path
) -> None:
    runs = two.run(stopped, str(tmp_path), victim)
    assert [code for code, _, _ in runs] == [143, 143]
    assert len({updates for _, updates, _ in runs}) == 1
    assert [seen for _, _, seen in runs][victim] == [signal.SIGTERM]
    (name,) = [path.name for path in tmp_path.iterdir()]
    assert name == f"update-{runs[0][1]:08}"


def test_alone_it_stops_at_once(tmp_path: Path) -> None:
    assert stopped(str(tmp_path), 0)[:2] == (143, 5)
    assert stopped(str(tmp_path), 0, at=9)[:2] == (143, 9)


def signalled_late(folder: str, number: int) -> None:
    """A signal comes after the last `step`, as the last checkpoint is being written."""
    saved = Checkpoints(folder, on_signal=(number,))
    with opened() as session:
        saved.restore(session)
        update(session)
        saved.step(session, every=1)
        os.kill(os.getpid(), number)


def test_a_signal_after_the_last_update_is_the_scripts(tmp_path: Path, two: Ranks) -> None:
    with pytest.raises(KeyboardInterrupt):
        signalled_late(str(tmp_path / "one"), signal.SIGINT)
    with pytest.raises(RankFailure, match="died"):
        two.run(signalled_late, str(tmp_path / "two"), signal.SIGTERM)
    for folder in tmp_path.iterdir():
        assert [path.name for path in folder.iterdir()] == ["update-00000001"]


def fails_after_a_signal(folder: Path) -> None:
    with opened() as session:
        Checkpoints(folder, on_signal=(signal.SIGTERM,)).restore(session)
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError


def test_an_error_after_a_signal_is_what_ends_the_script(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fails_after_a_signal(tmp_path)


def test_a_signal_that_has_stopped_one_session_does_not_stop_the_next(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path, on_signal=(signal.SIGINT,))
    for stops in (True, False):
        with opened() as session, pytest.raises(SystemExit) if stops else nullcontext():
            saved.restore(session)
            update(session)
            if stops:
                os.kill(os.getpid(), signal.SIGINT)
            saved.step(session, every=1)


def comparisons(folder: str) -> int:
    """Of 50 fast updates."""
    with opened() as session:
        saved = Checkpoints(folder, on_signal=(signal.SIGUSR1,))
        saved.restore(session)
        with collectives() as calls:
            for _ in range(50):
                update(session)
                saved.step(session, every=10**6)
        return [call.num_bytes for call in calls if call.kind == "all_reduce"].count(16)


def test_ranks_compare_rarely(two: Ranks, tmp_path: Path) -> None:
    one, other = two.run(comparisons, str(tmp_path))
    assert one == other
    assert 1 <= one <= 25


def test_only_the_main_thread_gets_signals() -> None:
    errors: list[BaseException] = []

    def install() -> None:
        try:
            stopping.StopSignals([signal.SIGTERM]).install(None)
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert "on_signal outside the main thread" in str(errors[0])


WITH_WORKERS = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
import slipstream
from slipstream.checkpoint import Checkpoints

os.setpgid(0, 0)  # as launchers start ranks


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(2)


model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Slow(), batch_size=2, num_workers=2)
with slipstream.accelerate(model, optimizer, loader) as session:
    saved = Checkpoints(sys.argv[1], on_signal=[signal.SIGTERM])
    saved.restore(session)
    for batch in session.loader:
        session.backward(session.model(batch).square().mean())
        session.step()
        print("update", session.updates, flush=True)
        saved.step(session, every=10**6)
"""


def test_workers_outlive_a_signal_to_the_process_group(tmp_path: Path) -> None:
    path, log = tmp_path / "train.py", tmp_path / "log"
    path.write_text(WITH_WORKERS)
    script = Script(path, str(tmp_path / "saved"), log=log)
    until = time.monotonic() + 120
    while not (log.exists() and "update 3" in log.read_text()):
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    os.killpg(script.pid, signal.SIGTERM)
    assert script.wait(60) == 143, log.read_text()
    assert "is killed by signal" not in log.read_text()
    assert len([*(tmp_path / "saved").glob("update-*")]) == 1
