"""Parameters that share memory, as after ``decoder.weight.data = encoder.weight.data``."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)
"""Types of parameters whose memory is known; subclasses may have any."""


class MemoryInCommon:
    """Which parameters of an optimizer have values in memory of another: a step of the one counts
    for the other's, so they are stepped in their order."""

    def __init__(self) -> None:
        self._pointers: list[int] = []
        self._numbers: list[int] = []

    def of(self, parameters: Sequence[Tensor]) -> Set[int]:
        """Them, by identity."""
        plain = [p for p in parameters if type(p) in PLAIN]
        pointers = [p.data_ptr() for p in plain]
        if pointers != self._pointers:
            self._pointers, self._numbers = pointers, _overlapping(plain)
        return {id(plain[number]) for number in self._numbers}


def _overlapping(parameters: Sequence[Tensor]) -> list[int]:
    spans = []
    for number, parameter in enumerate(parameters):
        if parameter.numel():
            axes = zip(parameter.shape, parameter.stride(), strict=True)
            length = sum((size - 1) * stride for size, stride in axes) + 1
            start = parameter.data_ptr()
            spans.append((start, start + length * parameter.itemsize, number))
    found, reach, holder = set[int](), 0, 0
    for start, end, number in sorted(spans):
        if start < reach:
            found |= {number, holder}
        if end > reach:
            reach, holder = end, number
    return sorted(found)
