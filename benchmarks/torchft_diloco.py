"""DiLoCo of torchft, which a benchmark of ``local`` has as its rival; in `pip install torchft`."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slipstream.strategy import LocalConfig

TIMEOUT = timedelta(seconds=600)


class DiLoCo:
    """Ranks that meet by torchft: each is a replica with a manager and a store of its own.

    Args:
        model, optimizer: of this rank; every ``optimizer.step()`` counts.
        steps: from one meeting to the next.
        delay: updates that hide an exchange.

    The outer optimizer is set as that of ``local``; its examples have a momentum of 0.9. All
    parameters are one fragment, sent in buckets.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, delay: int
    ) -> None:
        os.environ["RUST_LOG"] = "error"  # before it is loaded
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo as Meetings

        rank, world = dist.get_rank(), dist.get_world_size()
        self._lighthouse = None
        if rank == 0:
            self._lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=world)
        found: list[Any] = [self._lighthouse and self._lighthouse.address()]
        dist.broadcast_object_list(found)
        host = _host_for_others()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=world,
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=found[0],
            replica_id=f"replica{rank}",
            init_sync=False,
        )
        ours = LocalConfig()
        outer = torch.optim.SGD(model.parameters(), ours.lr, momentum=ours.momentum, nesterov=True)
        self._meetings = Meetings(
            self._manager,
            [model],
            optimizer,
            outer,
            sync_every=steps,
            use_bucketization=True,
            fragment_sync_delay=delay,
        )
        self._meetings.__enter__()

    def close(self) -> None:
        """End the manager, and on the first rank what all meet at."""
        self._meetings.__exit__(None, None, None)
        dist.barrier()
        self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def _host_for_others() -> str:
    """A name under which other hosts find this one."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "localhost"
    return name
