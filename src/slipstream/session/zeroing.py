"""Whether a script has zeroed gradients, as loops do before a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from slipstream.gradients.finite import stored
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
        self._left: list[tuple[nn.Parameter, torch.Tensor, int]] = []  # by the last pass
        self._of_another = False  # whether these are no parameters of this optimizer
        self._in_window = False  # whether it is a sum that an open window needs

    @property
    def done(self) -> bool:
        """Whether all these gradients are zero, or gone."""
        return all(map(is_zero, {*self._held()}))

    @property
    def done_since(self) -> bool:
        """Whether all are zero or gone, and not as the last pass has left them: gradients may be
        zero by themselves."""
        if not self._left:
            return self.done
        touched = any(
            p.grad is not before
            or before._version != version
            or isinstance(before, ShardedGradient)
            for p, before, version in self._left
        )
        return touched and self.done

    @property
    def replaced(self) -> bool:
        """Whether the script has put others in the place of what the last pass has left."""
        return any(p.grad is not before for p, before, _ in self._left)

    def name_of_left(self) -> str:
        """Name a parameter whose gradient is there."""
        held = {*self._held()}
        named = ((n, p) for n, p in self._model.named_parameters() if p in held)
        return next((n for n, p in named if not is_zero(p)), "a parameter of the optimizer")

    def note(self, *, in_window: bool) -> None:
        """Remember a gradient that a pass has left by its version: values would wait for a GPU.
        ``in_window``: an update that is still open needs it. Where a pass has left none to this
        optimizer, those of other parameters tell, of which it may have left some alone."""
        left = [p for p in self._held() if p.grad is not None][:1]
        self._of_another = not left
        left = left or [p for p in self._model.parameters() if p.requires_grad]
        self._left = [(p, p.grad, p.grad._version) for p in left if p.grad is not None]
        self._in_window = in_window

    def used_by_another(self) -> None:
        """Let gradients stay that another optimizer has used: its script zeroes them later."""
        if self._of_another:
            self._left = []

    def _held(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that a backward pass adds to: of one that was frozen on the way the
        last gradient may stay, as an optimizer that is made then does not zero it."""
        for group in self._optimizer.param_groups:
            yield from (p for p in group["params"] if p.requires_grad)

    def forget(self) -> None:
        """Hold no gradient any more: the update is done."""
        self._left, self._in_window = [], False

    def check_sum(self, window: str) -> None:
        """Refuse a window whose gradients the script has zeroed; ``window``: in words.

        Raises:
            UsageError: they are zeroed.
        """
        in_window, self._in_window = self._in_window, False
        if in_window and self._left and self.done_since:
            raise messages.sums_zeroed(window)


def drop_shards(parameters: Iterable[torch.Tensor]) -> None:
    """Take away what an update has used and nobody has the whole of: torch would add the gradients
    of a loss that is another model's to it, in memory of a single value."""
    for parameter in parameters:
        if isinstance(parameter.grad, ShardedGradient):
            parameter.grad = None


def is_finite_or_none(parameter: torch.Tensor) -> bool:
    """Whether there is no gradient here, or a finite one."""
    gradient = parameter.grad
    if gradient is None or isinstance(gradient, ShardedGradient):
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return bool(stored(gradient).isfinite().all())


def is_zero(parameter: torch.Tensor) -> bool:
    """Whether a gradient is zero, or gone."""
    gradient = parameter.grad
    if gradient is None:
        return True
    if isinstance(gradient, ShardedGradient):
        return gradient.zeroed
    with torch._C.DisableTorchFunctionSubclass():  # the look of a script at it would be noticed
        return not stored(gradient).any()
