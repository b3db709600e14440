"""The demo's task: ResNet-18 on handwritten digits that come with the package.

Never downloads, and never touches torch's global random state but to build the model.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

SEED = 0
PIXELS, BATCH = 64, 16  # an exchange and its compute then take about as long at 1 Gbit/s
WIDTH = 64
"""Channels of the first layers."""

DemoBatch = tuple[Tensor, Tensor]
"""Images of shape (count, 3, PIXELS, PIXELS) in float32, and their labels in int64."""


class ResNet18(nn.Sequential):
    """ResNet-18 for ten classes: 62 gradients, 11.2 M parameters; equal weights at every call.

    Reference: He et al., Deep Residual Learning for Image Recognition, https://arxiv.org/abs/1512.03385
    """

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        layers: list[nn.Module] = [*_convolution(3, WIDTH, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = WIDTH
        for wider, stride in zip((1, 2, 4, 8), (1, 2, 2, 2), strict=True):
            width = wider * WIDTH
            layers += [_Block(channels, width, stride), _Block(width, width, 1)]
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class _Block(nn.Module):
    """``relu(f(x) + x)`` with two convolutions in ``f``; a change of shape gives ``x`` one, too."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        first, second = _convolution(channels, width, 3, stride), _convolution(width, width, 3, 1)
        self.residual = nn.Sequential(*first, nn.ReLU(), *second)
        same = channels == width and stride == 1
        self.shortcut = nn.Sequential(*([] if same else _convolution(channels, width, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.residual(x) + self.shortcut(x))


def _convolution(channels: int, width: int, kernel: int, stride: int) -> list[nn.Module]:
    layer = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return [layer, nn.BatchNorm2d(width)]


def digits() -> tuple[DemoBatch, DemoBatch]:
    """Handwritten digits to train on (1438) and held out (359), upscaled from 8 x 8 grey pixels.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI,
    https://doi.org/10.24432/C50P49 (CC BY 4.0), the test set as in scikit-learn's load_digits
    """
    file = Path(__file__).with_name("digits.csv.gz")  # rows of 64 pixels, 0 to 16, and the label
    rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    grey, labels = rows[:, :64].view(-1, 1, 8, 8), rows[:, 64].long()
    grey = (grey - grey.mean()) / grey.std()
    images = functional.interpolate(grey, size=(PIXELS, PIXELS), mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    held_out, train = order.tensor_split([len(order) // 5])
    images = images.expand(-1, 3, -1, -1)
    return (images[train], labels[train]), (images[held_out], labels[held_out])


def batches(dataset: DemoBatch, steps: int, rank: int, world_size: int) -> list[DemoBatch]:
    """The batches of one rank: each pass over the data is shuffled anew and dealt to all ranks."""
    images, labels = dataset
    generator = torch.Generator().manual_seed(SEED)
    samples = steps * world_size * BATCH
    passes = math.ceil(samples / len(images))
    order = torch.cat([torch.randperm(len(images), generator=generator) for _ in range(passes)])
    mine = order[:samples].view(steps, world_size, BATCH)[:, rank]
    return [(images[chosen].contiguous(), labels[chosen]) for chosen in mine]


def cross_entropy(model: nn.Module, batch: DemoBatch) -> Tensor:
    """The mean cross entropy of a batch."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


@torch.no_grad()
def accuracy(model: nn.Module, dataset: DemoBatch) -> float:
    """Share of the images that the model recognises; each rank looks at its part of them."""
    model.eval()
    images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in dataset)
    right = torch.zeros(1)
    for some, targets in zip(images.split(64), labels.split(64), strict=True):
        right += (model(some).argmax(dim=1) == targets).sum()
    dist.all_reduce(right)
    return right.item() / len(dataset[0])
