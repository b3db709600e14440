"""Ranks on emulated hosts: found by what the kernel separates, and the bytes on their links."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.testbed import Testbed, unavailable
from tests.harness.scripts import said_on_hosts

_reason = unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))

HOST = """
import json, os, sys, torch, torch.distributed as dist
from slipstream.codecs import HostsCompressor
from slipstream.strategy import GradientsConfig
from slipstream.transport.hosts import find_hosts
from slipstream.transport.requests import AllReduce
from slipstream.transport.transport import make_transport, run

def sent():
    # The counters of this network namespace, which are those of the host.
    [line] = [x for x in open("/proc/self/net/dev") if x.strip().startswith("eth0:")]
    return int(line.split()[9])

def measured(codecs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = find_hosts(dist.group.WORLD, 1)
    found.close()
    numel, log = 2**20, {"nodes": found.nodes}
    for name in ("direct", "hierarchical", {"kind": "hierarchical", "between": "flat"}):
        if name not in ("direct", "hierarchical") and len({len(n) for n in found.nodes}) > 1:
            continue
        transport = make_transport(GradientsConfig(transport=name).transport, dist.group.WORLD)
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
        for codec in codecs if name == "hierarchical" else ():
            config, weights = GradientsConfig(codec=codec).codec, [torch.zeros(512, 1024)] * 2
            compressor = HostsCompressor(config, weights, transport.rails)
            values = torch.randn(compressor.num_values)
            dist.barrier()
            before = sent()
            dist.barrier()
            run(compressor.exchange(values, torch.zeros(1, dtype=torch.uint8), 0), transport)
            dist.barrier()
            log[codec["kind"]] = sent() - before
            dist.barrier()
        transport.close()
    dist.barrier()
    dist.destroy_process_group()
    return log

# A rank is a fork: torch has been imported, and no thread has been started.
codecs, worlds = map(json.loads, sys.argv[1:])
for port, (world, ranks) in enumerate(worlds, start=29500):
    children = []
    for rank in ranks:
        if child := os.fork():
            children.append(child)
            continue
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=str(port))
        # In one write, also where PYTHONUNBUFFERED has print() write text and newline apart.
        os.write(1, (json.dumps([world, rank, measured(codecs)]) + "\\n").encode())
        os._exit(0)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


CODED = [
    ({"kind": "half"}, lambda hosts: 2 * 2 * 2**20 * (hosts - 1) / hosts),
    ({"kind": "int8"}, lambda hosts: 2 * (1 + 4 / 256) * 2**20 * (hosts - 1) / hosts),
    (
        {"kind": "onebit", "start_step": 0},
        lambda hosts: 2 * (1 / 8 + 4 / 1024) * 2**20 * (hosts - 1) / hosts,
    ),
    (
        {"kind": "dgc", "density": 0.1, "warmup_steps": 0},
        lambda hosts: (4 + 4) * 0.1 * 2**20 * (hosts - 1),
    ),
    (
        {"kind": "powersgd", "rank": 32, "start_step": 0},
        lambda hosts: 2 * 4 * 32 * 2 * (512 + 1024) * (hosts - 1) / hosts,
    ),
]
"""Codecs, and the bytes that a host sends of two gradients of 512 x 1024."""


LAYOUTS = {
    "2 x 2, permuted": ([0, 1, 0, 1], [[0, 2], [1, 3]]),
    "1 + 2 + 2": ([0, 1, 1, 2, 2], [[0], [1, 2], [3, 4]]),
}
"""The host of each rank, and the ranks of each host; sizes of the worlds differ."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Any]]:
    """What each rank of each layout says, by the size of its world and its number."""
    codecs = json.dumps([config for config, _ in CODED])
    with Testbed(nodes=3, rate="1gbit") as bed:
        words = []
        for host in range(len(bed.nodes)):
            worlds = [
                (len(where), [rank for rank, own in enumerate(where) if own == host])
                for where, _ in LAYOUTS.values()
            ]
            words.append([codecs, json.dumps(worlds)])
        said = said_on_hosts(bed, HOST, tmp_path_factory.mktemp("hosts"), *words)
    lines = [json.loads(line) for text in said for line in text.splitlines()]
    return {(world, rank): log for world, rank, log in lines}


@pytest.mark.parametrize(("where", "nodes"), LAYOUTS.values(), ids=LAYOUTS)
def test_hosts_are_found_and_send_what_the_formula_says(
    where: list[int], nodes: list[list[int]], logs: dict[tuple[int, int], dict[str, Any]]
) -> None:
    hosts, world = len(nodes), len(where)
    for rank, host in enumerate(where):
        log = logs[world, rank]
        assert log["nodes"] == nodes
        here = where.count(host)
        # direct: each rank sends to all on other hosts its pieces, and the sum of its share.
        flat = 2 * here * (world - here) / world
        formulas = {config["kind"]: formula(hosts) for config, formula in CODED}
        for name, share in log.items():
            if name != "nodes":
                dense = flat if name == "direct" else 2 * (hosts - 1) / hosts
                expected = formulas.get(name, dense)
                assert expected <= share <= 1.15 * expected, (name, share, expected)
