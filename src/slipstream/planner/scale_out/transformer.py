"""Computing of a transformer from its shape: what an update takes on a rank, by FLOPs and bytes.

A layer of hidden size h on s tokens of b samples, split over t ranks, with a heads:

    matrix products   24 s b h^2 + 4 s^2 b h    operations of a forward; backward takes twice these,
                                                and once more where forward is computed again
    all else          s b h (10 + 24 / t + 5 a s / (h t))    bytes of activations, each moved
                                                MOVED times
    sums over t       2 s b h bytes             twice in forward, twice in backward, and twice in a
                                                forward that is computed again

Sources: Narayanan et al. 2021 (operations); Korthikanti et al. 2022 (activations).
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.gradients.layout import Gradient
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.profile import GroupKind, Network, NetworkProfile
from slipstream.planner.scale_out.collectives import (
    LinkSpeed,
    machines,
    network,
    ring_all_reduce,
    uplink_slowdown,
)
from slipstream.planner.scale_out.pipeline import one_f_one_b
from slipstream.planner.scale_out.shape import MachineConfig, ScaleOutConfig

MOVED = 5
"""How often the bytes of an activation are written or read: forward, forward again, backward."""
OPTIMIZER_BYTES = 28
"""That Adam moves for a parameter: gradient, fp32 weights, two moments, and 16-bit weights."""
ACTIVATION_BYTES = 2


def layer_seconds(shape: ScaleOutConfig) -> float:
    """Compute the seconds of forward and backward of a micro-batch through a layer.

    Args:
        shape: of the training.
    """
    model, machine, tensor = shape.model, shape.machine, shape.parallel.tensor
    tokens, hidden = shape.batch.micro * model.sequence, model.hidden
    operations = tokens * (24 * hidden**2 + 4 * model.sequence * hidden)
    passes = 4 if model.recompute else 3
    products = passes * operations / tensor / (machine.teraflops * 1e12)
    scores = 5 * model.heads * model.sequence / hidden
    activations = tokens * hidden * (10 + (24 + scores) / tensor)
    moved = MOVED * activations / (machine.memory_gbytes * 1e9)
    num_bytes, link = tokens * hidden * ACTIVATION_BYTES, _tensor_link(machine, tensor)
    sums = (6 if model.recompute else 4) * ring_all_reduce(num_bytes, tensor, link)
    return products + moved + sums + machine.layer_ms / 1e3


def head_seconds(shape: ScaleOutConfig) -> float:
    """Compute the seconds of forward and backward of a micro-batch through the output layer."""
    model, tokens = shape.model, shape.batch.micro * shape.model.sequence
    operations = 6 * tokens * model.hidden * model.vocabulary
    return operations / shape.parallel.tensor / (shape.machine.teraflops * 1e12)


def workload(shape: ScaleOutConfig, ranks: int) -> Workload:
    """Build the workload of a rank of the first stage, which ends its backward last.

    Its replicas on other ranks are alike, and exchange gradients with it; ``forward`` has all that
    comes before the backward of the last micro-batch.

    Args:
        shape: of the training.
        ranks: of all replicas.

    Raises:
        StrategyError: the ranks, or the batch, cannot be divided so.
    """
    model, sizes, machine = shape.model, shape.parallel, shape.machine
    replicas, micro_batches = shape.replicas(ranks), shape.micro_batches(ranks)
    layers, layer = model.layers // sizes.pipeline, layer_seconds(shape)
    stages = [layers * layer] * sizes.pipeline
    stages[-1] += head_seconds(shape)
    send = _to_next_stage(shape, ranks)
    total = one_f_one_b(stages, micro_batches, send, sizes.interleaved)
    share = 3 / 4 if model.recompute else 2 / 3
    backward = stages[0] * share
    one_layer = 12 * model.hidden**2 // sizes.tensor * model.gradient_bytes
    embedding = model.hidden * model.vocabulary // sizes.tensor * model.gradient_bytes
    gradients = [Gradient(f"layer{i}", f"layer{i}", one_layer) for i in reversed(range(layers))]
    gradients.append(Gradient("embedding", "embedding", embedding))
    ready = backward * np.minimum(np.arange(1, layers + 2) / layers, 1.0)
    parameters = sum(gradient.num_bytes for gradient in gradients) / model.gradient_bytes
    optimizer = parameters * OPTIMIZER_BYTES / (machine.memory_gbytes * 1e9)
    one = np.ones(replicas)
    first = stages[0] - backward  # forward of the first micro-batch
    return Workload(
        gradients=tuple(gradients),
        data_wait=0 * one,
        forward=(total - backward) * one,
        backward=backward * one,
        ready=np.tile(ready, (replicas, 1)),
        optimizer=optimizer * one,
        other=machine.update_ms / 1e3 * one,
        samples=micro_batches * shape.batch.micro * one,
        optimizer_bytes=round(12 * parameters),
        shardable=True,
        sgd=False,
        first_part=first / (total - backward),
    )


def profile(shape: ScaleOutConfig, ranks: int) -> NetworkProfile:
    """Build the network of the replicas of a rank.

    ``tensor`` ranks of a host belong to other groups of replicas, which exchange at the same time
    and share its links.

    Raises:
        StrategyError: the ranks cannot be divided so.
    """
    machine, replicas, tensor = shape.machine, shape.replicas(ranks), shape.parallel.tensor
    per_host = min(max(1, machine.ranks_per_host // tensor), replicas)
    hosts = math.ceil(replicas * tensor / machine.ranks_per_host)
    groups = min(tensor, machine.ranks_per_host)
    uplinks = uplink_slowdown(hosts, shape.fabric)
    across, direct = _inside(machine), 1.0
    if hosts > 1 and replicas > 1:  # one replica exchanges nothing
        between = _between(machine, groups)
        across = LinkSpeed(between.latency, min(across.rate, between.rate))
        # a ring leaves a host once; direct sends of all its ranks go to all ranks elsewhere
        leaving = per_host * (replicas - per_host) / (replicas - 1)
        direct = max(1.0, leaving * across.rate / between.rate) * uplinks
    if replicas % per_host:
        per_host = 1
    kind = machine.backend
    networks: dict[GroupKind, Network] = {
        "world": network("world", replicas, across, direct=direct, backend=kind)
    }
    if 1 < per_host < replicas:
        shared, others = _between(machine, groups * per_host), replicas // per_host
        networks["intra"] = network("intra", per_host, _inside(machine), backend=kind)
        networks["inter"] = network("inter", others, shared, direct=uplinks, backend=kind)
    return machines(networks, replicas // per_host, per_host, kind)


def _inside(machine: MachineConfig) -> LinkSpeed:
    return LinkSpeed(machine.inside_us / 1e6, machine.inside_gbytes * 1e9)


def _between(machine: MachineConfig, sharing: int) -> LinkSpeed:
    """The link of a host to the next one, for one of ``sharing`` that use it at the same time."""
    return LinkSpeed(machine.host_us / 1e6, machine.host_gbytes * 1e9 / sharing)


def _tensor_link(machine: MachineConfig, tensor: int) -> LinkSpeed:
    """The slowest link in a ring of ranks that compute a layer together."""
    inside = _inside(machine)
    if tensor <= machine.ranks_per_host:
        return inside
    between = _between(machine, 1)
    return LinkSpeed(between.latency, min(inside.rate, between.rate))


def _to_next_stage(shape: ScaleOutConfig, ranks: int) -> float:
    """Seconds of a micro-batch's activations to the next stage; all ranks of a host send."""
    machine, stages = shape.machine, shape.parallel.pipeline
    if stages == 1:
        return 0.0
    tokens = shape.batch.micro * shape.model.sequence
    link = _inside(machine)
    if ranks // stages >= machine.ranks_per_host:
        link = _between(machine, machine.ranks_per_host)
    return link.send(tokens * shape.model.hidden * ACTIVATION_BYTES)
