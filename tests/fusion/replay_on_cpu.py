"""What a CUDA graph does, on a host without a device: the same memory in every replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class Captured:
    """Counts what it captures and replays."""

    def __init__(self) -> None:
        self.captures, self.replays = 0, 0

    def capture(self, module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., Any]:
        """As ``torch.cuda.make_graphed_callables``: static inputs, results and gradients; three
        runs before."""
        self.captures += 1
        for _ in range(3):
            self._backward(tree_flatten(module(*samples))[0], samples, module, None)
        leaves, spec = tree_flatten(module(*samples))
        results = [leaf.detach().clone() for leaf in leaves]
        moved: list[Tensor | None] = []
        running: list[Tensor] = []
        captured = self

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
                captured.replays += 1
                for static, given in zip(samples, inputs, strict=False):
                    static.detach().copy_(given)
                with torch.enable_grad():
                    running[:] = tree_flatten(module(*samples))[0]
                for static, computed in zip(results, running, strict=True):
                    static.copy_(computed)
                return tuple(result.detach() for result in results)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
                found = captured._backward(running, samples, module, gradients)
                moved[:] = moved or [None if g is None else g.clone() for g in found]
                for static, computed in zip(moved, found, strict=True):
                    if static is not None and computed is not None:
                        static.copy_(computed)
                return tuple(None if static is None else static.detach() for static in moved)

        operation: Any = Replay
        return lambda *inputs: tree_unflatten(
            list(operation.apply(*inputs, *module.parameters())), spec
        )

    @staticmethod
    def _backward(
        results: list[Tensor],
        samples: tuple[Tensor, ...],
        module: nn.Module,
        gradients: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor | None, ...]:
        surface = (*samples, *module.parameters())
        learning = [t for t in surface if t.requires_grad]
        given = gradients or tuple(torch.zeros_like(result) for result in results)
        pairs = [(r, g) for r, g in zip(results, given, strict=True) if r.requires_grad]
        computed, of_them = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(computed, learning, of_them, allow_unused=True))
        return tuple(next(found) if t.requires_grad else None for t in surface)


class Uncapturable(Captured):
    """A block that waits for its device."""

    def capture(self, module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., Any]:
        module(*samples)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
