"""Convolutions with channels innermost in memory, which their kernels need anyway."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.errors import ModelError
from slipstream.strategy import Row


class ChannelsLast:
    """A model whose 2d convolutions have their weights, and so their results, channels last.

    A kernel that computes so would otherwise copy every map there and back. Weights, and the state
    of their optimizer, change the order of their memory and nothing else; ``close()`` changes it
    back. The order spreads from the weights to the maps, so inputs stay as they are.

    Weights that a parametrization computes (``weight_norm``, ``spectral_norm``) are new tensors at
    each forward, and stay as they are.

    Exactness: reordered: torch takes other kernels.

    Raises:
        ModelError: the model has no 2d convolution with a weight of its own.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> changed = ChannelsLast(model, torch.optim.SGD(model.parameters()))
        >>> model(torch.ones(1, 3, 9, 9)).is_contiguous(memory_format=torch.channels_last)
        True
        >>> changed.close()
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = weights_of_convolutions(model)
        self._reorder(torch.channels_last)

    def close(self) -> None:
        """Give the weights their usual order; idempotent."""
        self._reorder(torch.contiguous_format)
        self._weights = []

    def report_rows(self) -> list[Row]:
        """Report how many weights have another order."""
        return [Row("channels last", f"{len(self._weights)} convolutions", "")]

    @torch.no_grad()
    def _reorder(self, order: torch.memory_format) -> None:
        for weight in self._weights:
            weight.data = weight.data.contiguous(memory_format=order)
            state: dict[str, object] = self._optimizer.state.get(weight, {})
            for name, value in _like(weight, state.items()):
                state[name] = value.contiguous(memory_format=order)


def weights_of_convolutions(model: nn.Module) -> list[nn.Parameter]:
    """Find the weights of 2d convolutions, but for those that a parametrization computes.

    Raises:
        ModelError: there is none.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    own = (layer._parameters.get("weight") for layer in layers)
    weights = [*dict.fromkeys(weight for weight in own if weight is not None)]
    if not weights:
        computed = " with a weight of its own, as parametrizations compute them" * bool(layers)
        raise ModelError(
            f"compute.channels_last: {type(model).__name__} has no 2d convolution{computed}; leave "
            "out compute.channels_last"
        )
    return weights


def _like(weight: Tensor, state: Iterable[tuple[str, object]]) -> list[tuple[str, Tensor]]:
    """Find what an optimizer keeps for each value of a weight."""
    return [(k, v) for k, v in state if isinstance(v, Tensor) and v.shape == weight.shape]
