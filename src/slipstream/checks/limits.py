"""Shares of the timeout of a run, as ranks keep them that watch each other, and watches outside."""

from __future__ import annotations

STALE, STILL = 0.5, 0.6
"""After which a rank or a host without a beat is silent, and a rank without a sign of life waits
for nothing; the rest is for the autopsy."""
EXIT_CODE = 75
"""Of a run that hung: EX_TEMPFAIL, as the same command may well succeed."""


def interval_of(timeout: float) -> float:
    """Seconds from one beat to the next.

    Example:
        >>> interval_of(3.0), interval_of(30.0), interval_of(600.0)
        (0.2, 1.0, 2.0)
    """
    return min(2.0, max(0.2, timeout / 30))
