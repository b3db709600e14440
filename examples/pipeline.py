"""A pipeline of two operators: each stage receives, computes and sends; backward finds its way.

python examples/pipeline.py
slipstream launch --nproc 2 examples/pipeline.py --steps 50

Each rank keeps some of the layers, and all read the same batch, in micro-batches. All forwards come
first, then all backwards (GPipe). The training equals one of the whole model on one process;
slipstream.parallel.Pipeline does the same from outside a model, and by better schedules.
"""

import argparse

import data
import torch
from meter import Meter
from torch import Tensor, nn
from torch.nn import functional

from slipstream import comm
from slipstream.cluster.connect import connect, from_environ


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=32, help="images in one step")
    parser.add_argument("--micro-batches", type=int, default=4, help="parts of a batch")
    parser.add_argument("--log-every", type=int, default=20, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args, cluster = arguments(), connect(from_environ(), "cpu")
    rank, world_size = cluster.rank, cluster.world_size
    torch.manual_seed(args.seed)
    stage = stage_of(layers(), rank, world_size)
    optimizer = torch.optim.AdamW(stage.parameters(), args.lr)
    train, _ = data.digits(image_size=8)
    loader = data.batches(train, args.batch, args.steps, args.seed)
    meter = Meter(args.steps, args.batch, args.log_every, rank)

    with meter:
        for images, labels in loader:
            loss = train_step(stage, images, labels, args.micro_batches, rank, world_size)
            optimizer.step()
            optimizer.zero_grad()
            meter.update(loss)

    if rank == 0:
        print(f"final loss {meter.mean_loss():.3f}")
    cluster.close()


def layers() -> nn.Sequential:
    """The whole model, equal on every rank."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 128), nn.ReLU(), *hidden, nn.Linear(128, 10))


def stage_of(model: nn.Sequential, rank: int, world_size: int) -> nn.Sequential:
    """The rank-th of world_size parts of the layers."""
    begin, end = (len(model) * r // world_size for r in (rank, rank + 1))
    return nn.Sequential(*list(model)[begin:end])


def train_step(
    stage: nn.Module, images: Tensor, labels: Tensor, count: int, rank: int, world_size: int
) -> Tensor:
    """Forward and backward of one batch in `count` parts; its mean loss, on every rank."""
    forwards, total = [], torch.zeros(())
    for x, y in zip(images.chunk(count), labels.chunk(count), strict=True):
        with comm.graph() as graph:
            hidden = stage(x if rank == 0 else comm.recv(rank - 1))
            loss = functional.cross_entropy(hidden, y) / count if rank == world_size - 1 else None
            if loss is None:
                comm.send(hidden, to=rank + 1)
            else:
                total += loss.detach()
        forwards.append((loss, graph))
    for loss, graph in forwards:
        comm.backward(loss, graph)
    return comm.all_reduce_sum(total)


if __name__ == "__main__":
    main()
