"""One of several transports at a time: exchanged between two updates, all on one group."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from slipstream.strategy import DirectConfig, FlatConfig
from slipstream.transport.requests import AllGather, AllReduce
from slipstream.transport.switch import Switch
from tests.harness.ranks import Ranks


def exchanged(switch: Switch) -> list[float]:
    """The sums of three tensors of this rank, announced as before a backward."""
    tensors = [torch.full((size,), float(dist.get_rank() + 1)) for size in (5, 100_003, 1)]
    requests = [AllReduce(tensor) for tensor in tensors]
    switch.prepare(requests)
    works = [work for request in requests for work in switch.start(request)]
    gathered = torch.zeros(3, 1)
    works += switch.start(AllGather(tensors[-1].clone(), gathered))
    for work in works:
        work.wait()
    return [float(tensor.unique()) for tensor in tensors]


def taking_turns() -> list[list[str]]:
    switch = Switch(FlatConfig(), dist.group.WORLD)
    threads = []
    for config in (
        FlatConfig(),
        DirectConfig(),
        FlatConfig(),
        DirectConfig(),
        DirectConfig(),
        FlatConfig(),
    ):
        switch.use(config)
        assert switch.config == config
        assert exchanged(switch) == [6.0, 6.0, 6.0]
    for keep in (switch.keep, lambda _: switch.close()):
        threads.append([t.name for t in threading.enumerate() if t.name == "slipstream-sum"])
        keep(FlatConfig())
        assert exchanged(switch) == [6.0, 6.0, 6.0]
    return threads


def test_transports_take_turns_on_one_group_and_free_their_threads(three: Ranks) -> None:
    assert three.run(taking_turns) == [[["slipstream-sum"], []]] * 3
