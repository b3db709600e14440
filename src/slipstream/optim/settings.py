"""Range checks of settings; errors name the value seen, the values allowed and a usual one."""

from __future__ import annotations

from math import isfinite
from typing import Any

from torch import Tensor

from slipstream.errors import UsageError


def check_number(
    name: str, value: Any, usual: str, *, above: bool = False, below: float | None = None
) -> None:
    """Refuse anything but a finite number >= 0 (``above``: > 0) and < ``below``.

    Raises:
        UsageError: with the value seen, the values allowed and a usual one.

    Example:
        >>> check_number("momentum", 1.5, "0.9", below=1)
        Traceback (most recent call last):
        slipstream.errors.UsageError: momentum is 1.5; allowed: a number from 0 on and below 1; \
usual is 0.9
    """
    fine = _is_number(value) and isfinite(value) and (value > 0 if above else value >= 0)
    if not fine or (below is not None and value >= below):
        allowed = "a number above 0" if above else "a number from 0 on"
        limit = f" and below {below:g}" if below is not None else ""
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}{limit}; usual is {usual}")


def check_learning_rate(value: Any) -> None:
    """Refuse anything but a finite number >= 0 or a tensor of one.

    Raises:
        UsageError: with the value seen and the values allowed.
    """
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    check_number("lr", number, "1 to 30 for Lars, 0.001 to 0.02 for Lamb, after a warm-up")


def check_flag(name: str, value: Any) -> None:
    """Refuse anything but True or False.

    Raises:
        UsageError: with the value seen.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; allowed: True or False; pass one of them")


def check_bounds(name: str, value: Any, usual: str) -> None:
    """Refuse anything but None or a pair of numbers, ``0 <= low <= high`` and ``high > 0``.

    Raises:
        UsageError: with the value seen, the values allowed and a usual one.
    """
    pair = value if isinstance(value, tuple | list) else ()
    fine = len(pair) == 2 and all(map(_is_number, pair)) and 0 <= pair[0] <= pair[1] > 0
    if value is not None and not fine:
        raise UsageError(
            f"{name} is {value!r}; allowed: None, or a pair (low, high) with 0 <= low <= high and "
            f"high above 0; usual is {usual}"
        )


def patterns(exclude: Any) -> tuple[str, ...]:
    """The patterns of ``exclude`` as a tuple.

    Raises:
        UsageError: ``exclude`` is one string, or holds other values than strings.
    """
    listed = isinstance(exclude, tuple | list)
    if not listed or not all(isinstance(pattern, str) for pattern in exclude):
        example = exclude if isinstance(exclude, str) else "*.bias"
        raise UsageError(
            f"exclude is {exclude!r}; allowed: a tuple of patterns; write exclude=({example!r},)"
        )
    return tuple(exclude)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
