"""The state of optimizers that deal their work out to ranks, each of which keeps a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch


def may_be_part(value: object, parameter: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether a value of the state of a parameter may be this rank's part of it, as its form is
    another: rows of it, or those of several. A number is that of all ranks.

    Example:
        >>> weight = torch.zeros(4, 3)
        >>> may_be_part(torch.zeros(2, 3), weight), may_be_part(torch.zeros(4, 3), weight)
        (True, False)
    """
    if not isinstance(value, torch.Tensor):
        return False
    return value.dim() > 0 and value.shape != parameter.shape


def in_common(state: object, parameter: torch.Tensor) -> object:
    """The state of a parameter without what may be a part of this rank.

    Example:
        >>> weight = torch.zeros(4, 3)
        >>> [*in_common({"step": 1, "rows": torch.zeros(2, 3)}, weight)]
        ['step']
    """
    if not isinstance(state, Mapping):
        return state
    return {key: value for key, value in state.items() if not may_be_part(value, parameter)}
