"""Gathers updated parameters under the next forward: every rank sends its shares to all others.

Never decides who owns what (``gradients.shares``), nor how it travels (the transport).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import nn

from slipstream.errors import ExchangeError
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.gradients.messages import exchange_failed
from slipstream.gradients.segments import NamedParameter
from slipstream.gradients.shard_bucket import in_shares
from slipstream.gradients.shares import Shares, flat
from slipstream.sharding.pending import pending_class
from slipstream.strategy import Split
from slipstream.transport.requests import AllGather
from slipstream.transport.transport import Transport
from slipstream.transport.work import Work


@dataclass(eq=False, slots=True)
class _Segment:
    """Parameters of one dtype that travel together: a row of shares for each rank."""

    names: tuple[str, ...]
    parameters: Sequence[nn.Parameter]
    columns: Sequence[slice]
    rows: torch.Tensor
    works: Future[Sequence[Work]] = field(default_factory=Future)
    pending: bool = False


@dataclass(slots=True)
class ParameterGather:
    """Starts after an update; a parameter is complete when it is read first.

    Args:
        shares: which values each rank has updated.
        transport: used by nobody else between ``start`` and ``finish``.
        split: which parameters travel together.
        at: names this rank in an error.

    Exactness: bitwise.
    """

    shares: Shares
    transport: Transport
    split: Split
    at: str
    _segments: Sequence[_Segment] = ()
    _order: tuple[str, ...] = ()
    _segment_of: dict[nn.Parameter, _Segment] = field(default_factory=dict)
    _classes: dict[nn.Parameter, type] = field(default_factory=dict)
    _pending_class: type[nn.Parameter] = nn.Parameter
    _sender: ThreadPoolExecutor = field(init=False)
    """Copies and sends all segments but the first, so that the next forward can begin."""

    def __post_init__(self) -> None:
        self._pending_class = pending_class(self._arrive)
        self._sender = ThreadPoolExecutor(1, "slipstream-gather")

    def lay_out(self, parameters: Sequence[NamedParameter]) -> None:
        """Cut ``parameters``, in the order in which forward needs them, into segments."""
        order = tuple(p.name for p in parameters)
        if order == self._order:
            return
        self._order, self._segments = order, ()
        self.shares.workspace.begin()
        gradients = [
            Gradient(p.name, p.layer, p.parameter.nbytes, str(p.parameter.dtype))
            for p in parameters
        ]
        self._segments = [
            self._segment(part)
            for cut in plan_segments(gradients, self.split)
            for part in _by_dtype(parameters[cut.start : cut.stop])
        ]
        self._segment_of = {p: s for s in self._segments for p in s.parameters}

    @property
    def num_bytes(self) -> list[int]:
        """Bytes of the segments."""
        return [sum(p.nbytes for p in segment.parameters) for segment in self._segments]

    @torch.no_grad()
    def start(self) -> None:
        """Send this rank's shares; from now on parameters are pending."""
        rank = self.shares.ranks.rank
        requests = [AllGather(s.rows[rank], s.rows) for s in self._segments]
        self.transport.prepare(requests)
        for number, (segment, request) in enumerate(zip(self._segments, requests, strict=True)):
            own = [self.shares.own(parameter).view(-1) for parameter in segment.parameters]
            if number and request.send.device.type == "cpu":
                segment.works = self._sender.submit(self._send, segment, own, request)
            else:
                segment.works = Future()
                try:
                    segment.works.set_result(self._send(segment, own, request))
                except RuntimeError as error:  # whoever reads a parameter is told
                    segment.works.set_exception(error)
            segment.pending = True
            for parameter in segment.parameters:
                self._classes[parameter] = type(parameter)
                parameter.__class__ = self._pending_class

    def _send(
        self, segment: _Segment, own: list[torch.Tensor], request: AllGather
    ) -> Sequence[Work]:
        """Copy this rank's shares into its row, and send that to all others."""
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

    def abandon(self) -> None:
        """Give pending parameters their class back, whatever they hold: ranks are out of step."""
        for segment in self._segments:
            self._restore(segment)

    def _arrive(self, parameter: nn.Parameter) -> None:
        self._complete(self._segment_of[parameter])

    @torch.no_grad()
    def _complete(self, segment: _Segment) -> None:
        """Wait for the others' shares, and copy them into the parameters."""
        if not segment.pending:
            return
        self._restore(segment)
        try:
            for work in segment.works.result():
                work.wait()
        except RuntimeError as error:
            raise self._failed(segment, error) from error
        finally:
            segment.works = Future()
        for parameter, columns in zip(segment.parameters, segment.columns, strict=True):
            for row, values in in_shares(segment.rows[:, columns], flat(parameter)):
                values.copy_(row)

    def _restore(self, segment: _Segment) -> None:
        if segment.pending:
            segment.pending = False
            for parameter in segment.parameters:
                parameter.__class__ = self._classes[parameter]

    def _segment(self, parameters: Sequence[NamedParameter]) -> _Segment:
        tensors = [p.parameter for p in parameters]
        borders = [0, *accumulate(self.shares.length(t) for t in tensors)]
        columns = [slice(*border) for border in pairwise(borders)]
        rows = self.shares.workspace.rows(self.shares.ranks.count, borders[-1], tensors[0].dtype)
        return _Segment(tuple(p.name for p in parameters), tensors, columns, rows)

    def _failed(self, segment: _Segment, error: RuntimeError) -> ExchangeError:
        text = exchange_failed(self.at, "the gathering of updated parameters", segment.names)
        return ExchangeError(f"{text}: {error}")


def _by_dtype(parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
    groups: dict[torch.dtype, list[NamedParameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.parameter.dtype, []).append(parameter)
    return list(groups.values())
