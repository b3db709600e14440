"""Seconds of one collective as a function of its bytes: measured points and lines fitted to them.

The points come from ``calibration``; this module never measures and never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from statistics import median
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from slipstream.errors import ClusterError
from slipstream.planner.network.fit import Array, segmented_fit
from slipstream.strategy.setting import FrozenModel
from slipstream.strategy.validate import shown

NumBytes = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]

SMALL = 64 * 1024
"""Bytes up to which an exchange counts as small: its time is mostly latency."""

LARGEST = 4
"""Sizes from a quarter of the largest on tell what exchanges beyond all measured ones take."""

WORST_ERROR = 0.15
"""The relative error above which a fit is not trusted."""


class Piece(FrozenModel):
    """From ``start_bytes`` on, an exchange takes ``startup + per_byte * bytes`` seconds."""

    start_bytes: int = Field(ge=0)
    startup: Seconds
    per_byte: Seconds


class Curve(FrozenModel):
    """Seconds of one collective as a function of the bytes of the whole tensor.

    The whole tensor is the input of an all-reduce, the input of a reduce-scatter and the output of
    an all-gather. ``points`` are the measured (bytes, seconds), ascending; ``pieces`` are lines
    fitted to them (never falling, continuous); ``error_by_decade`` holds the largest relative error
    of the fit in each decade of bytes. ``noise`` is the relative standard deviation of a timing,
    None where it was not measured. Build one with `fit`.

    Example:
        >>> curve = Curve.fit([(1000, 0.002), (2000, 0.003), (4000, 0.005)])
        >>> round(curve.seconds(3000), 5), round(curve.seconds(8000), 5), curve.trusted
        (0.00404, 0.009, True)
    """

    points: tuple[tuple[NumBytes, Seconds], ...] = Field(min_length=2)
    pieces: tuple[Piece, ...] = Field(min_length=1)
    error_by_decade: Mapping[str, Seconds]
    trusted: bool
    """False where the fit is off by more than 15 %: beyond the points it is then a guess."""
    noise: Seconds | None = None

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        points, pieces = [m for m, _ in self.points], [p.start_bytes for p in self.pieces]
        for name, sizes in {"points": points, "pieces": pieces}.items():
            for smaller, larger in pairwise(sizes):
                if larger <= smaller:
                    raise ValueError(f"{name} must ascend in bytes, but {larger} follows {smaller}")
        return self

    @classmethod
    def fit(cls, points: Iterable[tuple[int, float]], noise: float | None = None) -> Self:
        """The curve through measured points: two sizes or more, each once, times above 0.

        Raises:
            ClusterError: there are fewer sizes, one appears twice, or a time is not above 0.
        """
        ordered = tuple(sorted(points))
        if len({m for m, _ in ordered}) < max(len(ordered), 2) or min(t for _, t in ordered) <= 0:
            raise ClusterError(
                f"no curve fits the (bytes, seconds) {shown(ordered)}: it takes two sizes or more, "
                "each once, and times above 0; measure again"
            )
        sizes, times = np.array(ordered, dtype=float).T
        knots, startups, slopes = segmented_fit(sizes, times)
        starts = [0, *(round(knot) for knot in knots[1:])]
        pieces: list[Piece] = []
        for start, startup, slope in zip(starts, startups, slopes, strict=True):
            line = {"startup": _rounded(startup), "per_byte": _rounded(slope)}
            start = _meeting(pieces, start, **line)
            if not pieces or line != pieces[-1].model_dump(exclude={"start_bytes"}):
                pieces.append(Piece(start_bytes=start, **line))
        errors: dict[str, float] = {}
        for num_bytes, seconds in ordered:
            error = abs(_on_lines(pieces, num_bytes) / seconds - 1.0)
            decade = _decade(num_bytes)
            errors[decade] = max(errors.get(decade, 0.0), round(error, 4))
        return cls(
            points=ordered,
            pieces=tuple(pieces),
            error_by_decade=errors,
            trusted=max(errors.values()) <= WORST_ERROR,
            noise=noise,
        )

    @property
    def worst_error(self) -> float:
        """The largest relative error of the fit."""
        return max(self.error_by_decade.values(), default=0.0)

    @property
    def worst_decade(self) -> str:
        """The decade of bytes with the largest relative error."""
        return max(self.error_by_decade, key=lambda d: self.error_by_decade[d], default="")

    @cached_property
    def latency(self) -> float:
        """Seconds that an exchange of up to SMALL bytes takes beyond ``per_byte * bytes``."""
        sizes = [m for m, _ in self.points if m <= SMALL] or [self.points[0][0]]
        return max(max(self.fitted(m) - self.per_byte * m, 0.0) for m in sizes)

    @property
    def per_byte(self) -> float:
        """Seconds that a large exchange takes for each additional byte."""
        return self.pieces[-1].per_byte

    def seconds(self, num_bytes: float) -> float:
        """Seconds for one size; see `seconds_of`."""
        return float(self.seconds_of(np.array(float(num_bytes))))

    def seconds_of(self, num_bytes: Array) -> Array:
        """Seconds for each size.

        Between measured points the interpolation is linear in log-log; outside them it follows the
        first line and the last, which is as steep as the largest points say: links let the first
        bytes of an exchange pass faster, and then one line through small and large ones is too low
        for these.
        """
        sizes, log_sizes, log_times = _logs(self.points)
        inside = np.clip(num_bytes, sizes[0], sizes[-1])
        times = np.exp(np.interp(np.log(inside), log_sizes, log_times))
        below = np.minimum(num_bytes - sizes[0], 0.0) * self.pieces[0].per_byte
        above = np.maximum(num_bytes - sizes[-1], 0.0) * self.per_byte * self._steeper
        return np.asarray(np.maximum(times + below + above, 0.0))

    @cached_property
    def _steeper(self) -> float:
        """Seconds of the largest sizes as measured, over those on the lines; the median."""
        largest = self.points[-1][0]
        pairs = [(t, self.fitted(m)) for m, t in self.points if m >= largest / LARGEST]
        return median(t / fitted if fitted else 1.0 for t, fitted in pairs)

    def fitted(self, num_bytes: float) -> float:
        """Seconds by the lines alone, which `seconds` uses only outside the points."""
        return _on_lines(self.pieces, num_bytes)

    def scaled(self, latency: float, bandwidth: float) -> Self:
        """The curve with its latency multiplied by ``latency`` and the rest by ``bandwidth``.

        The latency is that of the smallest sizes.
        """
        if not latency and not bandwidth:  # a group of one rank exchanges nothing
            points = tuple((num_bytes, 0.0) for num_bytes, _ in self.points)
            free = (Piece(start_bytes=0, startup=0.0, per_byte=0.0),)
            return type(self)(points=points, pieces=free, error_by_decade={}, trusted=True)
        fitted = self.fit(self._stretched(latency, bandwidth))
        doubts = {"trusted": self.trusted and fitted.trusted, "noise": self.noise}
        return fitted.model_copy(update=doubts)

    def slowed(self, latency: float, transfer: float) -> Curve:
        """The curve with its latency and the rest multiplied, lines and all: no line is fitted.

        `scaled` is for another network; this is for a thousand guesses about the same one.

        Example:
            >>> curve = Curve.fit([(1000, 0.002), (2000, 0.003), (4000, 0.005)]).slowed(1.0, 2.0)
            >>> round(curve.seconds(2000), 6), round(curve.seconds(8000), 6)
            (0.005, 0.017)
        """
        points = self._stretched(latency, transfer)
        pieces = tuple(
            piece.model_copy(
                update={"startup": piece.startup * latency, "per_byte": piece.per_byte * transfer}
            )
            for piece in self.pieces
        )
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        # not a copy, which would keep what was computed of the old points
        return type(self).model_construct(**fields | {"points": points, "pieces": pieces})

    def _stretched(self, latency: float, transfer: float) -> tuple[tuple[int, float], ...]:
        """The points with the latency and the rest of their seconds multiplied."""
        startup = self.latency
        return tuple(
            (m, min(t, startup) * latency + max(t - startup, 0.0) * transfer)
            for m, t in self.points
        )


# The simulator evaluates one curve thousands of times: its logarithms are computed once.
@lru_cache(maxsize=1024)
def _logs(points: tuple[tuple[int, float], ...]) -> tuple[Array, Array, Array]:
    """Sizes, and logarithms of sizes and of times."""
    sizes, times = np.array(points, dtype=float).T
    return sizes, np.log(sizes), np.log(np.maximum(times, 1e-30))


def _meeting(pieces: Sequence[Piece], start: int, startup: float, per_byte: float) -> int:
    """Place where the rounded line meets the last piece; ``start`` where rounding moved that too
    far."""
    if not pieces or per_byte == pieces[-1].per_byte:
        return start
    meeting = round((pieces[-1].startup - startup) / (per_byte - pieces[-1].per_byte))
    return meeting if meeting > pieces[-1].start_bytes else start


def _on_lines(pieces: Sequence[Piece], num_bytes: float) -> float:
    piece = next(p for p in reversed(pieces) if p.start_bytes <= num_bytes)
    return piece.startup + piece.per_byte * num_bytes


def _rounded(value: float) -> float:
    """Six significant digits, so that the file is readable; rounding residue of a zero is zero."""
    return float(f"{value:.6g}") if value > 1e-15 else 0.0


def _decade(num_bytes: float) -> str:
    """``10 KB..100 KB`` for 20,000 bytes."""
    power, units = math.floor(math.log10(num_bytes) + 1e-9), ("B", "KB", "MB", "GB", "TB")
    return "..".join(f"{10 ** (p % 3)} {units[p // 3]}" for p in (power, power + 1))
