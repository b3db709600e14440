"""Whether a script has zeroed gradients, as loops do before a backward pass."""

from __future__ import annotations

import torch
from torch import nn

from slipstream.gradients.shards import ShardedGradient
from slipstream.session import messages


class Zeroing:
    """Sees whether a script has zeroed the gradients of the parameters of an optimizer.

    Args:
        model: names the parameters.
        optimizer: holds them.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._sum: tuple[nn.Parameter, torch.Tensor, int] | None = None  # one of an open window

    @property
    def done(self) -> bool:
        """Whether all these gradients are zero, or gone."""
        held = {p for group in self._optimizer.param_groups for p in group["params"]}
        return all(map(_is_zero, held))

    def name_of_left(self) -> str:
        """Name a parameter whose gradient is there."""
        named = self._model.named_parameters()
        return next((n for n, p in named if not _is_zero(p)), "a parameter of the optimizer")

    def note_sum(self) -> None:
        """Remember a gradient of an open window by its version: values would wait for a GPU."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._sum = parameter, parameter.grad, parameter.grad._version
                    return

    def check_sum(self, window: str) -> None:
        """Refuse a window whose gradients the script has zeroed; ``window``: in words.

        Raises:
            UsageError: they are zeroed.
        """
        kept, self._sum = self._sum, None
        if kept is None:
            return
        parameter, before, version = kept
        now = parameter.grad
        if (now is not before or now._version != version) and self.done:
            raise messages.sums_zeroed(window)


def _is_zero(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return True
    if isinstance(gradient, ShardedGradient):
        return gradient.zeroed
    with torch._C.DisableTorchFunctionSubclass():  # the look of a script at it would be noticed
        return not (gradient._values() if gradient.is_sparse else gradient).any()
