"""A parameter server of two operators: weights are broadcast, gradients are summed at rank 0.

python examples/parameter_server.py
slipstream launch --nproc 2 examples/parameter_server.py --steps 50

Only rank 0 has an optimizer. In each step it broadcasts its weights; the backward of the broadcast
sums the gradients on rank 0. The training equals a data-parallel one of images.py.
"""

import argparse

import data
import models
import torch
from meter import Meter
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from slipstream import comm
from slipstream.cluster.connect import connect, from_environ


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=32, help="images a rank takes in one step")
    parser.add_argument("--log-every", type=int, default=20, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args, cluster = arguments(), connect(from_environ(), "cpu")
    rank, world_size = cluster.rank, cluster.world_size
    torch.manual_seed(args.seed)
    model = models.resnet_small(num_labels=10)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr) if rank == 0 else None
    train, _ = data.digits(image_size=32)
    loader = data.batches(train, args.batch, args.steps, args.seed, rank, world_size)
    meter = Meter(args.steps, args.batch * world_size, args.log_every, rank)

    with meter:
        for images, labels in loader:
            weights = weights_of_server(model, rank)
            logits = functional_call(model, weights, images).logits
            loss = functional.cross_entropy(logits, labels)
            comm.backward(loss / world_size)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            total = comm.reduce_sum(loss.detach())
            if total is not None:
                meter.update(total / world_size)

    if rank == 0:
        print(f"final loss {meter.mean_loss():.3f}")
    cluster.close()


def weights_of_server(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Rank 0's parameters by name, in one broadcast."""
    vector = parameters_to_vector(model.parameters()) if rank == 0 else None
    parts = comm.broadcast(vector).split([p.numel() for p in model.parameters()])
    named = zip(model.named_parameters(), parts, strict=True)
    return {name: part.view_as(parameter) for (name, parameter), part in named}


if __name__ == "__main__":
    main()
