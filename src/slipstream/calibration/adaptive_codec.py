"""``codec: adaptive`` in a session: which segments are worth coding on this network.

Never codes anything, and never changes a segment: it says yes or no to each when they are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.calibration.calibrate import calibrate
from slipstream.cluster.connect import Cluster
from slipstream.planner.cost import CodecCost, Curve
from slipstream.strategy import Adaptive, Half

CALIBRATION_SECONDS = 3.0
SIZES = (2**12, 2**16, 2**20, 2**23)
"""Bytes of the exchanges that are measured."""


@dataclass(frozen=True)
class CodecDecision:
    """What coding a segment saves: more than 0 where it pays."""

    all_reduce: Curve
    cost: CodecCost
    rounds: int
    """Exchanges, one behind the other, of a coded segment."""

    def saved(self, num_bytes: int) -> float:
        """Seconds that coding a segment of so many bytes saves, of network and of computing.

        Coded, each of its exchanges carries a part of what is sent and waits once.
        """
        wire = max(num_bytes * self.cost.ratio / self.rounds, 1.0)
        coded = self.rounds * self.all_reduce.seconds(wire)
        coding = (self.cost.encode + self.cost.decode) * num_bytes + 2 * self.cost.startup
        return self.all_reduce.seconds(max(num_bytes, 1)) - coded - coding

    def pays(self, num_bytes: int) -> bool:
        """Whether that is more than nothing."""
        return self.saved(num_bytes) > 0


def measure(config: Adaptive, ranks: Cluster) -> CodecDecision:
    """Measure network and codec on all ranks at once; every rank gets the same.

    Raises:
        ExchangeError: another rank is gone.
    """
    measured = calibrate(
        ranks, sizes=SIZES, seconds=CALIBRATION_SECONDS, rounds=3, codecs=[config.codec]
    )
    cost = measured.codecs[config.codec.kind]
    rounds = 1 if isinstance(config.codec, Half) else 2
    return CodecDecision(measured.network("world").all_reduce, cost, rounds)
