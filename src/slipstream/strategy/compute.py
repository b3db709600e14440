"""How the device computes. ``fusion`` and ``precision`` implement it."""

from __future__ import annotations

from typing import Literal

from slipstream.strategy.setting import Exactness, Setting

Pattern = Literal["add_act", "bn_act", "relu_depthwise"]
"""A chain of operations that ``fusion`` finds in a model."""


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

    fuse_bn_act: bool = False
    """Batch norm and an activation, with a residual between them or without, in one operation."""

    fuse_add_act: bool = False
    """A sum and an activation in one operation."""

    fuse_relu_depthwise: bool = False
    """ReLU and a depthwise convolution, which computes ReLU again in backward."""

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
        reorders = self.fuse_optimizer or self.fuse_bn_act or self.fuse_add_act
        return "reordered" if reorders else "bitwise"

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The chains of operations to fuse."""
        chosen: dict[Pattern, bool] = {
            "bn_act": self.fuse_bn_act,
            "add_act": self.fuse_add_act,
            "relu_depthwise": self.fuse_relu_depthwise,
        }
        return tuple(name for name, fused in chosen.items() if fused)
