"""A pipeline of two operators: each stage receives, computes and sends; backward runs in reverse.

python examples/pipeline.py
slipstream launch --nproc 2 examples/pipeline.py --steps 50

Each rank has some of the layers; all read the same batch in micro-batches, and run all forwards,
then all backwards (GPipe). The training equals that of one process with the whole model.
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
    parser.add_argument("--batch", type=int, default=32, help="images of one step")
    parser.add_argument("--micro-batches", type=int, default=4, help="equal parts of a batch")
    parser.add_argument("--log-every", type=int, default=20, help="steps between two lines")
    return parser.parse_args()


def main() -> None:
    args, cluster = arguments(), connect(from_environ(), "cpu")
    rank, size = cluster.rank, cluster.world_size
    torch.manual_seed(0)
    stage = stage_of(layers(), rank, size)
    optimizer = torch.optim.AdamW(stage.parameters(), args.lr)
    train, _ = data.digits(image_size=8)
    meter = Meter(args.steps, args.batch, args.log_every, rank)

    with meter:
        for images, labels in data.batches(train, args.batch, args.steps):
            loss = train_step(stage, images, labels, args.micro_batches, rank, size)
            optimizer.step()
            optimizer.zero_grad()
            meter.update(loss)

    if rank == 0:
        print(f"final loss {meter.mean_loss():.3f}")
    cluster.close()


def layers() -> nn.Sequential:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 128), nn.ReLU(), *hidden, nn.Linear(128, 10))


def stage_of(model: nn.Sequential, rank: int, size: int) -> nn.Module:
    return model[len(model) * rank // size : len(model) * (rank + 1) // size]


def train_step(stage: nn.Module, x: Tensor, y: Tensor, count: int, rank: int, size: int) -> Tensor:
    """Forward and backward of one batch; returns its loss on every rank."""
    losses, graphs = [], []
    for images, labels in zip(x.chunk(count), y.chunk(count), strict=True):
        with comm.graph() as graph:
            hidden = stage(images if rank == 0 else comm.recv(rank - 1))
            if rank == size - 1:
                losses.append(functional.cross_entropy(hidden, labels) / count)
            else:
                comm.send(hidden, to=rank + 1)
        graphs.append(graph)
    for number, graph in enumerate(graphs):
        comm.backward(losses[number] if losses else None, graph)
    return comm.all_reduce_sum(torch.tensor(sum((loss.item() for loss in losses), 0.0)))


if __name__ == "__main__":
    main()
