"""Parse and format link rates, such as ``1gbit``, in bits per second."""

from __future__ import annotations

import re

from slipstream.errors import TestbedError

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SLOWEST, _FASTEST = 10**6, 100 * 10**9


def parse_rate(text: str) -> int:
    """Bits per second of a rate as ``tc`` writes it: a number and ``kbit``, ``mbit`` or ``gbit``.

    Raises:
        TestbedError: not a rate, or outside 1mbit to 100gbit.

    Example:
        >>> parse_rate("1gbit"), parse_rate("2.5 Gbit")
        (1000000000, 2500000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)", text.strip().lower(), re.ASCII)
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not _SLOWEST <= bits <= _FASTEST:
        raise TestbedError(
            f"{text!r} is not a link rate; write a number and kbit, mbit or gbit, "
            "from 1mbit to 100gbit, such as 300mbit, 1gbit or 2.5gbit"
        )
    return bits


def format_rate(bits_per_second: float) -> str:
    """A rate with its unit and three significant digits.

    Example:
        >>> format_rate(956_300_000), format_rate(2.5e9)
        ('956 Mbit/s', '2.5 Gbit/s')
    """
    unit, size = ("Gbit/s", 1e9) if bits_per_second >= 0.9995e9 else ("Mbit/s", 1e6)
    return f"{bits_per_second / size:.3g} {unit}"
