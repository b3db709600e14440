"""The trainings that the demo compares: copies of one model, each with its own way to exchange."""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR

from slipstream.cli.demo.task import DemoBatch, ResNet18, accuracy, cross_entropy
from slipstream.session.accelerate import accelerate
from slipstream.strategy import Strategy

LEARNING_RATE, MOMENTUM = 0.02, 0.9
LAST_LOSSES = 10


class DemoTraining:
    """One copy of the model, trained without any exchange.

    All copies begin with equal weights. The learning rate falls to 0 over ``updates``, so that the
    final losses are steady. ``losses`` are this rank's, ``seconds`` those of the slowest rank.
    """

    def __init__(self, updates: int) -> None:
        self.model = ResNet18()
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, MOMENTUM)
        self._schedule = LinearLR(self.optimizer, 1.0, 0.0, total_iters=updates)
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []

    @property
    def exchanges(self) -> int:
        """Collectives for the gradients of an iteration."""
        return 0

    def optimizer_state(self) -> dict[str, Any]:
        """State of the whole optimizer."""
        return self.optimizer.state_dict()

    def continue_from(self, other: DemoTraining) -> None:
        """Take over weights, momentum and learning rate; all ranks call it."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(deepcopy(other.optimizer_state()))
        self._schedule.load_state_dict(other._schedule.state_dict())
        self.losses = [*other.losses]

    def train(self, batch: DemoBatch) -> None:
        """One iteration."""
        self.losses.append(self._iterate(batch))
        self._schedule.step()

    def train_timed(self, batch: DemoBatch) -> None:
        """An iteration that all ranks start together; it takes as long as on the slowest."""
        dist.barrier()
        start = time.perf_counter()
        self.train(batch)
        spent = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        self.seconds.append(spent.item())

    def accuracy(self, held_out: DemoBatch) -> float:
        """Measure the model on other data."""
        return accuracy(self.model, held_out)

    def close(self) -> None:
        """Undo what was installed."""

    def share_buffers(self) -> None:
        """Give all ranks the running statistics of rank 0; a collective."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def final_loss(self) -> float:
        """Mean over all ranks and the last iterations; a collective."""
        mean = torch.stack(self.losses[-LAST_LOSSES:]).mean() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    def _iterate(self, batch: DemoBatch) -> Tensor:
        return self._torch_loop(self.model, batch)

    def _torch_loop(self, network: nn.Module, batch: DemoBatch) -> Tensor:
        """The loop as everyone writes it."""
        loss = cross_entropy(network, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Ddp(DemoTraining):
    """The same training under DistributedDataParallel, set as its experts would."""

    def __init__(self, updates: int, megabytes: int) -> None:
        super().__init__(updates)
        self.megabytes = megabytes
        self._ddp = DistributedDataParallel(
            self.model,
            bucket_cap_mb=megabytes,
            gradient_as_bucket_view=True,
            static_graph=True,
        )

    @property
    def exchanges(self) -> int:
        """All-reduces of an iteration; DDP tells them after some."""
        return len(str(self._ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(","))

    def _iterate(self, batch: DemoBatch) -> Tensor:
        return self._torch_loop(self._ddp, batch)


class Slipstream(DemoTraining):
    """The same training with slipstream."""

    def __init__(self, updates: int, strategy: Strategy) -> None:
        super().__init__(updates)
        self.session = accelerate(self.model, self.optimizer, strategy=strategy)

    @property
    def exchanges(self) -> int:
        """Segments of an iteration, counted by dtype."""
        return sum(segment.num_collectives for segment in self.session.segments)

    def optimizer_state(self) -> dict[str, Any]:
        """Gathered where each rank has a shard of it."""
        state: dict[str, Any] = self.session.checkpoint("optimizer")["optimizer"]
        return state

    def close(self) -> None:
        self.session.close()

    def _iterate(self, batch: DemoBatch) -> Tensor:
        loss = cross_entropy(self.model, batch)
        self.session.backward(loss)
        self.session.step()
        return loss.detach()


class Local(Slipstream):
    """Slipstream on ranks that train apart, and meet."""

    @property
    def exchanges(self) -> int:
        """The meeting of a fragment."""
        return 1

    def accuracy(self, held_out: DemoBatch) -> float:
        """Measure what all ranks have together."""
        with self.session.evaluating():
            return super().accuracy(held_out)


@torch.no_grad()
def distance(one: DemoTraining, other: DemoTraining) -> float:
    """The largest relative difference of a parameter or its momentum: ``|p - q| / |q|``, 2-norms.

    Momentum holds the last gradient in full, where parameters hold it times the learning rate. All
    ranks call it.
    """
    tensors = [(*training.model.parameters(), *_momenta(training)) for training in (one, other)]
    return max(float((p - q).norm() / q.norm()) for p, q in zip(*tensors, strict=True))


def _momenta(training: DemoTraining) -> list[Tensor]:
    """The momentum of each parameter, in the order of the optimizer."""
    states = training.optimizer_state()["state"]
    return [states[number]["momentum_buffer"] for number in sorted(states)]
