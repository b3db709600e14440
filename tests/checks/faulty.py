"""A training of two ranks in plain torch; one of them does what the first argument says.

Gradients are averaged by DistributedDataParallel for ``ddp`` among the arguments, by FSDP for
``sharded``, and else by hand: without these two, and without an optimizer, torch imports in half
the time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FAULT, DDP, SHARDED = "".join(sys.argv[1:2]), "ddp" in sys.argv, "sharded" in sys.argv
BAD, AT, SECONDS = 1, 3, 16.0


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if FAULT == "load" and dist.get_rank() == BAD and index == AT:
            print(f"misbehaves at {time.time():.1f}", flush=True)
            time.sleep(1000)
        return torch.ones(4)


def misbehave(rank: int) -> None:
    if FAULT == "pause":
        time.sleep(SECONDS)
    if FAULT == "order":
        print(f"misbehaves at {time.time():.1f}", flush=True)
        values = torch.ones(3)
        if rank == BAD:
            dist.all_reduce(values)
        dist.broadcast(values, 0)
        dist.all_reduce(values)
    if rank != BAD:
        return
    print(f"misbehaves at {time.time():.1f}", flush=True)
    if FAULT == "sleep":
        time.sleep(1000)
    if FAULT == "exit":
        os._exit(0)
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    if SHARDED:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    trained = DistributedDataParallel(model) if DDP else model
    for step, batch in enumerate(torch.utils.data.DataLoader(Samples())):
        if step == AT:
            misbehave(rank)
        model.zero_grad()
        trained(batch).square().mean().backward()
        for parameter in model.parameters():
            if not (DDP or SHARDED):
                dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad
    dist.destroy_process_group()
    print(f"rank {rank} is done")


if __name__ == "__main__":
    try:
        main()
    except Exception:  # gloo's threads may abort an interpreter that ends before them
        traceback.print_exc()
        sys.stderr.flush()
        time.sleep(0.5)  # later than the rank that began it, by more than the watch can tell apart
        os._exit(1)
