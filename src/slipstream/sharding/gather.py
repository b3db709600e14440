"""Gathers updated parameters under the next forward: every rank sends its shards to all others.

Never decides who owns what (``gradients.shards``), nor how it travels (the transport).

[Note: Written as memory]
A parameter is completed wherever it is read first: inside a transform of ``torch.func``, while
``torch.jit.trace`` records, under a dispatch mode. There an in-place operation on it would be
refused, recorded or faked. So on a CPU what arrives is copied as memory, by numpy, which none of
them sees. It does not count as a write of the parameter's version either: that of the optimizer's
step on this rank's shard has counted already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from threading import RLock
from time import perf_counter
from typing import Any

import torch
from torch import nn

from slipstream.errors import ExchangeError
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.gradients.messages import exchange_failed
from slipstream.gradients.segments import NamedParameter
from slipstream.gradients.shard_bucket import in_shards
from slipstream.gradients.shards import Shards, flat
from slipstream.sharding.pending import resume, suspend
from slipstream.strategy import SplitConfig
from slipstream.transport.requests import AllGather
from slipstream.transport.transport import Transport
from slipstream.transport.work import Work


@dataclass(eq=False, slots=True)
class _Segment:
    """Parameters of one dtype that travel together: a row of shards for each rank."""

    names: tuple[str, ...]
    parameters: Sequence[nn.Parameter]
    columns: Sequence[slice]
    rows: torch.Tensor
    places: list[int] = field(default_factory=list)
    """Where the parameters' memory began when ``copies`` were made."""
    copies: Sequence[tuple[Any, Any]] = ()
    """Memory of the parameters, each with the part of the rows that belongs there."""
    works: Future[Sequence[Work]] = field(default_factory=Future)
    waits: Iterator[Work] | None = None
    """The works that nobody has waited for: one that was interrupted is not waited for twice."""
    pending: bool = False
    failure: ExchangeError | None = None


@dataclass(slots=True)
class ParameterGather:
    """Starts after an update; a parameter is complete when it is read first.

    Args:
        shards: which values each rank has updated.
        transport: used by nobody else between ``start`` and ``finish``.
        split: which parameters travel together.
        at: names this rank in an error.
        explaining: turns an exchange that failed inside into an error that says why.

    Attributes:
        waited: seconds for which whoever read a parameter has waited, so far.

    Exactness: bitwise.
    """

    shards: Shards
    transport: Transport
    split: SplitConfig
    at: str
    explaining: Callable[[], AbstractContextManager[object]] = nullcontext
    waited: float = field(default=0.0, init=False)
    _segments: Sequence[_Segment] = ()
    _order: tuple[str, ...] = ()
    _reading: Any = field(default_factory=RLock, init=False)
    """One thread at a time waits: it takes the works that another would wait for. A handler of a
    signal may read inside."""
    _sender: ThreadPoolExecutor = field(init=False)
    """Copies and sends all segments but the first, so that the next forward can begin; while a
    profiler runs, that one, too."""

    def __post_init__(self) -> None:
        self._sender = ThreadPoolExecutor(1, "slipstream-gather")

    def lay_out(self, parameters: Sequence[NamedParameter]) -> None:
        """Cut ``parameters``, in the order in which forward needs them, into segments."""
        order = tuple(p.name for p in parameters)
        if order == self._order:
            return
        self._order, self._segments = order, ()
        self.shards.workspace.begin()
        gradients = [
            Gradient(p.name, p.layer, p.parameter.nbytes, str(p.parameter.dtype))
            for p in parameters
        ]
        self._segments = [
            self._segment(part)
            for cut in plan_segments(gradients, self.split)
            for part in _by_dtype(parameters[cut.start : cut.stop])
        ]

    @property
    def num_bytes(self) -> list[int]:
        """Bytes of the segments."""
        return [sum(p.nbytes for p in segment.parameters) for segment in self._segments]

    @torch.no_grad()
    def start(self) -> None:
        """Send this rank's shards; from now on parameters are pending."""
        rank = self.shards.ranks.rank
        requests = [AllGather(s.rows[rank], s.rows) for s in self._segments]
        apart = _is_profiled()
        if apart:
            self._sender.submit(self.transport.prepare, requests).result()
        else:
            self.transport.prepare(requests)
        for number, (segment, request) in enumerate(zip(self._segments, requests, strict=True)):
            own = [self.shards.own_of(parameter).view(-1) for parameter in segment.parameters]
            segment.waits = None
            if (number or apart) and request.send.device.type == "cpu":
                segment.works = self._sender.submit(self._send, segment, own, request)
            else:
                segment.works = Future()
                try:
                    segment.works.set_result(self._send(segment, own, request))
                except RuntimeError as error:  # whoever reads a parameter is told
                    segment.works.set_exception(error)
            _find_memory(segment)
            segment.pending = True
            for parameter in segment.parameters:
                suspend(parameter, partial(self._complete, segment))

    def _send(
        self, segment: _Segment, own: list[torch.Tensor], request: AllGather
    ) -> Sequence[Work]:
        """Copy this rank's shards into its row, and send that to all others."""
        places = [request.send[c][: len(o)] for c, o in zip(segment.columns, own, strict=True)]
        torch._foreach_copy_(places, own)
        return self.transport.start(request)

    def close(self) -> None:
        """End the thread that sends."""
        self._sender.shutdown(wait=False)

    def finish(self) -> None:
        """Return when all parameters are complete."""
        for segment in self._segments:
            self._complete(segment)

    def abandon(self) -> list[str]:
        """Give pending parameters their class back, whatever they hold: the other ranks may be
        gone. Returns the names of those whose newest values have not arrived."""
        pending = [segment for segment in self._segments if segment.pending]
        for segment in pending:
            segment.pending = False
            for parameter in segment.parameters:
                resume(parameter)
        return [name for segment in pending for name in segment.names]

    def _complete(self, segment: _Segment) -> None:
        with self._reading:
            self._receive(segment)

    def _receive(self, segment: _Segment) -> None:
        """Wait for the others' shards, and copy them into the parameters.

        An exception in between, one of the keyboard above all, leaves the parameters pending.
        """
        if not segment.pending:
            return
        if segment.failure is not None:
            raise segment.failure
        began = perf_counter()
        try:
            if segment.waits is None:
                segment.waits = iter(segment.works.result())
            for work in segment.waits:
                work.wait()
        except RuntimeError as error:
            segment.failure = self._failed(segment, error)
            raise segment.failure from error
        finally:
            self.waited += perf_counter() - began
        for values, arrived in segment.copies:
            values[...] = arrived
        segment.pending = False
        for parameter in segment.parameters:
            resume(parameter)

    def _segment(self, parameters: Sequence[NamedParameter]) -> _Segment:
        tensors = [p.parameter for p in parameters]
        borders = [0, *accumulate(self.shards.length(t) for t in tensors)]
        columns = [slice(*border) for border in pairwise(borders)]
        rows = self.shards.workspace.rows(self.shards.ranks.count, borders[-1], tensors[0].dtype)
        return _Segment(tuple(p.name for p in parameters), tensors, columns, rows)

    def _failed(self, segment: _Segment, error: RuntimeError) -> ExchangeError:
        text = exchange_failed(self.at, "the gathering of updated parameters", segment.names)
        try:
            with self.explaining():
                raise ExchangeError(f"{text}: {error}") from error
        except ExchangeError as explained:
            return explained


def _is_profiled() -> bool:
    """Whether a profiler follows this thread, as it does not follow the one that sends.

    A message that is under way where torch's profiler stops ends in memory that is free by then
    (torch 2.13, gloo), and what travels here is waited for in the next forward.
    """
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def _find_memory(segment: _Segment) -> None:
    """Pair the memory of the parameters with that of the rows, unless it is where it was."""
    places = [parameter.data_ptr() for parameter in segment.parameters]
    if places == segment.places:
        return
    segment.places = places
    segment.copies = [
        (_memory(values), _memory(row))
        for parameter, columns in zip(segment.parameters, segment.columns, strict=True)
        for row, values in in_shards(segment.rows[:, columns], flat(parameter))
    ]


def _memory(tensor: torch.Tensor) -> Any:
    """Find the memory that ``[...] =`` copies: see the note at the top of the file."""
    if tensor.device.type != "cpu":
        return tensor
    return tensor.view(torch.uint8).numpy()


def _by_dtype(parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
    groups: dict[torch.dtype, list[NamedParameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.parameter.dtype, []).append(parameter)
    return list(groups.values())
