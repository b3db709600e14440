"""How the device computes. ``fusion`` and ``precision`` implement it."""

from __future__ import annotations

from typing import Literal

from slipstream.strategy.setting import Exactness, Setting


class Compute(Setting):
    """How the device computes.

    Example:
        >>> Compute(tf32=True).active, Compute().active
        (True, False)
        >>> Compute(fuse_optimizer=True).exactness
        'reordered'
    """

    fuse_optimizer: Literal[False, True, "elementwise"] = False
    """A step of the optimizer in few calls, instead of several for each parameter.

    elementwise: also an optimizer of a class of your own, which treats every value on its own.
    """

    tf32: bool = False
    """On CUDA, matrix products and convolutions round fp32 inputs to 10 bits of mantissa.

    false: torch's own settings stay.
    """

    @property
    def active(self) -> bool:
        """Whether anything differs from torch's defaults."""
        return self != Compute()

    @property
    def exactness(self) -> Exactness:
        """The weakest of what is on."""
        if self.tf32:
            return "lossy"
        return "reordered" if self.fuse_optimizer else "bitwise"
