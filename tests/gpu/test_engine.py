"""The engine on CUDA tensors: two ranks share one GPU through gloo, NCCL takes one rank a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import slipstream
from tests.harness.ranks import Ranks

pytestmark = pytest.mark.gpu
STEPS = 4


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4)).cuda()


def _batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 64, generator=generator).cuda()


def _train_both(split: dict[str, object], folder: str) -> list[bool]:
    """Whether each parameter of slipstream's model is DDP's, bit for bit."""
    torch.cuda.set_device(0)
    plain, ours = _model(), _model()
    ddp = DistributedDataParallel(plain)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    strategy = {"gradients": {"split": split}, "trace": {"steps": 1, "folder": folder}}
    with slipstream.accelerate(ours, optimizer, strategy=strategy) as session:
        for step in range(STEPS):
            ddp(_batch(step)).square().mean().backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            session.backward(session.model(_batch(step)).square().mean())
            session.step()
    return [torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True)]


@pytest.mark.parametrize("split", [{"kind": "per_layer"}, {"kind": "single"}])
def test_two_ranks_on_one_gpu_equal_ddp(split, tmp_path):
    with Ranks(2) as ranks:
        for same in ranks.run(_train_both, split, str(tmp_path)):
            assert all(same)
