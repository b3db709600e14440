"""Small models, one for each thing that a gradient engine can get wrong, by name.

    case = MODELS["tied"]
    loss = case.build()(*case.batch(rank, step))

Every model returns its loss, a mean over the batch; ``batch(rank, step)`` is seeded by both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A model, its batches, and what DistributedDataParallel needs to train it."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    joins: bool = True
    """Whether the batches of all ranks make one batch, whose loss is the mean of theirs."""
    batch_statistics: bool = False
    """Whether the loss of a sample depends on the others of its batch."""
    ddp: Mapping[str, bool] | None = field(default_factory=dict)
    """Options of DistributedDataParallel; None where it refuses the model."""
    sparse: bool = False
    """Whether some gradients are sparse tensors, which AdamW refuses."""


def rows(rank: int, step: int) -> Batch:
    """Three samples of five features, and their targets."""
    seed = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, 5, generator=seed), torch.randn(3, 4, generator=seed)


def words(rank: int, step: int) -> Batch:
    seed = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(11, (3, 6), generator=seed), torch.randint(4, (3,), generator=seed)


def images(rank: int, step: int) -> Batch:
    seed = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 3, 5, 5, generator=seed), torch.randint(4, (4,), generator=seed)


class Regression(nn.Module):
    """The mean squared error of ``body``."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x).float(), y)


class Classification(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y)


def mlp() -> nn.Module:
    return Regression(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4))


def one_parameter() -> nn.Module:
    return Regression(nn.Linear(5, 4, bias=False))


def conv_bn() -> nn.Module:
    convolutions = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 2)
    return Classification(*convolutions, nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, 4))


def conv_bn_channels_last() -> nn.Module:
    return conv_bn().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def frozen() -> nn.Module:
    model = mlp()
    model.body[2].requires_grad_(False)
    return model


def zero_size() -> nn.Module:
    class ZeroSize(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Linear(5, 4))
            self.nothing = nn.Parameter(torch.empty(0, 4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) + self.nothing.sum()

    return ZeroSize()


class NewBuffer(Regression):
    """A buffer that each forward replaces by another tensor."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return super().forward(x - self.mean, y)


class Tied(nn.Module):
    """Embedding and decoder share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.decoder(self.inner(self.embedding(x)).tanh()).mean(1), y)


class Sparse(nn.Module):
    """Sparse gradients of a different number of rows on every rank, and dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, sparse=True)
        self.bag = nn.EmbeddingBag(11, 6, sparse=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(x).mean(1) + self.bag(x)), y)


class SeveralDtypes(Regression):
    """Single precision, double precision and bfloat16, and buffers of other dtypes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7))
        self.wide = nn.Linear(7, 6, dtype=torch.float64)
        self.narrow = nn.Linear(6, 4, dtype=torch.bfloat16)
        self.register_buffer("flag", torch.randn(3) > 0)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(self.narrow(self.wide(self.body(x).double()).bfloat16()).float(), y)


class Complex(Regression):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4))
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (torch.view_as_real(self.body(x) * self.turn) - y.unsqueeze(2)).square().mean()


class Unused(Regression):
    """A layer that no rank ever uses."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
        self.never = nn.Linear(3, 3)


class Branches(nn.Module):
    """Which of two layers is used, and which is used first, is up to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.left = nn.Linear(6, 4)
        self.right = nn.Sequential(nn.Linear(6, 7, bias=False), nn.Linear(7, 4, bias=False))

    def forward(self, x: Tensor, y: Tensor, path: str) -> Tensor:
        hidden = self.first(x).tanh()
        layers = [{"l": self.left, "r": self.right}[letter] for letter in path]
        return F.mse_loss(torch.stack([layer(hidden) for layer in layers]).sum(0), y)


def by_rank(rank: int, step: int) -> Batch:
    return (*rows(rank, step), "lr"[rank % 2])


def by_step(rank: int, step: int) -> Batch:
    return (*rows(rank, step), ("lr", "l", "rl", "r", "rlr")[step % 5])


def by_order(rank: int, step: int) -> Batch:
    """All ranks use both layers, every other rank in the opposite order."""
    return (*rows(rank, step), ("lr", "rl")[(rank + step) % 2])


class Shared(nn.Module):
    """One layer three times: plainly, or each time in a checkpoint of its own."""

    def __init__(self, reentrant: bool | None = None, times: int = 3) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.reentrant, self.times = reentrant, times

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(self.times):
            hidden = self._checkpoint(hidden)
        return F.mse_loss(self.last(hidden), y)

    def _checkpoint(self, hidden: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.shared(hidden).tanh()
        return checkpoint(self.shared, hidden, use_reentrant=self.reentrant).tanh()


class GPT2(nn.Module):
    """Two real transformer blocks, their language-model head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
        config = GPT2Config(bos_token_id=None, eos_token_id=None, **sizes, **off)
        self.inner = GPT2LMHeadModel(config)
        self.inner.loss_type = "ForCausalLM"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(input_ids=x, labels=x).loss


class Dealt(torch.optim.Optimizer):
    """Heavy ball whose work is dealt out: each rank updates some parameters, and sends them to the
    others, as distributed classes of Muon do."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                owner = number % dist.get_world_size()
                if owner == dist.get_rank() and p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=group["lr"])
                dist.broadcast(p.detach(), owner)


class Sliced(torch.optim.Optimizer):
    """Heavy ball whose work is dealt out by rows: each rank keeps the momentum of its own, as the
    optimizers of nanochat do. States have the same names on all ranks, and other values."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                apart = p.dim() > 0 and len(p) % ranks == 0
                rows, grads = (p.chunk(ranks), p.grad.chunk(ranks)) if apart else ([p], [p.grad])
                own = rank if apart else 0
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(rows[own]))
                rows[own].sub_(momentum.mul_(0.9).add_(grads[own]), alpha=group["lr"])
                for owner, part in enumerate(rows if apart else ()):
                    dist.broadcast(part, owner)


UNUSED = {"find_unused_parameters": True}

MODELS = {
    "mlp": Case(mlp, rows),
    "one_parameter": Case(one_parameter, rows),
    "conv_bn": Case(conv_bn, images, batch_statistics=True),
    "conv_bn_channels_last": Case(conv_bn_channels_last, images, batch_statistics=True),
    "new_buffer": Case(NewBuffer, rows, batch_statistics=True),
    "tied": Case(Tied, words),
    "frozen": Case(frozen, rows),
    "several_dtypes": Case(SeveralDtypes, rows),
    "complex": Case(Complex, rows),
    "sparse": Case(Sparse, words, sparse=True),
    "zero_size": Case(zero_size, rows),
    "unused": Case(Unused, rows, ddp=UNUSED),
    "unused_by_rank": Case(Branches, by_rank, joins=False, ddp=UNUSED),
    "changing_graph": Case(Branches, by_step, joins=False, ddp=UNUSED),
    "changing_order": Case(Branches, by_order, joins=False),
    "shared": Case(Shared, rows),
    "checkpoint": Case(lambda: Shared(reentrant=False, times=1), rows),
    "checkpoint_shared": Case(lambda: Shared(reentrant=False), rows),
    "checkpoint_reentrant": Case(lambda: Shared(reentrant=True, times=1), rows),
    "checkpoint_reentrant_shared": Case(lambda: Shared(reentrant=True), rows, ddp=None),
    "gpt2": Case(GPT2, words),
}
