"""What ``sharded`` costs, with a part of the parameters updated by every rank, and when it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from slipstream.errors import StrategyError
from slipstream.gradients.layout import Gradient
from slipstream.gradients.shards import cut_first
from slipstream.planner.iteration.contention_fit import read_trace
from slipstream.planner.iteration.model import predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.iteration.tasks import comm_tasks, gather_tasks
from slipstream.planner.iteration.transport_cost import num_replicated
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.candidates import exact
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import MARGIN, rank
from slipstream.strategy import ShardedConfig, Strategy
from slipstream.trace import Trace
from tests.planner.networks import MB, linear_profile
from tests.planner.workloads import random_workload, workload

THIRD = CommPlan((3,), transport="sharded", replicated=1, gather=(2,))


def with_direct(network: NetworkProfile) -> NetworkProfile:
    """An all-reduce by direct sends costs as much as the backend's."""
    world = network.networks["world"]
    direct = world.model_copy(update={"direct_all_reduce": world.all_reduce})
    return network.model_copy(update={"networks": {"world": direct}})


def test_what_every_rank_updates_is_exchanged_whole_and_not_gathered() -> None:
    work, network = workload(count=3), linear_profile()
    shapes = [(task.collective, task.num_bytes) for task in comm_tasks(work, THIRD, network)]
    assert shapes == [("", MB), ("reduce_scatter", 2 * MB)]
    gathers = gather_tasks(work, THIRD, network)
    assert [(task.collective, task.num_bytes) for task in gathers] == [("all_gather", 2 * MB)]
    # gather, forward, backward, both exchanges, and half of the update
    assert predict(work, THIRD, network) == pytest.approx(0.1 + 0.2 + 0.6 + 0.2 + 0.03 / 2)


def test_all_replicated_is_direct() -> None:
    work, network = random_workload(3, 4, 12), with_direct(linear_profile(latency=0.01))
    all_of_it = CommPlan((4, 8, 12), transport="sharded", replicated=12, gather=())
    direct = predict(work, CommPlan((4, 8, 12), transport="direct"), network)
    assert predict(work, all_of_it, network) == pytest.approx(direct)


def test_a_plan_with_replicated_parameters_survives_its_trace() -> None:
    work = random_workload(3, 4, 12)
    transport = {"kind": "sharded", "replicated": 0.4}
    plan = CommPlan.of(Strategy.load({"gradients": {"transport": transport}}), work.gradients)
    assert 0 < plan.replicated < 12
    assert plan.gather_cuts[-1] == 12 - plan.replicated
    assert CommPlan.of_trace(simulate(work, plan, linear_profile())) == plan


def test_without_gathers_of_their_own_they_follow_the_segments() -> None:
    assert CommPlan((2, 5, 6), transport="sharded").gather_cuts == (1, 4, 6)
    assert CommPlan((2, 5, 6), transport="sharded", replicated=3).gather_cuts == (1, 3)
    assert CommPlan((2, 5, 6), transport="sharded", replicated=6).gather_cuts == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transport": "flat", "replicated": 1}, r"replicated is 1; allowed: 0"),
        ({"transport": "sharded", "replicated": 4}, r"replicated is 4; allowed: 0, .* up to 3"),
        ({"transport": "sharded", "replicated": 1, "gather": (3,)}, r"cuts that end with 2"),
    ],
)
def test_more_than_all_cannot_be_replicated_nor_gathered(changes, message) -> None:
    with pytest.raises(StrategyError, match=message):
        CommPlan((3,), **changes)


@pytest.mark.parametrize("part", [0.0, 0.2, 0.33, 0.5, 1.0])
def test_the_planner_replicates_what_a_session_does(part: float) -> None:
    model = nn.Sequential(*(nn.Linear(8 * n, 8 * (n + 1)) for n in range(1, 6)))
    cut = cut_first(list(model.named_parameters()), 1 - part).values()
    ready = [Gradient(n, "", p.nbytes) for n, p in reversed(list(model.named_parameters()))]
    count = num_replicated(ready, ShardedConfig(replicated=part))
    assert {gradient.name for gradient in ready[count:]} == set(cut)


def test_also_where_parameters_are_registered_in_another_order() -> None:
    """A head that is registered first is not replicated, though its gradient is ready first."""
    sizes = {"head": 30, "body": 40, "tail": 30}
    ready = [Gradient(name, "", n, registered=[*sizes].index(name)) for name, n in sizes.items()]
    assert [num_replicated(ready, ShardedConfig(replicated=p)) for p in (0.3, 0.7)] == [1, 2]
    other = [replace(g, num_bytes=10) if g.name == "tail" else g for g in ready]
    assert num_replicated(other, ShardedConfig(replicated=0.3)) == 1  # tail and not head


def recorded(trace: Trace) -> Trace:
    """As a session records it: without all-gathers."""
    events = tuple(e for e in trace.events if e.args.get("collective") != "all_gather")
    return Trace(events, trace.meta)


@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.15])
def test_a_trace_of_sharded_tells_what_others_would_take(seconds: float) -> None:
    work, network = workload(), with_direct(linear_profile(seconds=seconds, latency=0.001))
    trace = recorded(simulate(work, CommPlan((1, 2, 3, 4, 5, 6), transport="sharded"), network, 3))
    read, fitted = read_trace(trace, network)
    assert read.optimizer == pytest.approx(work.optimizer)
    flat = CommPlan((3, 6))
    assert predict(read, flat, fitted) == pytest.approx(predict(work, flat, network), rel=0.05)


def test_it_is_proposed_only_where_the_optimizer_allows_it() -> None:
    work, network = workload(), linear_profile()
    assert all(s.gradients.transport.kind == "flat" for s in exact(work, network, Strategy()))
    shardable = exact(replace(work, shardable=True), network, Strategy())
    kinds = [s.gradients.transport.kind for s in shardable]
    assert kinds.count("sharded") == 2
    unmeasured = network.networks["world"].model_copy(update={"all_gather": None})
    unpriced = network.model_copy(update={"networks": {"world": unmeasured}})
    others = exact(replace(work, shardable=True), unpriced, Strategy())
    assert all(s.gradients.transport.kind == "flat" for s in others)


def test_it_must_be_worth_what_it_asks_of_the_code() -> None:
    """Where the network is free, sharding saves 0.0225 s of the update alone."""
    network = linear_profile(seconds=1e-6)
    for update, first in ((0.03, "flat"), (0.3, "sharded")):
        work = workload(shardable=True, optimizer=update * torch.ones(4).numpy())
        ranked = rank(exact(work, network, Strategy()), work, network)
        assert ranked[0].strategy.gradients.transport.kind == first
        fastest = {}
        for one in ranked:
            fastest.setdefault(one.strategy.gradients.transport.kind, one.seconds)
        assert (fastest["sharded"] * (1 + MARGIN) < fastest["flat"]) == (first == "sharded")
    base = Strategy.load({"gradients": {"transport": "sharded"}})
    work = workload(shardable=True)
    ranked = rank(exact(work, network, base), work, network, base)
    assert ranked[0].strategy.gradients.transport.kind == "sharded"  # asked for already


def test_backward_is_filled_where_forward_is_too_short_for_all_gathers() -> None:
    """Exchanging takes as long as computing: half of it does not fit under forward."""
    work = workload(shardable=True, count=30)
    network = linear_profile(seconds=0.9 / 30)
    ranked = rank(exact(work, network, Strategy()), work, network)
    best = ranked[0].strategy
    assert isinstance(best.gradients.transport, ShardedConfig)
    assert best.gradients.transport.replicated > 0
    assert "replicated)" in label(best)
    whole = next(p for p in ranked if p.strategy.gradients.transport == ShardedConfig())
    assert ranked[0].seconds < 0.95 * whole.seconds
    assert Strategy.from_yaml(best.to_yaml()) == best


def test_memory_counts_the_optimizer_state_that_a_rank_keeps() -> None:
    work, network = workload(shardable=True, optimizer_bytes=12 * MB), linear_profile()
    transports = ("flat", "sharded", {"kind": "sharded", "replicated": 0.5})
    strategies = [Strategy.load({"gradients": {"transport": one}}) for one in transports]
    memory = {
        label(p.strategy).partition(", ")[2]: p.memory_bytes - 6 * (MB + 4)
        for p in rank(strategies, work, network)
    }
    assert memory == {
        "last 1)": 12 * MB,
        "last 1), sharded": 12 * MB // 4 + 6 * MB // 4,
        "last 1), sharded (50% replicated)": 12 * MB * 5 // 8 + 3 * MB // 4,
    }
