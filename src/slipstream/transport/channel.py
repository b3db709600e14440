"""The ordered channel: runs the exchanges of this process beside backward, in order on all ranks.

Never decides what is exchanged, nor when; how it travels is the transport's part.

[Note: Two ways through]
Every rank starts the same exchanges in the same order. A single request is started at once by the
thread that calls ``start``: the backend runs it in its own threads or streams, and no thread of
ours has to wake up first (while backward keeps all cores busy, each wake-up costs milliseconds).
An exchange of several requests that depend on each other (sparse gradients; a low-rank codec:
first P, then Q) is staged: threads with a transport each take these by turns, and each thread
finishes one exchange before it begins the next. With two of them, one encodes while the bytes of
the other are on the wire. No two threads ever use the same transport, so no scheduling can bring
the collectives of the ranks out of step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from slipstream.errors import ExchangeError
from slipstream.trace.recorder import Recorder, Stamp
from slipstream.transport.exchange_log import EXCHANGES, LoggedExchange
from slipstream.transport.requests import ExchangeSteps, Request
from slipstream.transport.transport import Transport, run
from slipstream.transport.work import Work

GLOO_THREADS = 2
"""Collectives that a gloo group runs at a time, first come, first served."""

STAGES = {"cpu": 2}
"""Threads for staged exchanges, by type of device. One on others: NCCL communicators that run at
the same time may wait for each other's place on the device for ever."""


@dataclass(slots=True)
class Label:
    """Names an exchange: ``span`` and ``args`` in a trace, ``describe()`` in an error, ``what`` and
    the gradients ``names`` in an autopsy."""

    span: str
    describe: Callable[[], str]
    args: Mapping[str, Any] = field(default_factory=dict)
    what: str = ""  # the span, if empty
    names: Sequence[str] = ()


@dataclass(slots=True)
class _InFlight:
    """An exchange under way; ``done`` is set by the thread that sees it end."""

    label: Label
    then: Callable[[], None] | None
    logged: LoggedExchange
    works: Sequence[Work] = ()
    start: Stamp = 0.0
    end: Stamp = 0.0
    done: threading.Event | None = None
    error: Exception | None = None

    @property
    def arrived(self) -> bool:
        """Whether it is done, or has failed."""
        if self.error is not None or not self.works:
            return self.error is not None or self.done is None or self.done.is_set()
        return all(work.get_future().done() for work in self.works)


class Channel:
    """Starts exchanges in order; ``wait`` returns when all are done.

    Args:
        single: carries single requests, started by the caller's thread alone.
        staged: carry exchanges of several requests, each used by one thread of the channel alone;
            the exchanges take turns among them.
        device: of the tensors that travel.
        recorder: gets a span for every exchange.
    """

    def __init__(
        self,
        single: Transport,
        staged: Sequence[Transport],
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        self._single, self._staged, self._device = single, staged, device
        self._recorder = recorder
        self._in_flight: list[_InFlight] = []
        self._stages: list[_Stage] = []
        self._num_staged = 0
        self._broken = threading.Event()

    @property
    def in_flight(self) -> bool:
        """Whether exchanges were started that nobody has waited for."""
        return bool(self._in_flight)

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return all(entry.arrived for entry in self._in_flight)

    @property
    def recording(self) -> bool:
        """Whether this step is recorded."""
        return self._recorder is not None and self._recorder.active

    def stamp(self) -> Stamp:
        """Now, on the recorder's clock; only while ``recording``."""
        assert self._recorder is not None
        return self._recorder.stamp(self._device)

    def prepare(self, requests: Sequence[Request]) -> None:
        """Announce the single requests of a backward pass; see ``Transport.prepare``."""
        self._single.prepare(requests)

    def start(
        self,
        label: Label,
        exchange: Request | ExchangeSteps,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Begin a request, or queue an exchange of several; returns at once.

        ``wait`` calls ``then`` when this one is done, while others may still be in flight.
        """
        entry = _InFlight(label, then, EXCHANGES.begin(label.what or label.span, label.names))
        self._in_flight.append(entry)
        if isinstance(exchange, Generator):
            self._stage(entry, exchange)
            return
        if self.recording:
            entry.start = self.stamp()
        try:
            entry.works = self._single.start(exchange)
        except RuntimeError as error:  # a peer is gone already: ``wait`` tells
            entry.error = error
            return
        if self.recording and entry.works:
            entry.done = threading.Event()
            entry.works[-1].get_future().add_done_callback(lambda _: self._finished(entry))

    def wait(self) -> None:
        """Return when all exchanges are done, the caller's stream ordered behind them.

        Raises:
            ExchangeError: of the first that failed; none is in flight any more.
        """
        entries = self._in_flight
        failed = False
        for entry in entries:
            self._await(entry)
            if entry.then is not None and entry.error is None and not failed:
                try:
                    entry.then()
                except Exception as error:  # the others must come to rest all the same
                    entry.error = error
            failed = failed or entry.error is not None
        self._in_flight = []  # not before: after an interrupt they still are
        for entry in entries:
            if entry.error is not None:
                text = f"{entry.label.describe()}: {entry.error}"
                raise ExchangeError(text) from entry.error
        if self.recording:
            self._record(entries)

    def close(self) -> None:
        """End the threads and close the transports; idempotent."""
        for stage in self._stages:
            stage.close()
        for transport in (self._single, *self._staged):
            transport.close()

    def _stage(self, entry: _InFlight, exchange: ExchangeSteps) -> None:
        """Queue an exchange for the thread whose turn it is."""
        entry.done = threading.Event()
        turn = self._num_staged % len(self._staged)
        if turn == len(self._stages):
            self._stages.append(_Stage(self._staged[turn], self._device, self._broken))
        self._num_staged += 1
        self._stages[turn].submit(lambda transport: self._run(entry, exchange, transport), entry)

    def _run(self, entry: _InFlight, exchange: ExchangeSteps, transport: Transport) -> None:
        recording = self.recording
        entry.start = self.stamp() if recording else 0.0
        run(exchange, transport)
        entry.end = self.stamp() if recording else 0.0

    def _await(self, entry: _InFlight) -> None:
        """Wait for one exchange; keep its error."""
        for work in entry.works:
            try:
                work.wait()
            except RuntimeError as error:
                entry.error = entry.error or error
        if entry.done is not None and entry.error is None:
            entry.done.wait()
        entry.logged.end()
        for stage in self._stages:
            stage.join_stream()

    def _finished(self, entry: _InFlight) -> None:
        """Called in a thread of the backend."""
        assert entry.done is not None
        entry.end = self.stamp()
        entry.done.set()

    def _record(self, entries: Sequence[_InFlight]) -> None:
        """A span for each exchange.

        gloo queues what it cannot run yet: an exchange begins when it was issued, or when one of
        the backend's threads became free, whichever is later.
        """
        assert self._recorder is not None
        free = [0.0] * GLOO_THREADS
        for entry in entries:
            start, end = entry.start, entry.end
            if entry.works and isinstance(start, float) and isinstance(end, float):
                thread = free.index(min(free))
                start = max(start, free[thread])
                free[thread] = end
            self._recorder.add(entry.label.span, start, end, **entry.label.args)


class _Stage:
    """One thread, with a CUDA stream of its own, that runs exchanges of several requests.

    Args:
        transport: nobody else uses it.
        device: of the tensors that travel.
        broken: set once an exchange has failed, in this thread or another.
    """

    def __init__(self, transport: Transport, device: torch.device, broken: threading.Event) -> None:
        self._transport, self._broken = transport, broken
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[
            tuple[Callable[[Transport], None], _InFlight, torch.cuda.Event | None] | None
        ] = SimpleQueue()
        # A daemon: a script that fails while a peer is silent must end, not wait for the peer.
        self._thread = threading.Thread(target=self._serve, name="slipstream-stage", daemon=True)
        self._thread.start()

    def submit(self, exchange: Callable[[Transport], None], entry: _InFlight) -> None:
        # The stage's stream must not read tensors that the caller's stream still writes.
        ready = torch.cuda.current_stream().record_event() if self._stream else None
        self._queue.put((exchange, entry, ready))

    def join_stream(self) -> None:
        """Order the caller's stream behind all that has run here."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            exchange, entry, ready = item
            assert entry.done is not None
            try:
                if self._broken.is_set():  # ranks are out of step: do not wait for the peers
                    raise RuntimeError("an earlier exchange failed")
                with self._on_stream(ready):
                    exchange(self._transport)
            except Exception as error:
                entry.error = error
                self._broken.set()
            entry.done.set()
            del exchange, entry, item  # they hold tensors, and the loop may now rest for long

    def _on_stream(self, ready: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        if ready is not None:
            self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)
