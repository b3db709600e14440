"""A model whose blocks save one tensor each, and a store that logs its calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.memory.offload.disk_store import DiskStore
from slipstream.strategy import OffloadConfig

ALL = OffloadConfig(to="disk", min_bytes=0)


class LoggedStore(DiskStore):
    """Logs its calls."""

    def __init__(self, *args):
        self.log = []
        super().__init__(*args)

    def put(self, raw, what):
        self.log.append(("put", what))
        return super().put(raw, what)

    def settle(self, ticket):
        self.log.append(("settle", ticket.what))
        super().settle(ticket)

    def fetch(self, ticket):
        if ticket.source is None and ticket.read is None:
            self.log.append(("fetch", ticket.what))
        super().fetch(ticket)

    def take(self, ticket):
        self.log.append(("take", ticket.what))
        return super().take(ticket)


class Square(nn.Module):
    """Saves one tensor: what it gets."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.Identity()

    def forward(self, x):
        return self.inner(x) * x * self.scale.detach()


def squares(blocks: int = 5) -> nn.Sequential:
    return nn.Sequential(*(Square() for _ in range(blocks)))


def start(size: int = 64) -> Tensor:
    return torch.linspace(0.9, 1.1, size, requires_grad=True)
