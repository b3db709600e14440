"""Tensors between ranks: differentiable operators for a forward graph, and what the engine uses.

import slipstream.comm as comm

whole = comm.all_gather(part, axis=1)                # backward: reduce_scatter_sum
pair = comm.group([2, 0])                            # rank 2 is its root
comm.send(hidden, to=1)                              # on rank 0 of the world
hidden = comm.recv(0)                                # on rank 1
comm.backward(loss)                                  # on rank 1; comm.backward() on rank 0
"""

from slipstream.comm.graphs import Graph, backward, graph
from slipstream.comm.groups import Group, group, group_of
from slipstream.comm.operators import (
    all_gather,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_sum,
    all_to_all,
    broadcast,
    gather,
    recv,
    reduce_scatter_sum,
    reduce_sum,
    scatter,
    send,
)

__all__ = [
    "Graph",
    "Group",
    "all_gather",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_sum",
    "all_to_all",
    "backward",
    "broadcast",
    "gather",
    "graph",
    "group",
    "group_of",
    "recv",
    "reduce_scatter_sum",
    "reduce_sum",
    "scatter",
    "send",
]
