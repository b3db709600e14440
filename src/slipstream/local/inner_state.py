"""The state of the user's optimizer at a meeting: kept, averaged over ranks, or forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from slipstream.codecs.compressor import is_finite
from slipstream.local.meeting import Meeting
from slipstream.optim.elementwise import COUNTERS


def average_state(
    meeting: Meeting,
    state: Mapping[torch.Tensor, Mapping[str, Any]],
    average: Callable[[torch.Tensor], bool],
) -> None:
    """Average what an optimizer keeps for each value of a fragment, where ranks keep the same.

    Args:
        meeting: of the fragment.
        state: of the optimizer.
        average: over ranks, in place.
    """
    found = [
        piece.of(value)
        for piece in meeting.fragment.pieces
        for key, value in sorted(state.get(piece.parameter, {}).items())
        if isinstance(value, torch.Tensor)
        and key not in COUNTERS
        and value.is_floating_point()
        and value.shape == piece.parameter.shape
    ]
    parts = [value.reshape(-1).to(meeting.dtype) for value in found]
    flat = torch.cat([torch.empty(0, dtype=meeting.dtype, device=meeting.device), *parts])
    # where one rank's is not finite, all keep their own
    own = len(flat) if is_finite(flat) else 0
    halves = torch.tensor(divmod(own, 2**24), dtype=torch.float64, device=meeting.device)
    means = torch.cat([halves, halves**2])  # exact
    average(means)
    # ranks that have not updated yet keep nothing: then there is nothing to average
    if not own or not torch.equal(means[:2] ** 2, means[2:]):
        return
    average(flat)
    for value, part in zip(found, flat.split([v.numel() for v in found]), strict=True):
        value.copy_(part.view(value.shape))
