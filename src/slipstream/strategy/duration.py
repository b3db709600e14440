"""Times with their unit, as people write them: ``30s``, ``5m``, ``1.5h``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*([smh])")


def seconds_of(text: str) -> float | None:
    """Duration of a time with its unit; None: it is none.

    Example:
        >>> seconds_of("90s"), seconds_of("1.5h"), seconds_of("soon")
        (90.0, 5400.0, None)
    """
    match = _WRITTEN.fullmatch(text.strip().lower())
    return float(match[1]) * _UNITS[match[2]] if match else None


def _read(value: object) -> object:
    seconds = seconds_of(value) if isinstance(value, str) else None
    return value if seconds is None else seconds


_Positive = Annotated[float, Field(gt=0)]
Duration = Annotated[_Positive, BeforeValidator(_read, json_schema_input_type=_Positive | str)]
"""Seconds, more than 0: a number, or a time with its unit."""
