"""Tensors between ranks: differentiable operators for a forward graph, and what the engine uses.

import slipstream.comm as comm

whole = comm.all_gather(part, axis=1)                # backward: reduce_scatter_sum
pair = comm.group([2, 0])                            # rank 2 is its root
comm.send(hidden, to=1)                              # on rank 0 of the world
hidden = comm.recv(0)                                # on rank 1
comm.backward(loss)                                  # on rank 1; comm.backward() on rank 0

Each operator is a linear map of ``moves`` whose backward is the adjoint map, run by the same
function, so that gradients of any order are right: what is differentiated is the sum of all ranks'
losses. The largest and the smallest value pass the gradient on to every rank that holds them. Under
``torch.compile`` each call is a break of the graph. Semantics and names: MegEngine's
``functional.distributed``.
"""

from slipstream.comm.graphs import Graph, backward, graph
from slipstream.comm.groups import Group, group, group_of
from slipstream.comm.point_to_point import recv, send
from slipstream.comm.rearrangements import (
    all_gather,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter_sum,
    scatter,
)
from slipstream.comm.reductions import (
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_sum,
    reduce_sum,
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
