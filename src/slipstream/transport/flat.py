"""The flat transport: each request is one collective of the backend over all ranks of the group."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from slipstream.strategy import FlatConfig
from slipstream.transport import p2p
from slipstream.transport.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    ReduceScatter,
    Request,
)


class FlatTransport:
    """The backend's own collectives; on the CPU, sends and receives for an all-to-all.

    An all-reduce of ``n`` bytes sends and receives ``2 (p - 1) / p * n`` on each of p ranks (ring).
    Exactness: reordered; bitwise on two ranks, where a sum has one order.
    """

    def __init__(self, config: FlatConfig, group: dist.ProcessGroup) -> None:
        self._group = group

    def prepare(self, requests: Sequence[Request]) -> None:
        """Nothing to do: the backend posts its receives when a collective starts."""

    def start(self, request: Request) -> Sequence[dist.Work]:
        group = self._group
        match request:
            case AllReduce(tensor):
                work = dist.all_reduce(tensor, dist.ReduceOp.SUM, group, async_op=True)
            case ReduceScatter(rows, out):
                work = p2p.scatter_sums(out, rows.view(-1), group, async_op=True)
            case AllToAll(send, receive) if send.is_cuda:
                # gloo sends host memory alone, but its all-to-all copies from the device itself.
                work = dist.all_to_all_single(receive, send, group=group, async_op=True)
            case AllToAll(send, receive):
                return p2p.start_all_to_all(receive.unbind(), send.unbind(), group)
            case AllGather(send, receive):
                work = p2p.gather_all(receive.view(-1), send.view(-1), group, async_op=True)
            case Broadcast(tensor):
                work = dist.broadcast(tensor, group=group, group_src=0, async_op=True)
            case _:
                raise TypeError(f"{type(request).__name__} is for the hierarchical transport")
        assert work is not None  # it is None outside the group alone
        return [work]

    def close(self) -> None:
        """Nothing to do: the group belongs to its maker."""
