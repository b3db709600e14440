"""A transport that is one of several at a time, exchanged for another between two updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from slipstream.strategy import TransportConfig
from slipstream.transport.requests import Request
from slipstream.transport.transport import Transport, make_transport
from slipstream.transport.work import Work


class Switch:
    """Passes everything on to the transport in use; the others wait on the same group.

    All ranks of the group call ``use`` and ``keep`` alike, while no exchange is under way.
    Exactness: that of the transport in use.
    """

    def __init__(self, first: TransportConfig, group: dist.ProcessGroup) -> None:
        self._group = group
        self._made: dict[TransportConfig, Transport] = {}
        self.use(first)

    def make(self, config: TransportConfig) -> None:
        """Have it ready for use.

        Raises:
            ClusterError: it cannot be used on these ranks.
            MismatchError: the same, found by another rank.
        """
        if config not in self._made:
            self._made[config] = make_transport(config, self._group)

    def made(self, config: TransportConfig) -> Transport:
        """The transport itself, which its own threads may go on to use."""
        return self._made[config]

    def drop(self, config: TransportConfig) -> None:
        """Free one that is not in use."""
        if config in self._made and config != self.config:
            self._made.pop(config).close()

    def use(self, config: TransportConfig) -> None:
        """Use this one from the next backward on; a transport is made when it is first used."""
        self.make(config)
        self.config, self._used = config, self._made[config]

    def keep(self, config: TransportConfig) -> None:
        """``use`` it for good: the threads and the memory of the others are freed."""
        self.use(config)
        for other in self._made.keys() - {config}:
            self.drop(other)

    def prepare(self, requests: Sequence[Request]) -> None:
        self._used.prepare(requests)

    def start(self, request: Request) -> Sequence[Work]:
        return self._used.start(request)

    def close(self) -> None:
        """Close all of them."""
        for transport in self._made.values():
            transport.close()
