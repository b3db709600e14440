"""The oracle of training that meets rarely: all ranks in one process, in plain torch.

Of slipstream it has the fragments, which have tests of their own, and the codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.gradients.segments import parameters_of
from slipstream.local.fragments import cut
from slipstream.strategy import LocalConfig
from tests.codecs.compressors import Team

Loss = Callable[[nn.Module, int, int], Tensor | None]
"""Of a model, a rank and an update; None: this rank has no batch."""


class Reference:
    """Trains ``ranks`` models from one start; ``models`` and ``outer`` are what came of it."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], Optimizer],
        config: LocalConfig,
        ranks: int,
        sizes: Sequence[int] = (),
    ) -> None:
        self.config, self.ranks = config, ranks
        self.sizes = torch.tensor(sizes or [1] * ranks)  # what each counts for
        self.models = [build() for _ in range(ranks)]
        self.optimizers = [optimizer(model) for model in self.models]
        trained = parameters_of(self.models[0], trainable=True)
        self.fragments = cut(self.models[0], trained, config.fragments)
        self.shapes = [[p.values.shape for p in f.pieces] for f in self.fragments]
        self.take_outer()
        self.momentum: list[Tensor | None] = [None] * len(self.fragments)
        self.weights = torch.zeros(len(self.fragments), ranks, dtype=torch.float64)
        self.flights: dict[int, tuple[int, Tensor, list[Tensor]]] = {}
        dtype = self.outer[0].dtype
        self.teams = [
            config.codec and Team(config.codec, ranks, shapes, dtype, num_flags=1, seed=number)
            for number, shapes in enumerate(self.shapes)
        ]

    def take_outer(self) -> None:
        self.outer = [torch.cat(self.read(0, n)) for n in range(len(self.fragments))]

    def views(self, rank: int, number: int) -> list[Tensor]:
        named = dict(self.models[rank].named_parameters())
        return [p.of(named[p.name].detach()) for p in self.fragments[number].pieces]

    def read(self, rank: int, number: int) -> list[Tensor]:
        return [view.reshape(-1).clone() for view in self.views(rank, number)]

    def write(self, rank: int, number: int, flat: Tensor) -> None:
        views = self.views(rank, number)
        for view, part in zip(views, flat.split([v.numel() for v in views]), strict=True):
            view.copy_(part.view(view.shape))

    def train(self, loss_of: Loss, updates: int) -> None:
        for update in range(1, updates + 1):
            losses = [loss_of(m, r, update) for r, m in enumerate(self.models)]
            for loss in losses:
                if loss is not None:
                    loss.backward()
            if update <= self.config.warm_up:
                for many in zip(*(m.parameters() for m in self.models), strict=True):
                    parts = [p.grad * s for p, s in zip(many, self.sizes, strict=True)]
                    mean = torch.stack(parts).sum(0) / self.sizes.sum()
                    for p in many:
                        p.grad = mean.clone()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if update == self.config.warm_up:
                self.take_outer()
            if update > self.config.warm_up:
                self.weights += self.sizes * torch.tensor([loss is not None for loss in losses])
                self.meet(update - self.config.warm_up, update)

    def meet(self, now: int, update: int) -> None:
        self.merge(now)
        for number in range(len(self.fragments)):
            first = (number + 1) * self.config.steps // self.config.fragments
            if now >= first and (now - first) % self.config.steps == 0:
                self.send(number, now, update)
        self.merge(now)

    def send(self, number: int, now: int, update: int) -> None:
        sent = [torch.cat(self.read(rank, number)) for rank in range(self.ranks)]
        weights = self.weights[number] / self.weights[number].sum().clamp(min=1)
        self.weights[number] = 0
        changes = [(self.outer[number] - x) * float(w) for x, w in zip(sent, weights, strict=True)]
        team = self.teams[number]
        if team:
            (mean, *_) = team.exchange([change.cpu() for change in changes], update)
            mean = mean.to(changes[0].device)
        else:
            mean = torch.stack(changes).sum(0)
        self.flights[number] = now + self.config.delay, mean, sent

    def merge(self, now: int) -> None:
        for number in [n for n, (due, *_) in self.flights.items() if due <= now]:
            _, mean, sent = self.flights.pop(number)
            before = self.momentum[number]
            beta = self.config.momentum
            self.momentum[number] = buffer = mean if before is None else beta * before + mean
            self.outer[number] = self.outer[number] - self.config.lr * (mean + beta * buffer)
            for rank in range(self.ranks):
                towards = self.outer[number] - sent[rank]
                now_there = torch.cat(self.read(rank, number))
                self.write(rank, number, now_there + (1 - self.config.mix) * towards)
                if self.config.inner_state == "reset":
                    for piece in self.fragments[number].pieces:
                        named: Any = dict(self.models[rank].named_parameters())
                        self.optimizers[rank].state.pop(named[piece.name], None)
            if self.config.inner_state == "averaged":
                self.average_state(number)

    def average_state(self, number: int) -> None:
        for piece in self.fragments[number].pieces:
            of = [dict(m.named_parameters())[piece.name] for m in self.models]
            states = [o.state[p] for o, p in zip(self.optimizers, of, strict=True)]
            for key, value in states[0].items():
                if isinstance(value, Tensor) and value.shape == of[0].shape:
                    rows = [piece.of(state[key]) for state in states]
                    parts = [row * s for row, s in zip(rows, self.sizes, strict=True)]
                    mean = torch.stack(parts).sum(0) / self.sizes.sum()
                    for row in rows:
                        row.copy_(mean)

    def parameters(self, rank: int) -> Tensor:
        return flat(self.models[rank].parameters())


def flat(tensors: Sequence[Tensor] | Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])
