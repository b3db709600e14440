"""The protocol of a transport between ranks, and the table from a strategy's setting to it.

To add one: a variant in ``strategy/transport.py``, a file here with a class that meets
``Transport``, and a row in ``TRANSPORTS``; if ``auto`` may choose it, a row in ``EXACT``. Beside
these only the planner's costs know it; two are more than a way to travel: ``sharded`` changes who
updates what, and ``hierarchical`` tells others which ranks share a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from slipstream.strategy import (
    DirectConfig,
    FlatConfig,
    HierarchicalConfig,
    ShardedConfig,
    SharedMemoryConfig,
    TransportConfig,
)
from slipstream.transport.direct import DirectTransport
from slipstream.transport.flat import FlatTransport
from slipstream.transport.hierarchical import HierarchicalTransport
from slipstream.transport.place import Place
from slipstream.transport.requests import ExchangeSteps, Request
from slipstream.transport.shared_memory import SharedMemoryTransport
from slipstream.transport.work import Work


class Transport(Protocol):
    """Carries out requests between the ranks of one process group, all ranks in the same order.

    One thread at a time uses a transport. Threads that exchange beside one another each have a
    transport on a group of their own.
    """

    def prepare(self, requests: Sequence[Request]) -> None:
        """Announce the single requests that a pass over the model will start, in order.

        Every announced request is started before the first of them is waited for, and before the
        next call, unless a failure ends the run.
        Broadcasts may be started in between, and the tensors stay where they are. A transport
        may post its receives now, and knows from the count when nothing more will follow.
        """

    def start(self, request: Request) -> Sequence[Work]:
        """Begin ``request``; once all returned works are done, its tensors hold the result.

        Waiting for a work orders the caller's CUDA stream behind it. The last work completes last.

        Raises:
            RuntimeError: a peer is gone.
        """

    def close(self) -> None:
        """End its threads and free what it allocated; idempotent. The group stays."""


TRANSPORTS: dict[type, Callable[[Any, dist.ProcessGroup], Transport]] = {
    FlatConfig: FlatTransport,
    DirectConfig: DirectTransport,
    ShardedConfig: DirectTransport,
    HierarchicalConfig: HierarchicalTransport,
    SharedMemoryConfig: SharedMemoryTransport,
}
"""By type of the strategy's ``gradients.transport``."""

EXACT: Mapping[TransportConfig, Callable[[Place], bool]] = {
    FlatConfig(): lambda place: True,
    DirectConfig(): lambda place: place.device.type == "cpu" and not place.one_host,
    HierarchicalConfig(): lambda place: (
        place.device.type == "cpu" and not place.one_host and place.shares_hosts
    ),
    SharedMemoryConfig(): lambda place: place.device.type == "cpu" and place.one_host,
}
"""What ``auto`` chooses among, and where each is worth a try; the first one everywhere. They ask
nothing of the user's code, and may be exchanged for one another between two updates."""


def exact_transports(place: Place) -> tuple[TransportConfig, ...]:
    """The transports that ``auto`` chooses among on these ranks, the one to begin with first."""
    return tuple(config for config, fits in EXACT.items() if fits(place))


def make_transport(config: TransportConfig, group: dist.ProcessGroup) -> Transport:
    """The transport of a strategy, on one group; all ranks of the group call it."""
    return TRANSPORTS[type(config)](config, group)


def run(exchange: ExchangeSteps, transport: Transport) -> None:
    """Carry out what ``exchange`` asks for, one request after the other.

    Raises:
        RuntimeError: a request failed; ``exchange`` sees the error at its ``yield``.
    """
    request = next(exchange, None)
    while request is not None:
        try:
            for work in transport.start(request):
                work.wait()
        except RuntimeError as error:
            exchange.throw(error)
            raise
        request = next(exchange, None)
