"""The metadata of a tensor, for ranks that know a tensor's shape but do not hold its values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype, device and whether a gradient is needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorSpec:
        """The spec of ``x``."""
        return cls(x.shape, x.dtype, x.device, x.requires_grad)

    def empty(self) -> torch.Tensor:
        """A new contiguous tensor, uninitialised."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def resized(self, size: int, axis: int) -> TensorSpec:
        """The same spec with length ``size`` along ``axis``."""
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return TensorSpec(shape, self.dtype, self.device, self.requires_grad)
