"""Differentiable communication operators between ranks, for use inside a forward pass.

import slipstream.comm as comm

whole = comm.all_gather(part, axis=1)                # backward: reduce_scatter_sum
pair = comm.group([2, 0])                            # rank 2 is its root
comm.send(hidden, to=1)                              # on rank 0 of the world
hidden = comm.recv(0)                                # on rank 1
comm.backward(loss)                                  # on rank 1; comm.backward() on rank 0

Each operator runs a linear collective; its backward runs the adjoint collective through the same
code, so gradients of any order are right. Backward differentiates the sum of all ranks' losses.
Minimum and maximum are not linear: they pass the gradient to every rank that holds the extreme
value. Under ``torch.compile`` sums, means, all_gather, reduce_scatter_sum and
all_to_all of equal pieces stay in the graph in groups without ``check``; every other call is a
graph break. Names and semantics follow MegEngine's
``functional.distributed``.
"""

from slipstream.comm.graphs import Graph as Graph, backward as backward, graph as graph
from slipstream.comm.groups import Group as Group, group as group, group_of as group_of
from slipstream.comm.point_to_point import recv as recv, send as send
from slipstream.comm.rearrangements import (
    all_gather as all_gather,
    all_to_all as all_to_all,
    broadcast as broadcast,
    gather as gather,
    reduce_scatter_sum as reduce_scatter_sum,
    scatter as scatter,
)
from slipstream.comm.reductions import (
    all_reduce_max as all_reduce_max,
    all_reduce_mean as all_reduce_mean,
    all_reduce_min as all_reduce_min,
    all_reduce_sum as all_reduce_sum,
    reduce_sum as reduce_sum,
)
