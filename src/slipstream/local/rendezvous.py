"""The rendezvous of islands that come and go: who takes part, and what counts as exchanged.

All they have in common is a store (``slipstream store``), which outlives each of them.

[Note: One outcome]
An exchange ends well on some islands and badly on others, where one dies in between. So each says
in the store that its part is done; the last one writes ``done``. Who fails, or waits too long,
writes ``again``. The first of these words counts (compare-and-set), on all islands alike: either
all merge, or all repeat the exchange among those that are left.

[Note: One view]
A view is a numbered list of islands, with a process group of its own. It ends when an exchange ends
with ``again``, or when all islands agree to admit those that have asked to join: ``done`` carries
how many had asked by then. After ``again`` each survivor says that it is here, waits until all
others have said so or are dead, and proposes the next view; the first proposal counts. An island
that comes later than that is in none, and joins like a new one. Dead is whose heartbeat stops.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import finalize

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from slipstream.cluster.listen import admit, run_token
from slipstream.errors import ClusterError
from slipstream.local.view import View
from slipstream.strategy import RendezvousConfig

T = TypeVar("T")
BEAT = 1.0
"""Seconds from one heartbeat to the next."""
DEAD = 4.0
"""Seconds without a heartbeat."""
LOOK = 0.05
"""Seconds from one look at the store to the next, while waiting."""
SLICE = 1.0
"""Seconds of a longer wait at a time."""
JOIN = timedelta(minutes=10)
"""For the jobs that begin together, until enough have come."""


def _slices(seconds: float) -> Iterator[float]:
    """Cut a wait into parts: time in which this process stood still counts as one of them."""
    while seconds > 0:
        yield min(SLICE, seconds)
        seconds -= SLICE


class _Asker:
    """A thread for calls of torch, which waits for ever for a store that keeps silent, and hears no
    Ctrl-C while it waits."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        threading.Thread(
            target=_answer, args=(self._calls,), name="slipstream-ask", daemon=True
        ).start()
        finalize(self, self._calls.put, None)

    def ask(self, seconds: float, call: Callable[..., T], *args: Any) -> T:
        """Return what the call does.

        Raises:
            RuntimeError: it takes longer.
        """
        answer = Future[T]()
        self._calls.put((answer, partial(call, *args)))
        for part in _slices(seconds):
            if wait([answer], part).done:
                return answer.result()
        raise RuntimeError(f"no answer within {seconds:g} s")


def _answer(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    for answer, call in iter(calls.get, None):
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)


class _Patient:
    """A store that is asked for so many seconds at most."""

    def __init__(self, store: Store, seconds: float) -> None:
        self.store, self._seconds, self._asker = store, seconds, _Asker()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._asker.ask, self._seconds, getattr(self.store, name))

    def rest(self) -> None:
        """Wait for what it was asked, if that ends soon."""
        with suppress(RuntimeError):
            self._asker.ask(2 * SLICE, lambda: None)


class Rendezvous:
    """One island's side of the store.

    Attributes:
        island: its number; another one after it has joined again.
    """

    def __init__(self, config: RendezvousConfig) -> None:
        self._config, self.island = config, 0
        self._half = timedelta(seconds=config.timeout / 2)
        # Two clients: one that waits keeps others of its threads from asking.
        store, beats = self._connect(), self._connect()
        self._store = _Patient(store, config.timeout)
        self._gone = threading.Event()
        self._beats = threading.Thread(
            target=self._beat, args=(beats,), name="slipstream-beat", daemon=True
        )
        self._beats.start()

    def _connect(self) -> Store:
        host, _, port = self._config.store.rpartition(":")

        def connect() -> Store:
            store = TCPStore(host.strip("[]"), int(port), is_master=False, timeout=self._half)
            return PrefixStore(admit(store, run_token(), self._config.store), store)

        try:
            return _Asker().ask(self._config.timeout, connect)
        except (RuntimeError, OSError) as error:
            if isinstance(error, ClusterError):
                raise
            raise ClusterError(
                f"local.rendezvous.store {self._config.store} does not answer: "
                f"{str(error).strip().splitlines()[0]}; start it there: slipstream store --host "
                f"{host} --port {port}"
            ) from error

    def _beat(self, store: Store) -> None:
        with suppress(RuntimeError):  # the store is gone: the training finds out
            while not self._gone.wait(BEAT):
                store.set(f"beat/{self.island}", str(time.monotonic()))
            # by this client, as an exchange that is waited for no longer may keep the other one
            store.set(f"left/{self.island}", "yes")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except ClusterError:
            raise
        except RuntimeError as error:
            raise ClusterError(
                f"the store at {self._config.store} is gone, or keeps silent: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error

    # Views.

    def join(self, *, trained: bool) -> View:
        """Ask to join; return when the islands have admitted this one, which they do at a meeting.

        Where none of these is left, one that has ``trained`` goes on by itself.

        Raises:
            ClusterError: too few have come, the run has ended, all that had its state are gone, or
                the store is.
        """
        with self._asking():
            self.island = self._store.add("asked", 1)
            self._store.set(f"beat/{self.island}", "begins")
            if trained:
                self._store.set(f"trained/{self.island}", "yes")
            until = time.monotonic() + JOIN.total_seconds()
            beats: dict[int, tuple[bytes, float]] = {}
            patience = max(DEAD, self._config.timeout)
            while not self._store.check([f"admitted/{self.island}"]):
                asked = self._store.add("asked", 0)
                over, view = self._store.check(["over"]), self._newest()
                if view is None:
                    gone = self._begin(asked, beats)
                    if time.monotonic() > until:
                        raise ClusterError(
                            f"too few jobs have come to {self._config.store} in "
                            f"{JOIN.total_seconds():g} s: {asked} have asked to join, "
                            + f"{gone} of them are gone, " * bool(gone)
                            + f"local.rendezvous.at_least is {self._config.at_least}"
                        )
                # others may be suspended, and a newcomer has nothing to go on with
                elif self._all_dead(view, beats, DEAD if trained else patience) and (
                    trained or not over
                ):
                    if not trained:
                        raise ClusterError(
                            f"all islands at {self._config.store} are gone, with what they have "
                            "learned; start a new store, and go on from a checkpoint"
                        )
                    alone = View(view.number + 1, (self.island,), (0,), (), asked)
                    if self.open(alone).islands == alone.islands:
                        return alone
                elif over:
                    raise ClusterError(
                        f"the run at {self._config.store} has ended; start a new store for another"
                    )
                time.sleep(LOOK)
            number = int(self._store.get(f"admitted/{self.island}"))
            return self._view(number)

    def _begin(self, asked: int, beats: dict[int, tuple[bytes, float]]) -> int:
        """Open the first view, if enough are there and no island that came before is alive; how
        many are gone."""
        now = time.monotonic()
        gone = [
            i
            for i in range(1, asked + 1)
            if i != self.island and self._is_dead(i, beats, now, DEAD)
        ]
        first = all(island in gone for island in range(1, self.island))
        if first and asked - len(gone) >= self._config.at_least:
            self.open(View.first(asked, gone))
        return len(gone)

    def _all_dead(self, view: View, beats: dict[int, tuple[bytes, float]], silence: float) -> bool:
        now = time.monotonic()
        return all(self._is_dead(island, beats, now, silence) for island in view.islands)

    def _newest(self) -> View | None:
        """The last view that was opened."""
        if not self._store.check(["newest"]):
            return None
        number = int(self._store.get("newest"))
        while self._store.check([f"view/{number + 1}"]):
            number += 1
        return self._view(number)

    def led(self, view: View) -> View:
        """A view in which one island has the state, where none is left of those that had it: one
        that trained before it joined again, or any, if nobody has trained yet.

        Raises:
            ClusterError: there is none.
        """
        if len(view.fresh) < len(view.islands):
            return view
        with self._asking():
            for island in view.islands:
                if self._store.check([f"trained/{island}"]):
                    return view.led_by(island)
            if not self._store.check(["begun"]):
                return view.led_by(view.islands[0])
        raise ClusterError(
            "all islands that had the parameters are gone; start a new store, and go on from a "
            "checkpoint"
        )

    def begun(self) -> None:
        """Note that all islands of a view have the same state."""
        with self._asking():
            self._store.set("begun", "yes")

    def same(self, what: str, value: str) -> None:
        """Refuse to take part with something else than the first island has.

        Raises:
            ClusterError: names it.
        """
        with self._asking():
            first = self._store.compare_set(f"same/{what}", "", value).decode()
        if first != value:
            raise ClusterError(
                f"{what} of this job differs from that of the others at {self._config.store}; "
                "start all jobs of a run with the same"
            )

    def open(self, view: View) -> View:
        """Propose a view; the first proposal of its number counts."""
        with self._asking():
            found = View.read(
                self._store.compare_set(f"view/{view.number}", "", json.dumps(asdict(view)))
            )
            self._store.set("newest", str(found.number))
            for island in found.islands if found.number == 1 else found.fresh:
                self._store.set(f"admitted/{island}", str(found.number))
            return found

    def _view(self, number: int) -> View:
        return View.read(self._store.get(f"view/{number}"))

    def next_view(self, view: View) -> View:
        """The view after one that has lost an island; it may be without this one."""
        with self._asking():
            self._store.set(f"here/{view.number}/{self.island}", "yes")
            until = time.monotonic() + self._half.total_seconds()
            beats: dict[int, tuple[bytes, float]] = {}
            while not self._store.check([f"view/{view.number + 1}"]):
                absent = [
                    island
                    for island in view.islands
                    if not self._store.check([f"here/{view.number}/{island}"])
                ]
                now = time.monotonic()
                if now > until or all(self._is_dead(island, beats, now, DEAD) for island in absent):
                    return self.open(view.without(absent))
                time.sleep(LOOK)
            return self._view(view.number + 1)

    def _is_dead(
        self,
        island: int,
        beats: dict[int, tuple[bytes, float]],
        now: float,
        silence: float,
    ) -> bool:
        if self._store.check([f"left/{island}"]):
            return True
        begun = self._store.check([f"beat/{island}"])  # else it has just asked, or died then
        beat = self._store.get(f"beat/{island}") if begun else b""
        last, since = beats.setdefault(island, (beat, now))
        if beat != last:
            beats[island] = beat, now
            return False
        return now - since > silence

    def group(self, view: View) -> dist.ProcessGroup | None:
        """Connect the islands of a view; None: it is alone.

        Raises:
            RuntimeError: one of them does not come.
        """
        if len(view.islands) == 1:
            return None
        # by a client of its own: where it waits in vain it keeps nobody from asking
        store = PrefixStore(f"group/{view.number}", self._connect())
        rank, size = view.islands.index(self.island), len(view.islands)
        gloo = _Asker().ask(
            self._config.timeout, dist.ProcessGroupGloo, store, rank, size, self._half
        )
        group, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        for device in ("cpu", "cuda"):
            group._register_backend(torch.device(device), kind, gloo)
        return group

    # Outcomes.

    def agree(self, view: View, number: int, done: bool) -> int | None:
        """Whether all islands have done exchange ``number`` of a view: how many islands have asked
        to join by then; None: it is to be repeated in the next view."""
        key = f"{view.number}/{number}"
        with self._asking():
            if done and self._store.add(f"done/{key}", 1) == len(view.islands):
                word = f"done {self._store.add('asked', 0)}"
                self._store.compare_set(f"outcome/{key}", "", word)
            elif done:
                done = self._comes(f"outcome/{key}")
            if not done:
                self._store.compare_set(f"outcome/{key}", "", "again")
            word, _, asked = self._store.get(f"outcome/{key}").decode().partition(" ")
        return int(asked) if word == "done" else None

    def _comes(self, key: str) -> bool:
        """Wait for a word of others, half of the time limit at most; whether it comes."""
        for seconds in _slices(self._half.total_seconds()):
            if self._gone.is_set():  # a thread still in torch would abort the interpreter's end
                raise ClusterError("this job takes part no longer")
            with suppress(dist.DistStoreError):  # the time is up
                self._store.wait([key], timedelta(seconds=seconds))
                return True
        return False

    def close(self, view: View) -> bool:
        """Whether all islands of a view close now; else they are not waited for any longer."""
        with self._asking():
            key = f"closed/{view.number}"
            if self._store.add(f"closing/{view.number}", 1) == len(view.islands):
                self._store.compare_set(key, "", "together")
            if not self._comes(key):
                self._store.compare_set(key, "", "alone")
            together: bool = self._store.get(key) == b"together"
            if together:
                self.end()
        return together

    def end(self) -> None:
        """Note that the run is over: nobody is taken in any more."""
        with self._asking():
            self._store.set("over", "yes")

    def leave(self) -> None:
        """Take part no longer; the others need not wait for signs of life. Idempotent."""
        if self._gone.is_set():
            return
        self._gone.set()
        self._beats.join(timeout=BEAT)
        self._store.rest()
