"""The models of the matrix: a body that a technique works on, places for habits, and a head.

net = Net(mlp())               # one output row of four numbers a sample
net.plugs.append(Scale())      # a habit's own parameters, between body and head
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8
"""Features between body and head."""


class Net(nn.Module):
    """``head(plugs(body(x)))``."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.plugs, self.head = body, nn.Sequential(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.plugs(self.body(x)))


# Bodies: (batch, ...) -> (batch, WIDTH). Each has a setting that its forward reads.


class Block(nn.Module):
    residual_scale = 1.0
    """A default of the class, as many models have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.residual_scale * self.down(torch.tanh(self.up(x)))


class Mlp(nn.Module):
    shape = (5,)

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def change_setting(self) -> None:
        self.blocks[0].residual_scale = 0.25


class ConvBlock(nn.Module):
    """All chains of operations: of a batch norm, a sum, both, and a depthwise convolution."""

    residual_scale = 1.0

    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm, self.relu, self.mix = nn.BatchNorm2d(WIDTH), nn.ReLU(), mix
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.relu(self.norm(self.conv(x))))
        if self.residual_scale != 1.0:
            y = self.residual_scale * y
        return self.depthwise(self.relu(torch.relu(y + x)))


class Convolutions(nn.Module):
    shape = (3, 5, 5)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 1)
        mixes = nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)
        self.blocks = nn.ModuleList(map(ConvBlock, mixes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))

    def change_setting(self) -> None:
        self.blocks[0].residual_scale = 0.25


class Swin(nn.Module):
    """A Swin of transformers: one layer plain, one shifted."""

    shape = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        from transformers import SwinConfig, SwinModel

        sizes = {"image_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": WIDTH}
        config = SwinConfig(**sizes, depths=[2], num_heads=[2], drop_path_rate=0.0)
        config._attn_implementation = "eager"  # torch's fused attention has no torch.func
        self.swin = SwinModel(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.swin(x).last_hidden_state.mean(1)

    def change_setting(self) -> None:
        self.swin.encoder.layers[0].blocks[0].attention.scaling *= 0.5


class Kernel(nn.Module):
    """A body around an operation of ``slipstream.kernels``, or around its plain reference."""

    shape: tuple[int, ...] = (5,)
    scale = 1.0

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.operation = operation
        self.stem = nn.Linear(self.shape[-1], WIDTH)

    def change_setting(self) -> None:
        self.scale = 0.25


class AddActBody(Kernel):
    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.scale * self.operation(h, h.roll(1, 1), "gelu")


class BatchNormActBody(Kernel):
    def __init__(self, operation: Any) -> None:
        super().__init__(operation)
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if not self.training:  # statistics of a batch are for training
            return self.scale * torch.tanh(h)
        return self.scale * self.operation(h, self.weight, self.bias, "tanh", residual=h).values


class CompressByIndexBody(Kernel):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.stem(x).unsqueeze(1) * torch.arange(1, 4, device=x.device).view(1, 3, 1)
        index = torch.arange(len(x), device=x.device) % 3
        return self.scale * self.operation(rows.to(x.dtype), index)


class ReluDepthwiseBody(Kernel):
    def __init__(self, operation: Any) -> None:
        super().__init__(operation)
        self.weight = nn.Parameter(0.5 * torch.randn(WIDTH, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).unsqueeze(2) * torch.ones(4, device=x.device, dtype=x.dtype)
        sizes = {"stride": [1], "padding": [1], "dilation": [1]}
        return self.scale * self.operation(h, self.weight, None, **sizes).mean(2)


class WindowAttentionBody(Kernel):
    shape = (4, 5)

    def __init__(self, operation: Any) -> None:
        super().__init__(operation)
        self.project, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(self.stem(x))
        query, key, value = (t.view(len(x), 4, 2, -1).transpose(1, 2) for t in h.chunk(3, -1))
        done = self.operation(query, key, value, self.bias.to(query.dtype))
        return self.scale * done.transpose(1, 2).reshape(len(x), 4, WIDTH).mean(1)


class WindowPartitionBody(Kernel):
    """Cuts a map into shifted windows, works there and puts it together again."""

    shape = (6, 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        partition, merge = self.operation
        windows = partition(self.stem(x), 4, 2)
        maps = merge(torch.tanh(windows).cumsum(1), 4, (6, 6), 2)
        return self.scale * maps.mean((1, 2))


class SimOtaBody(Kernel):
    """Anchors that SimOTA assigns to an object count in the mean."""

    shape = (4, 5)

    def forward(self, x: Tensor) -> Tensor:
        from slipstream.kernels import Level, Objects

        h = torch.tanh(self.stem(x))
        images = len(x)
        boxes = (h[..., :4].float().detach() * 4 + 8).abs()
        objects = Objects(
            torch.tensor([[[8.0, 8.0, 8.0, 8.0]]]).repeat(images, 1, 1),
            torch.zeros(images, 1, dtype=torch.int64),
            torch.ones(images, 1, dtype=torch.bool),
        )
        logits = h.float().detach()
        chosen = self.operation(
            boxes, logits[..., 4:6], logits[..., 6], objects, [Level(2, 2, 8)]
        ).foreground
        return self.scale * (h * chosen.unsqueeze(2)).mean(1)


# Plugs of habits: (batch, WIDTH) -> (batch, WIDTH).


class Plug(nn.Module):
    """``h + factor * layer(h)``; off: h."""

    factor, on = 1.0, True

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return h + self.factor * self.layer(h) if self.on else h


class Causal(nn.Module):
    """Each feature gets the mean of those up to it, by a mask of infinite values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((WIDTH, WIDTH), -torch.inf).triu(1))

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.mask.softmax(1).t()


class Tied(nn.Module):
    """There and back with the weight of the head."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.weight = net.head.weight

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(F.linear(h, self.weight)) @ self.weight


class Single(nn.Module):
    """One parameter of a given shape and kind, that has its part in the result."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, h: Tensor) -> Tensor:
        value = self.value
        if value.is_complex():
            return h + torch.view_as_real(torch.exp(1j * h.to(value.dtype)) * value).sum(-1).to(h)
        if value.ndim == 2 and value.numel():
            return h + torch.tanh(h.to(value.dtype) @ value).to(h.dtype)
        return h + value.sum().to(h.dtype) * h.tanh()
