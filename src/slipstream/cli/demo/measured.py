"""The demo's measurements as a value, and what they say: how many times as fast as DDP."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from slipstream.cli.demo.codec_choice import Candidate
from slipstream.errors import TraceError
from slipstream.files.write import write_whole
from slipstream.trace.chrome import load_json
from slipstream.tuner.significance import median_interval

DDP, EXACT, LOSSY, ALONE = "DDP", "slipstream, exact", "slipstream, lossy", "no exchange"
LOCAL = "slipstream, local"
ROUNDING = 1e-5
"""How far the exact training may be from DDP after one step: float32 sums in another order."""


@dataclass(frozen=True)
class Measured:
    """The measurements of all ranks.

    Mappings are by training; that with a codec is missing where no ``codec`` pays. ``seconds`` are
    those of each timed iteration on the slowest rank. ``apart_after_one_step`` is the largest
    relative difference from DDP of a parameter or its momentum. ``reason`` says why the exact
    training uses its ``transport`` and split. ``tried`` are seconds of an iteration with each codec
    that was predicted to be worth it; ``codec`` is the fastest of them.
    """

    nodes: int
    network: str
    model: str
    gradients: int
    parameters: int
    batch: int
    ddp_megabytes: int
    transport: str
    reason: str
    candidates: list[Candidate]
    tried: dict[str, float]
    codec: str | None
    seconds: dict[str, list[float]]
    exchanges: dict[str, int]
    apart_after_one_step: dict[str, float]
    final_loss: dict[str, float]
    accuracy: dict[str, float]
    versions: dict[str, str]

    @property
    def trainings(self) -> list[str]:
        """The trainings that exchange, DDP first."""
        return [name for name in (DDP, EXACT, LOSSY, LOCAL) if name in self.exchanges]

    @property
    def is_exact(self) -> bool:
        """Whether the exact training did what DDP did, up to rounding."""
        return self.apart_after_one_step[EXACT] <= ROUNDING

    def write(self, path: Path) -> None:
        """Write the numbers and what they say as JSON."""
        gains = {name: gain(self, name)._asdict() for name in self.trainings if name != DDP}
        write_whole(path, json.dumps(asdict(self) | {"gains": gains}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Measured:
        """The inverse of ``write``.

        Raises:
            TraceError: the ranks wrote no such file.
        """
        if not path.is_file():
            raise TraceError(f"the demo wrote no numbers to {path}; its output says why")
        document: dict[str, Any] = load_json(path, "a file of slipstream demo")
        document.pop("gains")
        candidates = [Candidate(*values) for values in document.pop("candidates")]
        return cls(**document, candidates=candidates)


class Gain(NamedTuple):
    """Times as fast as DDP: the median over paired iterations of DDP's time over the other.

    ``low`` and ``high`` bound its 95 % confidence interval; None: too few iterations for one.
    """

    times: float
    low: float | None = None
    high: float | None = None

    def in_words(self, than: str = "") -> str:
        """The number, its interval, and what that leaves open.

        Example:
            >>> Gain(1.5, 1.4, 1.6).in_words(" as fast as DDP")
            '1.50x as fast as DDP (1.40 .. 1.60)'
            >>> Gain(1.01, 0.98, 1.03).in_words(), Gain(0.9).in_words()
            ('1.01x (0.98 .. 1.03), too close to say', '0.90x (too few iterations to say)')
        """
        if self.low is None or self.high is None:
            return f"{self.times:.2f}x{than} (too few iterations to say)"
        proof = "" if self.low > 1 else ", slower" if self.high < 1 else ", too close to say"
        return f"{self.times:.2f}x{than} ({self.low:.2f} .. {self.high:.2f}){proof}"


def gain(measured: Measured, name: str) -> Gain:
    """Compare a training with DDP."""
    ratios = list(map(truediv, measured.seconds[DDP], measured.seconds[name]))
    return Gain(median(ratios), *(median_interval(ratios) or ()))


def headline(measured: Measured) -> str:
    """The gains in a line."""
    words = f"exact: {gain(measured, EXACT).in_words(' as fast as DDP')}"
    if measured.codec is None:
        words += "; no codec is predicted to pay here"
    else:
        words += f"; with {measured.codec} (lossy): {gain(measured, LOSSY).in_words()}"
    return f"{words}; local (lossy): {gain(measured, LOCAL).in_words()}"
