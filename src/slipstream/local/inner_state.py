"""The state of the user's optimizers at a meeting: kept, averaged over ranks, or forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import nn

from slipstream.codecs.compressor import is_finite
from slipstream.errors import ModelError
from slipstream.local.fragments import Fragment
from slipstream.local.meeting import Meeting
from slipstream.optim.elementwise import COUNTERS


def average_state(
    meeting: Meeting,
    states: Sequence[Mapping[torch.Tensor, Mapping[str, Any]]],
    average: Callable[[torch.Tensor], bool],
) -> None:
    """Average what optimizers keep for each value of a fragment, where ranks keep the same.

    Args:
        meeting: of the fragment.
        states: of the optimizers of a script; of what several keep alike, that of the last counts.
        average: over ranks, in place.
    """
    named = {
        (piece.name, piece.first, key): piece.of(value)
        for piece in meeting.fragment.pieces
        for key, value in sorted(_kept(states, piece.parameter).items())
        if isinstance(value, torch.Tensor)
        and key not in COUNTERS
        and (value.is_floating_point() or value.is_complex())
        and value.shape == piece.parameter.shape
    }
    found = [*named.values()]
    parts = [value.reshape(-1).to(meeting.dtype) for value in found]
    flat = torch.cat([torch.empty(0, dtype=meeting.dtype, device=meeting.device), *parts])
    # where one rank's is not finite, all keep their own
    own = len(flat) if is_finite(flat) else 0
    # a rank keeps nothing of a parameter that it has not used yet
    what = crc32(repr([*named]).encode())
    halves = [*divmod(own, 2**24), *divmod(what, 2**16)]
    numbers = torch.tensor(halves, dtype=torch.float64, device=meeting.device)
    means = torch.cat([numbers, numbers**2])  # exact
    average(means)
    if not own or not torch.equal(means[:4] ** 2, means[4:]):
        return
    average(flat)
    for value, part in zip(found, flat.split([v.numel() for v in found]), strict=True):
        value.copy_(part.view(value.shape))


class InnerOptimizers:
    """Optimizers of the script that step parameters that meet: the one that `accelerate()` got, and
    others that have stepped since.

    Args:
        optimizer: that of `accelerate()`.
        met: the parameters that meet.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, met: Set[nn.Parameter]) -> None:
        self._first, self._met = optimizer, met
        self._others: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Another optimizer has stepped; whether it holds parameters that meet."""
        held = (p for group in optimizer.param_groups for p in group["params"])
        if self._met.isdisjoint(held):
            return False
        self._others[optimizer] = None
        return True

    @property
    def states(self) -> list[Mapping[torch.Tensor, Mapping[str, Any]]]:
        """The state of each of them."""
        return [optimizer.state for optimizer in self]

    def forget(self, parameter: nn.Parameter) -> None:
        """Begin anew with a parameter."""
        for optimizer in self:
            optimizer.state.pop(parameter, None)

    def check_copies(self, fragment: Fragment) -> None:
        """Refuse an optimizer that keeps copies of its parameters, which it would write over what
        ranks have agreed on.

        Raises:
            ModelError: one does.
        """
        for parameter in dict.fromkeys(piece.parameter for piece in fragment.pieces):
            for optimizer in self:
                state = optimizer.state.get(parameter, {})
                if key := _copy_in(state, parameter):
                    raise ModelError(
                        f"{type(optimizer).__name__} keeps a copy of its parameters (state "
                        f"{key!r}), and writes it over what a meeting has changed: under local use "
                        "an optimizer that updates the parameters themselves (precision: autocast "
                        "keeps them in fp32)"
                    )

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        yield self._first
        yield from self._others


def _copy_in(state: Mapping[str, Any], parameter: torch.Tensor) -> str | None:
    """Name the entry of an optimizer's state that is its parameter in another dtype, by which it
    steps; None: there is none. One in the same dtype may be an average, as ASGD's is."""
    for key, value in state.items():
        alike = type(value) is torch.Tensor and value.shape == parameter.shape
        other = alike and value.dtype != parameter.dtype and value.is_floating_point()
        if other and value.to(parameter.dtype).equal(parameter) and parameter.any():
            return str(key)
    return None


def _kept(
    states: Sequence[Mapping[torch.Tensor, Mapping[str, Any]]], parameter: torch.Tensor
) -> dict[str, Any]:
    return {key: value for state in states for key, value in state.get(parameter, {}).items()}
