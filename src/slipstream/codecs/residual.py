"""Error feedback: what compression left out is added to what is sent next.

    sent_t = C(x_t + e_t),    e_(t+1) = x_t + e_t - sent_t,    e_0 = 0

The sum of all that was sent, plus the present error, is the sum of all gradients: nothing is lost,
only delayed. Theory and name: Karimireddy et al., "Error Feedback Fixes SignSGD" (2019); Seide et
al. (2014).

Never compresses: the codecs do.
"""

from __future__ import annotations

import torch


class Residual:
    """The part of one rank's gradients that compression has left out so far.

    Whether a step counts is known only after its exchange (gradients of another rank may have
    overflowed). Until ``commit`` the old error is kept beside the new one; ``rollback`` drops that.

    Example:
        >>> residual = Residual(torch.zeros(2))
        >>> x = torch.tensor([0.6, 2.0])
        >>> residual.keep(x, sent=x.round())
        >>> residual.commit()
        >>> residual.add_to(torch.ones(2))
        tensor([0.6000, 1.0000])
    """

    def __init__(self, error: torch.Tensor) -> None:
        self.error = error
        self._next = torch.zeros_like(error)
        self._kept = False

    def add_to(self, values: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        """Add the error of a part to its ``values``, in place."""
        return values.add_(self.error[part])

    def keep(self, values: torch.Tensor, sent: torch.Tensor, part: slice = slice(None)) -> None:
        """The new error of a part: its ``values`` (old error included) less what was ``sent``."""
        torch.sub(values, sent, out=self.left()[part])

    def left(self) -> torch.Tensor:
        """The tensor for the new error, to write it in place of ``keep``."""
        self._kept = True
        return self._next

    def forget(self, part: slice = slice(None)) -> None:
        """This part keeps the old error."""
        self._next[part] = self.error[part]

    def commit(self) -> None:
        """The step counts: the new error replaces the old one."""
        if self._kept:
            self.error, self._next = self._next, self.error
        self._kept = False

    def rollback(self) -> None:
        """The step does not count: drop the new error."""
        self._kept = False
