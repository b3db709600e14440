"""Cases of window attention."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.window_attention import MOST_IN_KERNEL

CASES = {
    "plain": (4, 2, 49, 32, 0),
    "masks": (4, 3, 9, 20, 2),
    "one window": (1, 1, 16, 16, 1),
    "large window": (2, 1, 80, 8, 1),
    "window of 12 x 12": (2, 2, 144, 32, 1),
}
"""Windows, heads, positions, channels, masks."""

IN_KERNEL = [case for case, (_, _, positions, *_) in CASES.items() if positions <= MOST_IN_KERNEL]
"""Those that a kernel of Triton computes."""

Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def inputs(case: str, dtype: torch.dtype) -> tuple[Given, Tensor]:
    """Query, key, value, bias and mask, and a gradient; the first as one projection leaves them."""
    windows, heads, positions, channels, masks = CASES[case]
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    packed = normal(windows, positions, 3, heads, channels).permute(2, 0, 3, 1, 4)
    query, key, value = (t.detach().requires_grad_() for t in packed.unbind())
    bias = normal(heads, positions, positions).requires_grad_()
    mask = torch.where(normal(masks, positions, positions) > 0.5, -100.0, 0.0).to(dtype)
    gradient = normal(windows, heads, positions, channels)
    return (query, key, value, bias, mask if masks else None), gradient
