"""Ranks on emulated hosts: found by what the kernel separates, and the bytes on their links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.testbed import Testbed, unavailable

_reason = unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))
ROOT = Path(__file__).parents[2]

RANK = """
import json, os, sys, torch, torch.distributed as dist
from slipstream.strategy import Gradients
from slipstream.transport.hosts import find_hosts
from slipstream.transport.requests import AllReduce
from slipstream.transport.transport import make_transport

def sent():
    # The counters of this network namespace, which are those of the host.
    [line] = [x for x in open("/proc/self/net/dev") if x.strip().startswith("eth0:")]
    return int(line.split()[9])

torch.set_num_threads(1)
dist.init_process_group("gloo")
found = find_hosts(dist.group.WORLD, 1)
found.close()
numel, log = 2**20, {"nodes": found.nodes}
for name in ("direct", "hierarchical", {"kind": "hierarchical", "between": "flat"}):
    if name not in ("direct", "hierarchical") and len({len(n) for n in found.nodes}) > 1:
        continue
    transport = make_transport(Gradients(transport=name).transport, dist.group.WORLD)
    dist.barrier()
    before = sent()
    dist.barrier()
    tensor = torch.arange(numel).float() + dist.get_rank()
    for work in transport.start(AllReduce(tensor)):
        work.wait()
    world = dist.get_world_size()
    assert torch.equal(tensor, world * torch.arange(numel) + world * (world - 1) / 2)
    dist.barrier()
    log[str(name)] = (sent() - before) / (4 * numel)
    dist.barrier()
    transport.close()
print(json.dumps(log), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def ran(where: Sequence[int]) -> list[dict[str, float]]:
    """What each rank says, where rank r runs on the host ``where[r]``."""
    with Testbed(nodes=len(set(where)), rate="1gbit") as bed:
        processes = [
            bed.popen(
                bed.nodes[host],
                [sys.executable, "-c", RANK],
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(where)),
                    "MASTER_ADDR": bed.nodes[where[0]].address,
                    "MASTER_PORT": "29500",
                    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]),
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(where)
        ]
        said = [process.communicate(timeout=100)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(where)
    return [json.loads(text) for text in said]


@pytest.mark.parametrize(
    ("where", "nodes"),
    [
        ([0, 1, 0, 1], [[0, 2], [1, 3]]),
        ([0, 1, 1, 2, 2], [[0], [1, 2], [3, 4]]),
    ],
    ids=["2 x 2, permuted", "1 + 2 + 2"],
)
def test_hosts_are_found_and_send_what_the_formula_says(
    where: list[int], nodes: list[list[int]]
) -> None:
    by_rank = ran(where)
    hosts, world = len(nodes), len(where)
    for log, host in zip(by_rank, where, strict=True):
        assert log["nodes"] == nodes
        here = where.count(host)
        # direct: each rank sends to all on other hosts its pieces, and the sum of its share.
        flat = 2 * here * (world - here) / world
        for name, share in log.items():
            if name != "nodes":
                expected = flat if name == "direct" else 2 * (hosts - 1) / hosts
                assert expected <= share <= 1.15 * expected, (name, share, expected)
