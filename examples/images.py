"""Image classification: a ResNet or VGG-16 learns handwritten digits, upscaled to --image-size.

python examples/images.py
slipstream launch --nproc 2 examples/images.py --model resnet50 --steps 50
torchrun --nproc-per-node 8 examples/images.py --strategy examples/strategies/resnet-mesh.yaml
"""

import argparse
from typing import Any

import data
import models
import torch
from meter import Meter
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import slipstream
from slipstream.cluster.connect import from_environ

MODELS = {  # how to build it, and a learning rate that suits it
    "resnet-small": (models.resnet_small, 1e-3),
    "resnet50": (models.resnet50, 1e-3),
    "vgg16": (models.vgg16, 1e-4),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet-small")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--strategy", help="a strategy file, or the name of a preset")
    parser.add_argument("--image-size", type=int, default=32, help="pixels, at least 32")
    parser.add_argument("--batch", type=int, default=32, help="images a rank takes in one step")
    parser.add_argument("--log-every", type=int, default=20, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def of_logits(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits, labels)


def main() -> None:
    args, here = arguments(), from_environ()
    rank, count = slipstream.data_share(args.strategy)  # ranks that share a model share data
    device = torch.device(f"cuda:{here.local_rank}" if torch.cuda.is_available() else "cpu")
    build, lr = MODELS[args.model]
    torch.manual_seed(args.seed)
    model = build(num_labels=10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    train, held_out = data.digits(args.image_size)
    loader = data.batches(train, args.batch, args.steps, args.seed, rank, count)
    meter = Meter(args.steps, args.batch * count, args.log_every, here.rank)

    with slipstream.accelerate(model, optimizer, loader, args.strategy) as session, meter:
        for images, labels in session.loader:
            batch, target = (images.to(device),), labels.to(device)
            loss = session.forward_backward(of_logits, batch, target=target)
            session.step()
            meter.update(loss)

    if here.rank == 0:
        right = accuracy(model, held_out, device)
        print(f"final loss {meter.mean_loss():.3f}, held-out accuracy {right:.1%}")


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset, device: torch.device) -> float:
    model.eval()
    pairs = DataLoader(dataset, batch_size=64)
    right = [model(x.to(device)).logits.argmax(dim=1).cpu() == labels for x, labels in pairs]
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    main()
