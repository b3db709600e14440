"""Jobs that come and go: all merge an exchange or none does; who is left goes on."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import slipstream
from slipstream.cli.islands import run_islands
from slipstream.cli.store import open_store
from slipstream.cluster.listen import TOKEN
from slipstream.codecs import Ranks as Peers
from slipstream.errors import (
    ClusterError,
    ExchangeError,
    LaunchError,
    ModelError,
    StrategyError,
    UsageError,
)
from slipstream.local import open_carrier, rendezvous
from slipstream.local.exchanges import IslandExchanges
from slipstream.local.island import Island
from slipstream.local.model import LocalModel
from slipstream.local.open_carrier import OpenCarrier
from slipstream.local.open_training import OpenTraining
from slipstream.local.rendezvous import Rendezvous
from slipstream.local.view import View
from slipstream.strategy import RendezvousConfig, Strategy
from slipstream.transport.channel import Label
from slipstream.transport.requests import ExchangeSteps
from tests.harness.command_line import COMMAND_LINE
from tests.harness.ranks import Ranks, free_port
from tests.harness.scripts import Script
from tests.local import job
from tests.local.comings import ENDLESS, TIMEOUT, Jobs
from tests.local.reference import flat
from tests.local.test_training import build, loss_of, sgd

pytestmark = pytest.mark.process


@pytest.fixture
def islands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rendezvous]]:
    monkeypatch.setattr(rendezvous, "DEAD", math.inf)  # a busy machine kills none
    with apart(2) as two:
        yield two


@contextmanager
def apart(count: int) -> Iterator[list[Rendezvous]]:
    """Islands at a store of their own, which have not joined; two of them begin."""
    store = open_store(0)
    config = RendezvousConfig(store=f"127.0.0.1:{store.port}", at_least=2, timeout=10)
    made = [Rendezvous(config) for _ in range(count)]
    yield made
    for island in made:
        island.leave()


def at_once(*calls: Any) -> list[Any]:
    """What each call returns, all at the same time."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        found[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def until(true: Callable[[], bool]) -> None:
    """Wait for what comes soon."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it has not come within 60 s"
        time.sleep(0.01)


def stop(process: Script) -> None:
    """Let it be silent, as a host that has lost power, or its network."""
    os.kill(process.pid, signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")
    until(lambda: all("T (stopped)" in p.read_text() for p in threads.glob("*/status")))


def joined(islands: list[Rendezvous]) -> View:
    first, second = at_once(*(partial(island.join, trained=False) for island in islands))
    assert first == second
    assert isinstance(first, View)
    return first


def test_all_see_one_outcome(islands: list[Rendezvous]) -> None:
    view = joined(islands)
    one, other = islands
    both = at_once(lambda: one.agree(view, 0, True), lambda: other.agree(view, 0, True))
    assert both == [2, 2]
    mixed = at_once(lambda: one.agree(view, 1, True), lambda: other.agree(view, 1, False))
    assert mixed == [None, None]
    # one waits in vain, and says so first: the other's part comes too late
    assert one.agree(view, 2, True) is None
    assert other.agree(view, 2, True) is None


def test_the_next_view_is_without_the_dead(
    islands: list[Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = joined(islands)
    one, other = islands
    found = at_once(lambda: one.next_view(view), lambda: other.next_view(view))
    assert found[0] == found[1]
    assert found[0].islands == view.islands
    monkeypatch.setattr(rendezvous, "BEAT", 1e6)  # its heart stops
    monkeypatch.setattr(rendezvous, "DEAD", 1.5)
    one._half = timedelta.max  # it is not waited for in vain
    alone = one.next_view(found[0])
    assert alone.islands == (one.island,)
    # who comes later sees that it is in no view any more
    assert other.next_view(found[0]).islands == (one.island,)


def test_who_waits_for_a_connection_in_vain_can_ask_the_store(islands: list[Rendezvous]) -> None:
    view = joined(islands)
    one, other = islands
    one._half = timedelta(hours=1)
    one._store._seconds = 5
    with ThreadPoolExecutor(1) as jobs:
        group = jobs.submit(one.group, view)
        own = f"group/1/0/{view.islands.index(one.island)}"
        other._store.wait([own], timedelta(seconds=30))
        try:
            one.same("strategy", "steps 4")
        finally:
            theirs = other.group(view)  # it stays until both have all connections
        assert group.result()
        assert theirs


def test_who_leaves_is_not_waited_for(islands: list[Rendezvous]) -> None:
    view = joined(islands)
    islands[1].leave()
    islands[0]._half = timedelta.max  # it is not waited for in vain
    assert islands[0].next_view(view).islands == (islands[0].island,)


def test_a_store_that_is_not_there_is_named() -> None:
    with pytest.raises(ClusterError, match=r"slipstream store --host 127\.0\.0\.1 --port 9"):
        Rendezvous(RendezvousConfig(store="127.0.0.1:9", timeout=1))


def test_a_store_that_falls_silent_is_given_up(
    tmp_path: Path, forks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "a secret")
    words = ["store", "--port", str(port := free_port())]
    keeper = Script(COMMAND_LINE, *words, log=tmp_path / "log", folder=tmp_path)
    try:
        island = Rendezvous(RendezvousConfig(store=f"127.0.0.1:{port}", timeout=120))
        island.same("strategy", "steps 4")
        stop(keeper)
        island._store._seconds = 1
        with pytest.raises(ClusterError, match=r"keeps silent: no answer within 1 s"):
            island.same("strategy", "steps 4")
        with pytest.raises(ClusterError, match=r"does not answer: .* start it there"):
            Rendezvous(RendezvousConfig(store=f"127.0.0.1:{port}", timeout=1))
        island.leave()
    finally:
        keeper.kill()


def test_a_wait_outlasts_a_stop_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that has gone by when it goes on again is no silence of the store."""
    answered, parts = threading.Event(), list[float]()

    def after_a_stop(calls: Any, seconds: float) -> Any:
        parts.append(seconds)
        if len(parts) == 1:
            return wait(calls, 0)  # the time is up, before the other thread could do anything
        answered.set()
        return wait(calls, 30)

    monkeypatch.setattr(rendezvous, "wait", after_a_stop)
    assert rendezvous._Asker().ask(2.5, answered.wait, 60)
    assert parts == [1, 1]


def test_a_call_that_fails_by_a_time_limit_of_its_own_says_so() -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        rendezvous._Asker().ask(30, fail)


def test_one_thread_asks_for_a_client_and_ends_with_it() -> None:
    asker = rendezvous._Asker()
    threads = {asker.ask(30, threading.current_thread) for _ in range(9)}
    [thread] = threads
    del asker
    thread.join(30)
    assert not thread.is_alive()


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C inside, so much later."""
    # by another signal, as a test runner may have a handler for that one
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # where it ended earlier
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_ends_the_wait_for_others_that_close(islands: list[Rendezvous]) -> None:
    view = joined(islands)
    islands[0]._half = timedelta(hours=1)
    islands[0]._store._seconds = 3600
    with interrupted_after(1):
        islands[0].close(view)
    islands[1]._store.set(f"closed/{view.number}", "alone")


def test_who_leaves_in_the_middle_of_an_exchange_says_so_at_once(
    islands: list[Rendezvous],
) -> None:
    view = joined(islands)
    one, other = islands
    one._half = timedelta(hours=1)
    one._store._seconds = 3600
    ended = list[str]()

    def wait_in_vain() -> None:
        with pytest.raises(ClusterError) as caught:
            one.agree(view, 0, True)
        ended.append(str(caught.value))

    waiting = threading.Thread(target=wait_in_vain, daemon=True)
    waiting.start()
    other._store.wait(["done/1/0"], timedelta(seconds=30))
    one.leave()
    until(lambda: bool(other._store.check([f"left/{one.island}"])))
    waiting.join(30)
    assert ended == ["this job takes part no longer"]


@pytest.mark.parametrize("settings", [{"warm_up": 4}, {"auto": True}], ids=str)
def test_gradients_are_never_averaged(settings: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match="rendezvous with"):
        Strategy.load({"local": {"rendezvous": "a:1", **settings}})


def together(settings: dict[str, Any]) -> float:
    """Train as the jobs do, as ranks of one job."""
    model = job.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.LR)
    with slipstream.accelerate(model, optimizer, None, {"local": settings}) as session:
        for update in range(21):
            job.cool_down(optimizer, 21 - update)
            session.backward(job.loss_of(model, 1000 * update + session.rank))
            session.step()
    return flat(model.parameters()).double().sum().item()


@pytest.mark.parametrize(
    "settings",
    [{}, {"fragments": 2, "delay": 2, "mix": 0.25, "codec": "int8"}],
    ids=["plain", "all of it"],
)
def test_jobs_train_as_ranks_of_one_job(tmp_path: Path, settings: dict[str, Any]) -> None:
    jobs = Jobs(tmp_path, 21, 0.0, settings)
    jobs.start()
    jobs.start()
    with Ranks(2) as two:
        expected = two.run(together, {"steps": 4, **settings})
    for one in jobs.end():
        assert one["parameters"] == pytest.approx(expected[0], abs=1e-9)


def test_a_job_that_is_killed_comes_back(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, ENDLESS, 0.02)
    jobs.start()
    victim = jobs.start()
    jobs.wait_for(30, victim)
    jobs.kill(victim)
    jobs.wait_for(1, jobs.start())
    jobs.end_soon()
    first, newcomer = jobs.end()
    assert newcomer["begun"] > 30
    assert first["longest"] < TIMEOUT
    assert first["parameters"] == newcomer["parameters"]
    assert "is gone: update" in jobs.logs()
    assert "this job is island 3" in jobs.logs()
    assert "island 3 has joined" in jobs.logs()
    # with the share of the dead
    [share] = re.findall(rf"begins at {newcomer['begun']} with share (\d)", jobs.logs())
    [gone] = re.findall(r"island (\d) is gone", jobs.logs())
    assert int(share) == int(gone) - 1


def test_a_job_that_is_silent_for_long_joins_again(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, ENDLESS, 0.02, {"rendezvous": {"timeout": 10}})
    stays, sleeper = jobs.start(), jobs.start()
    jobs.wait_for(30, sleeper)
    stop(sleeper)
    jobs.wait_for(jobs.updates(stays) + 40, stays)  # it goes on alone
    os.kill(sleeper.pid, signal.SIGCONT)
    jobs.wait_for(jobs.updates(sleeper) + 40, sleeper)
    jobs.end_soon()
    found = jobs.end()
    assert len({one["parameters"] for one in found}) == 1  # all end at one update
    assert "came too late" in jobs.logs()
    assert "island 3 has joined" in jobs.logs()


INTERRUPTED = """
import signal, sys
from tests.local import job

signal.signal(signal.SIGUSR1, signal.default_int_handler)
job.main()
"""


def test_a_job_that_ctrl_c_ends_in_the_middle_of_an_exchange_ends_as_an_error(
    tmp_path: Path,
) -> None:
    jobs = Jobs(tmp_path, ENDLESS, 0.02)
    (script := tmp_path / "train.py").write_text(INTERRUPTED)
    waits, sleeper = jobs.start(script), jobs.start()
    try:
        jobs.wait_for(12, sleeper)
        stop(sleeper)
        seen = -1
        while seen < jobs.updates(waits):  # until it waits for the one that is stopped
            seen = jobs.updates(waits)
            time.sleep(2)
        os.kill(waits.pid, signal.SIGUSR1)
        assert waits.wait(30) == 1, jobs.logs()
        assert "KeyboardInterrupt" in jobs.logs()
    finally:
        for one in jobs.running:
            one.kill()


def test_a_run_that_has_ended_takes_nobody_in(islands: list[Rendezvous]) -> None:
    view = joined(islands)
    one, other = islands
    assert at_once(lambda: one.close(view), lambda: other.close(view)) == [True, True]
    with pytest.raises(ClusterError, match="has ended"):
        one.join(trained=False)


ISLAND = """
import os, sys, time
import torch, slipstream
from pathlib import Path
from tests.local import job

model = job.build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with slipstream.accelerate(model, optimizer) as session:
    end, update, begun = Path("end"), session.updates, session.updates
    while update < (int(end.read_text()) if end.exists() else 10**6):
        update += 1
        if begun and update == begun + 1:  # the one that came later
            Path("part").write_text(str(update + 100))
            Path("part").rename(end)
        session.backward(job.loss_of(model, update))
        session.step()
        time.sleep(0.03)
        if session.data_rank == 1 and update > 9 and not Path("failed").exists():
            Path("failed").touch()
            sys.exit(3)
    print("ends", session.updates == int(end.read_text()))
"""


def test_a_launch_of_islands_starts_another_one_where_one_fails(tmp_path: Path, forks: str) -> None:
    (tmp_path / "train.py").write_text(ISLAND)
    meeting = {"store": f"localhost:{free_port()}", "at_least": 2, "timeout": 60}
    (tmp_path / "local.yaml").write_text(f"local: {{steps: 4, rendezvous: {json.dumps(meeting)}}}")
    words = ["launch", "--islands", "2", "--max-restarts", "1", "--strategy", "local.yaml"]
    words += ["--log-dir", "logs", "train.py"]
    root, log = Path(__file__).parents[2], tmp_path / "log"
    env = {"PYTHONPATH": f"{root / 'src'}:{root}"}
    code = Script(COMMAND_LINE, *words, log=log, env=env, folder=tmp_path).wait(170)
    assert code == 0, log.read_text()
    assert "ended with code 3; another one starts" in log.read_text()
    ends = [p.read_text() for p in tmp_path.glob("logs/island-*/rank0.log")]
    assert sum("ends True" in text for text in ends) == 2, ends


def test_islands_need_a_place_to_meet(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(LaunchError, match="says where they meet"):
        run_islands(
            [str(tmp_path / "train.py")],
            2,
            module=False,
            strategy=None,
            restarts=0,
            log_dir=tmp_path,
            console=Console(),
        )


def test_a_job_of_another_strategy_is_refused(islands: list[Rendezvous]) -> None:
    one, other = islands
    one.same("strategy", "steps 4")
    one.same("strategy", "steps 4")
    with pytest.raises(ClusterError, match="strategy of this job differs"):
        other.same("strategy", "steps 8")


def test_one_that_was_late_goes_on_where_all_others_are_gone(islands: list[Rendezvous]) -> None:
    joined(islands)
    one, other = islands
    one.leave()
    other._store.set(f"left/{other.island}", "yes")  # under its old number
    view = other.join(trained=True)
    assert view.islands == (other.island,)
    assert not view.fresh
    other._store.set(f"left/{other.island}", "yes")
    with pytest.raises(ClusterError, match="are gone, with what they have learned"):
        other.join(trained=False)


def test_the_first_of_those_alive_opens_the_run(islands: list[Rendezvous]) -> None:
    one, other = islands
    dead = one._store.add("asked", 1)
    one._store.set(f"left/{dead}", "yes")
    view = joined([one, other])
    assert set(view.islands) == {2, 3}
    assert view.fresh == view.islands[1:]
    assert one.led(view.without(view.islands[:1])).fresh == ()  # nobody has trained yet


def test_restoring_what_other_jobs_do_not_have_is_refused() -> None:
    store = open_store(0)
    local = {"steps": 2, "rendezvous": {"store": f"127.0.0.1:{store.port}", "at_least": 1}}
    model = job.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, {"local": local}) as session:
        session.restore(session.checkpoint())
        session.backward(job.loss_of(model, 1))
        session.step()
        with pytest.raises(UsageError, match=r"if session\.updates == 0"):
            session.restore(session.checkpoint())
        session.backward(job.loss_of(model, 2))
        session.step()
        assert session.all_updates == 2


class Still:
    """A resident that has trained nothing."""

    def __init__(self) -> None:
        self.settled = self.dropped = False
        self.met = 0

    def save(self) -> dict[str, Any]:
        return {"optimizer": {"state": {}}}

    def settle(self, state: Any, *, again: bool) -> None:
        self.settled = again

    def drop(self) -> None:
        self.dropped = True

    def meet_as(self, islands: Any, slot: int) -> None:
        self.met = islands.count


def test_who_finds_that_others_have_gone_on_when_it_admits_them_joins_again(
    islands: list[Rendezvous], capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that sleeps while all others are late: these take it for dead, and go on."""
    joined(islands)
    carriers = [OpenCarrier(island) for island in islands]
    residents = [Still(), Still()]
    for carrier, resident, island in zip(carriers, residents, islands, strict=True):
        carrier.resident = resident
        # each is alone, in a view of its own
        carrier._view = View(2 + (island is islands[1]), (island.island,), (0,), (), 2)
    sleeper, late = carriers
    islands[1].open(late._view)

    def meet() -> None:
        while residents[1].met < 2:
            late.start(Label("meeting", lambda: "a meeting"), lambda: iter(()))
            late.wait()
            if late.newcomers:
                late.admit()

    at_once(sleeper.admit, meet)
    assert [resident.met for resident in residents] == [2, 2]
    assert (residents[0].dropped, residents[0].settled) == (True, True)
    assert "came too late: the admission of others; it joins again" in capsys.readouterr().err


def test_one_that_dies_while_it_joins_is_named(
    islands: list[Rendezvous], capsys: pytest.CaptureFixture[str]
) -> None:
    joined(islands)
    islands[0]._store.set("left/3", "yes")
    view = View(2, (1, 2, 3), (0, 1, 2), (3,), 3)
    for island in islands:
        island._half = timedelta(seconds=5)  # for its connection
    carriers = [OpenCarrier(island) for island in islands]
    for carrier in carriers:
        carrier.resident = Still()
    at_once(*(partial(carrier._enter, view, again=True) for carrier in carriers))
    assert [carrier._view.islands for carrier in carriers] == [(1, 2), (1, 2)]
    said = capsys.readouterr().err
    assert said == "slipstream: island 3 is gone: the admission of others; 2 go on\n"


def training_of(session: slipstream.Session) -> OpenTraining:
    whole = session._loop.sharding.model
    assert isinstance(whole, LocalModel)
    assert isinstance(whole.training, OpenTraining)
    return whole.training


@contextmanager
def one_job(**local: Any) -> Iterator[tuple[nn.Module, OpenTraining]]:
    """A job that has met nobody, after four updates."""
    model, store = build(), open_store(0)
    place = {"store": f"127.0.0.1:{store.port}", "at_least": 1}
    strategy = {"local": {"steps": 4, "rendezvous": place, **local}}
    with slipstream.accelerate(model, sgd(model), None, strategy) as session:
        for update in range(4):
            session.backward(loss_of(model, 0, update))
            session.step()
        yield model, training_of(session)


def test_what_is_frozen_sends_no_rounding_when_an_exchange_is_repeated() -> None:
    model, store = build().bfloat16(), open_store(0)
    place = {"store": f"127.0.0.1:{store.port}", "at_least": 1}
    local = {"steps": 4, "rendezvous": place}
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        [meeting] = training_of(session)._rounds.meetings
        meeting.outer.mul_(1.001)  # a mean, which 16 bits do not hold
        with torch.no_grad():
            meeting.write(meeting.outer)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        meeting.send(1, 0)
        assert meeting.flight is not None
        for _ in range(2):
            assert not [*meeting.exchange(0)]
            assert not meeting.flight.change.any()
        meeting.flight = None


def test_a_job_whose_store_is_gone_blames_no_other_job(islands: list[Rendezvous]) -> None:
    view = joined(islands)
    carrier = OpenCarrier(islands[0])
    carrier._view = view
    island = Island((0,), Peers(0, 2))
    exchanges = IslandExchanges(carrier, island, torch.device("cpu"), lambda: None, None, "rank 0")
    islands[0]._store._seconds = 0  # as long as it is given to answer
    exchanges.sum(Label("meeting", lambda: "a meeting"), torch.zeros(1))
    with pytest.raises(ExchangeError, match=r"is gone, or keeps silent: [^;]*$"):
        exchanges.land()


def alone(island: Rendezvous) -> tuple[OpenCarrier, IslandExchanges]:
    """Exchanges of an island that meets nobody."""
    carrier = OpenCarrier(island)
    carrier.resident = Still()
    carrier._view = View(1, (0,), (0,), (), 0)
    cpu = torch.device("cpu")
    exchanges = IslandExchanges(
        carrier, Island((0,), Peers(0, 1)), cpu, lambda: None, None, "rank 0"
    )
    return carrier, exchanges


def broken() -> ExchangeSteps:
    raise RuntimeError("a connection is lost")


A_MEETING = Label("meeting", lambda: "a meeting")


def test_an_exchange_that_ctrl_c_broke_off_is_never_taken_for_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with apart(1) as [island]:
        _, exchanges = alone(island)

        def interrupted(view: View) -> View:
            exchanges.land()  # as where it has joined again, and loads a state
            raise KeyboardInterrupt

        monkeypatch.setattr(island, "next_view", interrupted)
        exchanges.begin(A_MEETING, broken)
        with pytest.raises(KeyboardInterrupt):
            exchanges.land()
        with pytest.raises(ExchangeError, match=r"a meeting was broken off: KeyboardInterrupt"):
            exchanges.land()
        with pytest.raises(ExchangeError, match=r"go on from a checkpoint of before"):
            exchanges.land()


def test_who_is_taken_in_hears_ctrl_c_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of torch's own hear none, so the main thread is in none of them."""
    threads = list[threading.Thread]()

    def exchange(welcome: open_carrier._Welcome) -> ExchangeSteps:
        threads.append(threading.current_thread())
        yield from ()

    monkeypatch.setattr(open_carrier._Welcome, "exchange", exchange)
    with apart(1) as [island]:
        carrier, _ = alone(island)
        assert carrier._enter(carrier._view, again=False)
    assert threads
    assert threading.main_thread() not in threads


def test_an_exchange_that_no_thread_carries_out_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with apart(1) as [island], monkeypatch.context() as patch:

        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        carrier, exchanges = alone(island)
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            exchanges.begin(A_MEETING, broken)
        assert carrier.arrived
        with pytest.raises(ExchangeError, match=r"a meeting was broken off: .*new thread"):
            exchanges.land()


def test_an_admission_that_was_broken_off_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with apart(1) as [island]:
        carrier, exchanges = alone(island)
        carrier._asked = 1
        monkeypatch.setattr(carrier, "admit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            exchanges.admit()
        assert exchanges.failure == (
            "rank 0: the admission of others was broken off: KeyboardInterrupt()"
        )


def test_what_a_session_saves_after_its_store_is_gone() -> None:
    model, store = build(), open_store(0)
    place = {"store": f"127.0.0.1:{store.port}", "at_least": 1}
    local = {"steps": 4, "rendezvous": place}
    began = flat(model.parameters())
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        for update in range(4):
            session.backward(loss_of(model, 0, update))
            if update < 3:
                session.step()
        carrier = training_of(session)._rounds.exchanges.carrier
        assert isinstance(carrier, OpenCarrier)
        carrier._rendezvous._store._seconds = 0  # as long as it is given to answer
        with pytest.raises(ExchangeError, match="is gone, or keeps silent"):
            session.step()
        for _ in range(2):
            with pytest.raises(ExchangeError, match=r"silent.*go on from a checkpoint of before"):
                session.checkpoint()
        outer = session.checkpoint("model")["model"]
        names = [name for name, _ in model.named_parameters()]
        assert torch.equal(flat(outer[name] for name in names), began)


def test_an_exchange_that_is_about_to_end_does_so_after_ctrl_c() -> None:
    """Its thread would abort the interpreter, if it came back while that ends."""
    ended = threading.Event()
    with apart(1) as [island]:
        carrier, exchanges = alone(island)

        def exchange() -> ExchangeSteps:
            assert island._gone.wait(60)  # set by who leaves
            yield from ()
            ended.set()

        exchanges.begin(A_MEETING, exchange)
        with interrupted_after(0.1):
            exchanges.land()
        carrier.leave()
        assert ended.is_set()


def test_a_change_that_others_went_on_without_is_taken_back() -> None:
    with one_job(delay=2) as (model, training):
        [meeting] = training._rounds.meetings
        assert meeting.flight is not None
        own = flat(model.parameters())
        training.drop()
        assert meeting.flight is None
        assert training._rounds.weights == [4]
        assert torch.equal(flat(model.parameters()), own)


def test_nothing_begins_while_a_state_is_saved_for_those_that_join() -> None:
    with one_job() as (_, training):
        [meeting] = training._rounds.meetings
        done = meeting.done
        training._rounds.exchanges.joined_again = True  # what is due at this update is sent again
        training.save()
        assert (meeting.flight, meeting.done) == (None, done)
        assert training._rounds.exchanges.joined_again
        training._rounds.exchanges.joined_again = False


class Taken:
    """A resident that is new."""

    def save(self) -> dict[str, Any]:
        raise AssertionError("it has nothing to save")


def test_a_state_that_is_more_than_data_ends_the_job_that_asked_for_it() -> None:
    welcome = open_carrier._Welcome(Taken(), View(0, (0, 1), (0, 1), (1,), 0), own=1)
    file = io.BytesIO()
    torch.save({"optimizer": {"state": {0: Path("an object")}}}, file)
    welcome._content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"keep the rest outside of optimizer\.state") as caught:
        welcome._received()
    # others repeat an exchange after a RuntimeError, and would do so with this one for ever
    assert not isinstance(caught.value, RuntimeError)


def test_who_has_another_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(0, token="a secret")
    config = RendezvousConfig(store=f"127.0.0.1:{store.port}", at_least=1, timeout=5)
    for token, words in {"": "this process has none", "another": "has another one"}.items():
        monkeypatch.setenv(TOKEN, token)
        with pytest.raises(ClusterError, match=f"has a token, and this process .*{words[-5:]}"):
            Rendezvous(config)
    monkeypatch.setenv(TOKEN, "a secret")
    island = Rendezvous(config)
    assert island.join(trained=False).islands == (1,)
    assert not any(b"a secret" in key.encode() for key in store.list_keys())
    island.leave()


def test_a_view_that_is_none_is_refused() -> None:
    for damaged in (b"", b"[]", b"{", b'{"number": 1}', b"\xff", b'{"number": []}', b"[" * 9999):
        with pytest.raises(ClusterError, match="a view that is none"):
            View.read(damaged)
