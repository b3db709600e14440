"""Error feedback: what compression left out comes on top of what is sent next.

    sent_t = C(x_t + e_t),    e_(t+1) = x_t + e_t - sent_t,    e_0 = 0

So all that was sent, plus what is left, is all that came in: nothing is lost, only late. Theory and
name: Karimireddy et al., "Error Feedback Fixes SignSGD" (2019); Seide et al. (2014).

Never compresses: that is the codecs' part.
"""

from __future__ import annotations

import torch


class Residual:
    """What one rank's compression has left out so far.

    A step can turn out to be void after its exchange (some rank's gradients overflowed). Until
    ``commit`` the old error is kept beside the new one; ``rollback`` forgets the new one.

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
        """What is left of a part's ``values`` (the error in them) now that ``sent`` was sent."""
        torch.sub(values, sent, out=self.left()[part])

    def left(self) -> torch.Tensor:
        """Where to write what is left, for those who compute it in one go."""
        self._kept = True
        return self._next

    def forget(self, part: slice = slice(None)) -> None:
        """The step never happened to this part."""
        self._next[part] = self.error[part]

    def commit(self) -> None:
        """The step counts."""
        if self._kept:
            self.error, self._next = self._next, self.error
        self._kept = False

    def rollback(self) -> None:
        """The step never happened."""
        self._kept = False
