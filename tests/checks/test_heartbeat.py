"""Ranks that hang, leave or fail: the others end, and name the right one."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.checks import other_ranks, own_view
from slipstream.checks.autopsy import Autopsy, by_stack
from slipstream.errors import HangError
from slipstream.transport.flat import FlatTransport
from slipstream.transport.requests import AllReduce
from slipstream.transport.work import Work
from tests.harness.ranks import RankFailure

BAD, AT, TIMEOUT = 1, 5, 6.0
T = TypeVar("T")


def opened(folder: Path, **strategy: object) -> slipstream.Session:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks = {"timeout": TIMEOUT, "folder": str(folder)}
    return slipstream.accelerate(model, optimizer, strategy={"checks": checks, **strategy})


def train(session: slipstream.Session, batches: int) -> None:
    for _ in range(batches):
        session.backward(session.model(torch.ones(2, 4)).square().mean())
        session.step()


def sleep(_: object) -> None:
    time.sleep(1000)


def load(_: object) -> None:
    data = torch.utils.data.DataLoader([0], batch_size=None, collate_fn=sleep)
    next(iter(data))


def stop(_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end(_: object) -> None:
    os._exit(0)


def skip(session: slipstream.Session) -> None:
    train(session, AT - 1)


def step_missing(session: slipstream.Session) -> None:
    session.backward(session.model(torch.ones(2, 4)).square().mean())


def fail(_: object) -> None:
    raise ValueError("bad sample 17")


def time_out(_: object) -> None:
    raise RuntimeError("DataLoader timed out after 5 seconds")


def exchange_alone(_: object) -> None:
    dist.all_reduce(torch.ones(3))


def other_length(session: slipstream.Session) -> None:
    """What the others wait for comes, and is not as long as they think."""
    start = FlatTransport.start

    def shorter(transport: FlatTransport, request: AllReduce) -> list[Work]:
        return start(transport, replace(request, tensor=request.tensor[:-1]))

    with patch.object(FlatTransport, "start", shorter):
        train(session, AT)


FAULTS = {
    "sleep": (sleep, "never entered segment 1 of 1"),
    "load": (load, "it waits for data in test_heartbeat.py"),
    "stop": (stop, "is silent: its process is stopped"),
    "kill": (kill, "is silent: its process is"),
    "fail": (fail, "has ended with ValueError: bad sample 17 after 5 updates"),
    "time out": (time_out, "has ended with RuntimeError: DataLoader timed out after 5 seconds"),
    "leave": (lambda _: None, "has left its loop after 5 updates"),
    "end": (end, "is silent: its process is"),
    "skip": (skip, "has left its loop after 9 updates"),
    "step missing": (step_missing, "has left its loop after 5 updates"),
    "another exchange": (exchange_alone, "is in an exchange"),
    "other length": (other_length, "is silent: its process is"),  # gloo has ended it
}


def with_a_fault(fault: str, folder: Path, strategy: dict[str, object]) -> None:
    with opened(folder, **strategy) as session:
        train(session, AT)
        if dist.get_rank() == BAD:
            FAULTS[fault][0](session)
        else:
            train(session, AT)
    if fault == "leave" and dist.get_rank() == BAD:
        time.sleep(8)  # it lives, and no connection breaks


@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_end_and_name_the_rank(three, tmp_path, fault):
    with pytest.raises(RankFailure) as caught:
        three.run(with_a_fault, fault, tmp_path, {}, timeout=90)
    errors, words = caught.value.errors, FAULTS[fault][1]
    for rank in {0, 1, 2} - {BAD}:
        if errors[rank] == "the process died":  # an exchange with a stopped peer never breaks
            assert fault == "stop"
        else:
            assert isinstance(errors[rank], HangError), errors
            assert re.match(rf"rank {rank}, step [{AT}-9]: the exchange of", str(errors[rank]))
            assert words in str(errors[rank])
    if fault in ("fail", "time out"):
        assert not [*tmp_path.iterdir()]  # the error of the rank that failed says more
        return
    autopsy = Autopsy.read(tmp_path)
    assert autopsy.blamed == (BAD,)
    assert words in autopsy.verdict
    if fault not in ("stop", "kill", "end", "other length"):  # else its word is of some time before
        assert autopsy.cases[BAD].state.step >= AT


def in_a_thread(train_there: Callable[..., T], *args: object) -> T:
    """As Ray Train does, with the main thread elsewhere."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(train_there, *args).result()


def test_a_loop_outside_the_main_thread_is_looked_at(three, tmp_path):
    with pytest.raises(RankFailure):
        three.run(in_a_thread, with_a_fault, "sleep", tmp_path, {}, timeout=90)
    autopsy = Autopsy.read(tmp_path)
    assert autopsy.blamed == (BAD,)
    assert FAULTS["sleep"][1] in autopsy.verdict
    (ranks, stack), _ = by_stack(autopsy.cases.values())
    assert ranks == [BAD]
    assert "in sleep" in stack[-1]


def test_a_rank_that_fails_is_named_where_ranks_share_memory(three, tmp_path):
    strategy = {"gradients": {"transport": "shared_memory"}}
    errors = three.fail(with_a_fault, "fail", tmp_path, strategy, timeout=90)
    for rank in {0, 1, 2} - {BAD}:
        assert FAULTS["fail"][1] in str(errors[rank])


def test_a_rank_that_ends_is_named_under_local(three, tmp_path):
    """The others told of gloo alone that a connection was closed."""
    with pytest.raises(RankFailure) as caught:
        three.run(with_a_fault, "end", tmp_path, {"local": {"steps": 1}}, timeout=90)
    for rank in {0, 1, 2} - {BAD}:
        error = caught.value.errors[rank]
        assert isinstance(error, HangError), caught.value.errors
        assert "the meeting of fragment 1" in str(error)
        assert f"failed: rank {BAD} (host" in str(error)


@contextmanager
def silent_store() -> Iterator[None]:
    """The file in which the ranks meet is locked: no call of their store returns."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    with open(store.path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def loses_a_rank_and_the_store(folder: Path) -> None:
    with ExitStack() as held, opened(folder) as session:
        train(session, AT)
        if dist.get_rank() == 0:
            held.enter_context(silent_store())
        dist.barrier()
        if dist.get_rank() == BAD:
            end(session)
        train(session, AT)


def test_ranks_whose_exchange_fails_end_where_the_store_is_silent(three, tmp_path):
    with pytest.raises(RankFailure) as caught:
        three.run(loses_a_rank_and_the_store, tmp_path, timeout=90)
    for rank in {0, 1, 2} - {BAD}:
        error = caught.value.errors[rank]
        assert isinstance(error, HangError), caught.value.errors
        assert "the run's store has not answered" in str(error)


def exchanges_itself(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patched, (folder / f"{dist.get_rank()}").open("w") as said:
        patched.setattr("sys.stderr", said)
        with opened(folder) as session:
            train(session, AT)
            if dist.get_rank() == BAD:
                end(session)
            dist.all_reduce(torch.ones(3))


def test_an_exchange_of_the_script_that_fails_is_explained(three, tmp_path):
    with pytest.raises(RankFailure):
        three.run(exchanges_itself, tmp_path, timeout=90)
    for rank in {0, 1, 2} - {BAD}:
        said = (tmp_path / f"{rank}").read_text()
        assert re.search(
            rf"slipstream.HangError: rank {rank}: .*: rank {BAD} \(host .* is sil", said
        )


# What is no hang.


def evaluates(folder: Path) -> int:
    with opened(folder) as session:
        train(session, AT)
        if dist.get_rank() == BAD:
            began = time.monotonic()
            while time.monotonic() - began < 1.5 * TIMEOUT:
                session.model(torch.ones(64, 4))
        train(session, AT)
        return session.updates


def test_a_rank_that_evaluates_for_long_does_not_hang(three, tmp_path):
    assert three.run(evaluates, tmp_path) == [2 * AT] * 3
    assert not [*tmp_path.iterdir()]


def receives(folder: Path) -> int:
    with opened(folder) as session:
        train(session, AT)
        if dist.get_rank() == BAD:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                sender = threading.Thread(target=sends, args=(theirs,))
                sender.start()
                while ours.recv(1) != b"e":
                    pass
                sender.join()
        train(session, AT)
        return session.updates


def sends(link: socket.socket) -> None:
    for _ in range(int(2 * TIMEOUT / 0.02)):
        link.send(b"x")
        time.sleep(0.02)
    link.send(b"e")


def test_a_rank_that_receives_slowly_does_not_hang(three, tmp_path):
    assert three.run(receives, tmp_path) == [2 * AT] * 3


def be_heard() -> None:
    """Let others hear that this rank has begun; they wait for longer else, and blame the same."""
    time.sleep(1)  # some beats


def holds_the_gil(folder: Path) -> int:
    with opened(folder) as session:
        train(session, AT)
        if dist.get_rank() == BAD:
            be_heard()
            end = time.monotonic() + 1.5 * TIMEOUT
            deque(takewhile(end.__gt__, iter(time.monotonic, None)), 0)  # no other thread runs
        train(session, AT)
        return session.updates


def test_a_rank_that_computes_without_a_heartbeat_does_not_hang(three, tmp_path):
    assert three.run(holds_the_gil, tmp_path) == [2 * AT] * 3


def in_place(host: str, train_there: Callable[..., T], *args: object) -> T:
    """Train in a container of its host, which has the host's name, and its own process numbers."""
    with patch.object(own_view, "process_table", lambda: host):
        return train_there(*args)


def holds_the_gil_elsewhere(folder: Path) -> int:
    with patch.object(other_ranks, "WATCHERS", 1):  # else the last rank has looked before
        return in_place("first" if dist.get_rank() == 0 else "second", holds_the_gil, folder)


def test_a_rank_of_another_host_is_looked_at_by_those_beside_it(three, tmp_path):
    """Rank 0 watches it, and sees no process of its host."""
    assert three.run(holds_the_gil_elsewhere, tmp_path) == [2 * AT] * 3


def stop_once_heard(_: object) -> None:
    be_heard()
    stop(_)


def stops_elsewhere(folder: Path) -> None:
    with patch.dict(FAULTS, {"stop": (stop_once_heard, "")}):
        in_place(f"host {dist.get_rank()}", with_a_fault, "stop", folder, {})


def test_a_process_of_another_container_is_not_looked_at(three, tmp_path):
    with pytest.raises(RankFailure):
        three.run(stops_elsewhere, tmp_path, timeout=90)
    verdict = Autopsy.read(tmp_path).verdict
    assert re.search(rf"rank {BAD} .* is silent: its process is stopped or gone, its host", verdict)


def all_pause(folder: Path) -> int:
    with opened(folder) as session:
        train(session, AT)
        time.sleep(1.5 * TIMEOUT)
        train(session, AT)
        return session.updates


def test_ranks_that_all_pause_do_not_hang(three, tmp_path):
    assert three.run(all_pause, tmp_path) == [2 * AT] * 3


def trains_beside_a_silent_store(folder: Path) -> int:
    with opened(folder) as session, ExitStack() as held:
        train(session, AT)
        if dist.get_rank() == 0:
            held.enter_context(silent_store())
        until, going = time.monotonic() + TIMEOUT, torch.ones(())
        while going:
            train(session, 1)
            going.fill_(time.monotonic() < until)
            dist.broadcast(going, 0)
        time.sleep(TIMEOUT)
        held.close()
        train(session, AT)
        be_heard()
        return session.updates


def test_ranks_train_and_pause_beside_a_silent_store(three, tmp_path):
    first, *others = three.run(trains_beside_a_silent_store, tmp_path)
    assert others == [first] * 2
    assert first > 2 * AT


def begins_slowly(folder: Path) -> int:
    with opened(folder) as session:
        if dist.get_rank() == BAD:
            time.sleep(1.5 * TIMEOUT)
        train(session, AT)
        return session.updates


def test_a_first_update_may_take_long(three, tmp_path):
    assert three.run(begins_slowly, tmp_path) == [AT] * 3


def closes_early(folder: Path) -> None:
    with opened(folder) as session:
        train(session, AT)
        if dist.get_rank() == BAD:
            session.close()
            time.sleep(1.5 * TIMEOUT)
        dist.barrier()  # of the script, with the session still open elsewhere


def test_an_exchange_of_the_script_may_wait_for_a_rank_that_is_done(three, tmp_path):
    three.run(closes_early, tmp_path)


def switched_off(folder: Path) -> list[str]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, strategy={"checks": {"timeout": None}}):
        return [thread.name for thread in threading.enumerate()]


def test_it_is_off_where_asked_and_on_one_rank(three, tmp_path):
    assert all("slipstream-heartbeat" not in names for names in three.run(switched_off, tmp_path))
    with opened(tmp_path):
        names = [thread.name for thread in threading.enumerate()]
    assert "slipstream-heartbeat" not in names
