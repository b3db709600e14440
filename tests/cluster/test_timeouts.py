"""Every group that slipstream makes waits as long as the script's own group."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

import slipstream
from slipstream import comm
from slipstream.cluster.connect import connect, from_environ
from slipstream.cluster.groups import new_group, timeout_of
from slipstream.ddp import DdpCodec
from tests.harness.ranks import Ranks

SECONDS = 77.0
STRATEGIES: dict[str, dict[str, Any]] = {
    "flat": {},
    "staged": {"gradients": {"codec": {"kind": "powersgd", "start_step": 0}}},
    "direct": {"gradients": {"transport": "direct"}},
    "sharded": {"gradients": {"transport": "sharded"}},
    "hierarchical": {"gradients": {"transport": {"kind": "hierarchical", "between": "flat"}}},
    "auto": {"gradients": {"transport": "auto"}},
}


def again() -> None:
    """The script's own group, with a timeout."""
    dist.destroy_process_group()
    connect(from_environ(), "cpu", timedelta(seconds=SECONDS))


def timeouts() -> list[float]:
    return [timeout_of(group).total_seconds() for group in dist.distributed_c10d._world.pg_map]


def of_a_session(strategy: dict[str, Any]) -> list[float]:
    again()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        session.backward(session.model(torch.ones(2, 4)).mean())
        session.step()
        return timeouts()


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_groups_of_a_session_have_the_timeout_of_the_world(two, name) -> None:
    for found in two.run(of_a_session, STRATEGIES[name]):
        assert len(found) > 2
        assert set(found) == {SECONDS}


def of_a_world_of_its_own() -> set[float]:
    with slipstream.accelerate(model := nn.Linear(4, 4), torch.optim.SGD(model.parameters())):
        return {*timeouts()}


def test_an_exchange_waits_as_long_as_under_ddp(two: Ranks) -> None:
    """For a rank that evaluates, say."""
    wanted = {default_pg_timeout.total_seconds()}
    assert two.run(of_a_world_of_its_own, connect=False) == [wanted] * 2


def of_the_others() -> list[float]:
    """A hook's takes that of its DDP model; an operator's group may have its own."""
    again()
    comm.group()
    comm.group(timeout=timedelta(seconds=5))
    own = dist.new_group(timeout=timedelta(seconds=6))
    hook = DdpCodec(DistributedDataParallel(nn.Linear(4, 4), process_group=own), "int8")
    new_group([0, 1], like=own)
    found = sorted(timeouts())
    hook.close()
    return found


def test_groups_of_operators_and_hooks(two) -> None:
    for found in two.run(of_the_others):
        assert found == [5.0, 6.0, 6.0, 6.0, SECONDS, SECONDS]


def test_groups_are_made_in_one_place() -> None:
    """Elsewhere nobody would think of the timeout."""
    source = Path(slipstream.__file__).parent
    makers = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("new_group", "new_subgroups", "split_group", "init_device_mesh")
        and getattr(node.value, "id", "") in ("dist", "torch")
    }
    assert makers == {"cluster/groups.py"}
