"""Norms of a rank's own gradient and of the average, which tell the gradient noise scale.

Looks at gradients, and changes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from slipstream.gradients.interface import GradientEngine
from slipstream.trace.recorder import Recorder


class GradientNorms:
    """Squared norms of the gradients of recorded updates.

    Args:
        parameters: whose gradients are averaged.
        engine: averages them.
        recorder: says which updates are recorded; in others nothing is computed.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], engine: GradientEngine, recorder: Recorder
    ) -> None:
        self._parameters, self._engine, self._recorder = parameters, engine, recorder
        self._own: dict[int, torch.Tensor] = {}  # the last accumulation of a window has the sum
        self._average: torch.Tensor | None = None
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._ready, index))
            for index, p in enumerate(parameters)
        ]

    def averaged(self) -> None:
        """A backward pass and the exchange behind it, if there was one, are done."""
        if self._parameters and self._recorder.active:
            self._average = _total(map(_square, self._engine.averages(self._parameters)))

    def take(self) -> dict[str, torch.Tensor]:
        """Return the squared norms of the update that ends, and forget them."""
        own, average = _total(self._own.values()), self._average
        self._own, self._average = {}, None
        if own is None or average is None:
            return {}
        return {"own_norm2": own, "average_norm2": average}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        """The engine has not scaled it yet: its own hooks come after all others."""
        if self._recorder.active and parameter.grad is not None:
            self._own[index] = _square(parameter.grad)


@torch.no_grad()
def _square(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce()._values() if gradient.is_sparse else gradient
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float32)
    return norm.square()


def _total(squares: Iterable[torch.Tensor]) -> torch.Tensor | None:
    found = list(squares)
    return torch.stack(found).sum() if found else None
