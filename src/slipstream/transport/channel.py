"""The ordered channel: the exchanges of this process, in one order on all ranks, beside backward.

Never decides what is exchanged, nor when.

[Note: Two ways through]
Every rank starts the same exchanges in the same order. One that is a single collective is issued at
once by whoever calls ``start``: the backend runs it in its own threads or streams, and no thread of
ours has to wake up first (while backward keeps all cores busy, each such hop costs milliseconds).
An exchange of several collectives that depend on each other (sparse gradients; a low-rank codec:
first P, then Q) goes to ``stage``: threads with a process group each run these, by turns, as units
that none can come between. With two of them one codes while the other's bytes are on the wire. As
no two threads ever issue into one group, no scheduling can bring the ranks' collectives out of
step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from slipstream.errors import ExchangeError
from slipstream.trace.recorder import Recorder, Stamp

Begin = Callable[[dist.ProcessGroup], Sequence[dist.Work]]
Staged = Callable[[dist.ProcessGroup], None]

GLOO_THREADS = 2
"""Collectives that a gloo group runs at a time, first come, first served."""

STAGES = {"cpu": 2}
"""Threads for exchanges of several collectives, by type of device; on others one: communicators of
NCCL that run beside one another may wait for each other's place on the device."""


@dataclass(slots=True)
class Label:
    """What an exchange is called: ``span`` and ``facts`` in a trace, ``text`` in an error."""

    span: str
    text: Callable[[], str]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Flight:
    """An exchange under way."""

    label: Label
    then: Callable[[], None] | None = None
    works: Sequence[dist.Work] = ()
    started: Stamp = 0.0
    ended: Stamp = 0.0
    landed: threading.Event | None = None
    error: Exception | None = None


class Channel:
    """Starts exchanges in order; ``wait`` returns when all have landed.

    Args:
        direct: the group of single collectives, issued by the caller's thread alone.
        staged: the groups of exchanges of several collectives, each issued by a thread of the
            channel alone; the exchanges take them by turns.
        device: of the tensors that travel.
        recorder: gets a span for every exchange.
    """

    def __init__(
        self,
        direct: dist.ProcessGroup,
        staged: Sequence[dist.ProcessGroup],
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        self._direct, self._staged, self._device = direct, staged, device
        self._recorder = recorder
        self._flights: list[_Flight] = []
        self._stages: list[_Stage] = []
        self._num_staged = 0
        self._lost = threading.Event()

    @property
    def in_flight(self) -> bool:
        """Whether exchanges were started that nobody has waited for."""
        return bool(self._flights)

    def start(self, label: Label, begin: Begin, then: Callable[[], None] | None = None) -> None:
        """Issue the collectives that ``begin(group)`` starts; returns at once.

        ``wait`` calls ``then`` once this one has landed, while others may still be on their way.
        """
        flight = _Flight(label, then)
        self._flights.append(flight)
        recorder = self._recorder
        if recorder is not None and recorder.active:
            flight.started = recorder.stamp(self._device)
        try:
            flight.works = begin(self._direct)
        except RuntimeError as error:  # a peer is gone already
            flight.error = error
            return
        if recorder is not None and recorder.active:
            flight.landed = threading.Event()
            last = flight.works[-1].get_future()
            last.add_done_callback(lambda _: self._land(flight))

    def stage(self, label: Label, exchange: Staged, then: Callable[[], None] | None = None) -> None:
        """Run ``exchange(group)`` in the thread whose turn it is, behind those staged there."""
        flight = _Flight(label, then, landed=threading.Event())
        self._flights.append(flight)
        turn = self._num_staged % len(self._staged)
        if turn == len(self._stages):
            self._stages.append(_Stage(self._staged[turn], self._device, self._lost))
        self._num_staged += 1
        self._stages[turn].submit(lambda group: self._run(flight, exchange, group), flight)

    def wait(self) -> None:
        """Return when all exchanges have landed, the caller's stream ordered behind them.

        Raises:
            ExchangeError: the first one that failed; the others have come to rest.
        """
        flights, self._flights = self._flights, []
        failed = False
        for flight in flights:
            self._settle(flight)
            if flight.then is not None and flight.error is None and not failed:
                try:
                    flight.then()
                except Exception as error:  # the others must come to rest all the same
                    flight.error = error
            failed = failed or flight.error is not None
        for flight in flights:
            if flight.error is not None:
                text = f"{flight.label.text()}: {flight.error}"
                raise ExchangeError(text) from flight.error
        if self._recorder is not None and self._recorder.active:
            self._record(flights)

    def close(self) -> None:
        """End the channel's threads; the groups stay their maker's."""
        for stage in self._stages:
            stage.close()

    def _settle(self, flight: _Flight) -> None:
        """Wait for one exchange; keep its error."""
        for work in flight.works:
            try:
                work.wait()
            except RuntimeError as error:
                flight.error = flight.error or error
        if flight.landed is not None and flight.error is None:
            flight.landed.wait()
        for stage in self._stages:
            stage.join_stream()

    def _land(self, flight: _Flight) -> None:
        """In a thread of the backend: the exchange is over."""
        assert self._recorder is not None
        assert flight.landed is not None
        flight.ended = self._recorder.stamp(self._device)
        flight.landed.set()

    def _run(self, flight: _Flight, exchange: Staged, group: dist.ProcessGroup) -> None:
        recorder = self._recorder if self._recorder and self._recorder.active else None
        flight.started = recorder.stamp(self._device) if recorder else 0.0
        exchange(group)
        flight.ended = recorder.stamp(self._device) if recorder else 0.0

    def _record(self, flights: Sequence[_Flight]) -> None:
        """A span for each exchange.

        gloo queues what it cannot run yet: an exchange begins when it was issued, or when one of
        the backend's threads became free, whichever is later.
        """
        assert self._recorder is not None
        free = [0.0] * GLOO_THREADS
        for flight in flights:
            start, end = flight.started, flight.ended
            if flight.works and isinstance(start, float) and isinstance(end, float):
                thread = free.index(min(free))
                start = max(start, free[thread])
                free[thread] = end
            self._recorder.add(flight.label.span, start, end, **flight.label.facts)


class _Stage:
    """One thread, with a stream of its own, that runs exchanges of several collectives.

    Args:
        group: into which no one else issues.
        device: of the tensors that travel.
        lost: set once an exchange has failed, here or in another thread.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, lost: threading.Event
    ) -> None:
        self._group, self._lost = group, lost
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[tuple[Staged, _Flight, torch.cuda.Event | None] | None] = (
            SimpleQueue()
        )
        # A daemon: a script that fails while a peer is silent must end, not wait for the peer.
        self._thread = threading.Thread(target=self._serve, name="slipstream-stage", daemon=True)
        self._thread.start()

    def submit(self, exchange: Staged, flight: _Flight) -> None:
        ready = torch.cuda.current_stream().record_event() if self._stream else None
        self._queue.put((exchange, flight, ready))

    def join_stream(self) -> None:
        """Order the caller's stream behind all that has run here."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            exchange, flight, ready = item
            assert flight.landed is not None
            try:
                if self._lost.is_set():  # the peers are not in step any more: do not wait for them
                    raise RuntimeError("an earlier exchange failed")
                with self._on_stream(ready):
                    exchange(self._group)
            except Exception as error:
                flight.error = error
                self._lost.set()
            flight.landed.set()
            del exchange, flight, item  # they hold tensors, and the loop may now rest for long

    def _on_stream(self, ready: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        if ready is not None:
            self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)
