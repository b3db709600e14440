"""FSDP2 on emulated hosts: the bytes of its reduce-scatters by the counters of the interfaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.testbed import Testbed, unavailable
from tests.harness.scripts import said_on_hosts

_reason = unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))

HOST = """
import json, os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from slipstream.adapters.fsdp2 import accelerate_fsdp

def sent():
    # The counters of this network namespace, which are those of the host.
    [line] = [x for x in open("/proc/self/net/dev") if x.strip().startswith("eth0:")]
    return int(line.split()[9])

def measured(strategy, sync):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1023), nn.ReLU(), nn.Linear(1023, 512))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exchange = None if strategy is None else accelerate_fsdp(model, optimizer, strategy)
    model.set_requires_gradient_sync(sync)
    dist.barrier()
    before = sent()
    dist.barrier()
    loss = model(torch.ones(2, 512)).square().mean()
    loss.backward()
    dist.barrier()
    spent = sent() - before
    dist.barrier()
    if exchange is not None:
        exchange.close()
    return spent

torch.set_num_threads(1)
dist.init_process_group("gloo")
gathers = measured(None, False)
coded = {"gradients": {"codec": "int8"}}
log = [measured(strategy, True) - gathers for strategy in (None, {}, coded)] + [gathers]
# In one write, also where PYTHONUNBUFFERED has print() write text and newline apart.
os.write(1, (json.dumps(log) + "\\n").encode())
dist.barrier()
dist.destroy_process_group()
"""


def test_the_reduce_scatter_sends_half_of_torchs_own(tmp_path: Path) -> None:
    with Testbed(nodes=2, rate="1gbit") as bed:
        said = said_on_hosts(bed, HOST, tmp_path, [], [])
    gradients = 4 * (2 * 512 * 1024)
    for text in said:
        torchs, dense, int8, gathers = json.loads(text)
        assert 0.98 <= torchs / gradients <= 1.15  # 2 (p - 1) / p
        assert 0.5 * 0.95 <= dense / torchs <= 0.6
        assert 0.125 * 0.95 <= int8 / torchs <= 0.16
        assert 0.95 <= gathers / gradients <= 1.15  # twice, each (p - 1) / p
