"""Gradients that an ``optimizer.step()`` of the script has used, until the script zeroes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from slipstream.session import messages
from slipstream.session.zeroing import Zeroing, drop_shards, is_zero


class KeptGradients:
    """Lets used gradients stay for the script to read, and keeps them out of the next update.

    Args:
        parameters: of the model, also those that the optimizer does not hold.
        zeroing: sees whether the gradients of those that it holds are zeroed.

    Attributes:
        used: whether an update has used the gradients that are there.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], zeroing: Zeroing) -> None:
        self._parameters, self._zeroing = parameters, zeroing
        self.used = False
        self._dropped: set[torch.Tensor] = set()  # had a used gradient when backward came again

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Leave gradients as they are, whatever is done inside."""
        left = [(p, p.grad) for p in self._parameters]
        yield
        for parameter, gradient in left:
            parameter.grad = gradient

    def clear(self) -> None:
        """Take all gradients away."""
        for parameter in self._parameters:
            parameter.grad = None

    def backward_begins(self) -> None:
        """Drop used gradients that the script has left to parameters of other optimizers.

        Raises:
            UsageError: those of this one are still there, so that backward would add to them.
        """
        if self.used and not self._zeroing.done:
            raise messages.gradients_kept()
        if self.used:
            self._dropped = {p for p in self._parameters if not is_zero(p)}
            for parameter in self._dropped:  # those of zero stay, by which an optimizer decays
                parameter.grad = None
            self.used = False
        elif self._dropped:  # those that the script has zeroed since begin anew
            self._dropped = {p for p in self._dropped if not is_zero(p)}

    def no_sync_begins(self) -> None:
        """Take away used gradients of which no rank has the whole."""
        if self.used:
            drop_shards(self._parameters)

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to update a parameter by a gradient of which a part was dropped: of a frozen
        layer, say.

        Raises:
            UsageError: the optimizer holds one.
        """
        groups = optimizer.param_groups
        if self._dropped and any(p in self._dropped for g in groups for p in g["params"]):
            raise messages.gradients_kept()

    def check_other_step(
        self, optimizer: torch.optim.Optimizer, held: Iterable[torch.Tensor]
    ) -> None:
        """Refuse the same of another optimizer, which holds these parameters of the model.

        Raises:
            UsageError: a part of a gradient of theirs was dropped.
        """
        if not self._dropped.isdisjoint(held):
            raise messages.other_step_late(optimizer)
