"""Settings of how the device computes. ``fusion`` and ``precision`` implement them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from slipstream.strategy.setting import Exactness, Setting

Pattern = Literal["add_act", "bn_act", "relu_depthwise"]
"""A chain of operations that ``fusion`` finds in a model."""


class ComputeConfig(Setting):
    """Settings of how the device computes.

    Example:
        >>> ComputeConfig(tf32=True).active, ComputeConfig().active
        (True, False)
        >>> ComputeConfig(fuse_optimizer=True).exactness
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

    compile: bool = False
    """Blocks run as ``torch.compile`` makes them, each by itself, so that its gradients are
    exchanged while backward goes on."""

    cuda_graph: bool = False
    """On CUDA, the kernels of a block start with one call."""

    channels_last: bool = False
    """2d convolutions have their channels innermost in memory."""

    tf32: bool = False
    """On CUDA, matrix products and convolutions round fp32 inputs to 10 bits of mantissa.

    false: torch's own settings stay.
    """

    @model_validator(mode="after")
    def _compiles_or_fuses(self) -> Self:
        if self.compile and self.patterns:
            names = ", ".join(f"fuse_{name}" for name in self.patterns)
            raise ValueError(
                f"compile and {names} exclude each other, as torch.compile fuses these chains "
                "itself; leave out one of them"
            )
        if self.compile and self.cuda_graph:
            raise ValueError(
                "compile and cuda_graph exclude each other, as both replace the forwards of the "
                "same blocks; leave out one of them"
            )
        return self

    @property
    def active(self) -> bool:
        """Whether anything differs from torch's defaults."""
        return self != ComputeConfig()

    @property
    def exactness(self) -> Exactness:
        """The weakest of what is on."""
        if self.tf32:
            return "lossy"
        return "bitwise" if self == ComputeConfig(cuda_graph=self.cuda_graph) else "reordered"

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The chains of operations to fuse."""
        chosen: dict[Pattern, bool] = {
            "bn_act": self.fuse_bn_act,
            "add_act": self.fuse_add_act,
            "relu_depthwise": self.fuse_relu_depthwise,
        }
        return tuple(name for name, fused in chosen.items() if fused)
