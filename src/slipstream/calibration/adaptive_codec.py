"""``codec: adaptive``: decide which segments are worth coding on this network."""

from __future__ import annotations

from typing import NamedTuple

from slipstream.calibration.codec_cost import slowest_cost
from slipstream.calibration.collective_timer import CollectiveTimer
from slipstream.cluster.connect import Cluster
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.network.curve import Curve
from slipstream.strategy import AdaptiveConfig
from slipstream.transport.consistency import broadcast_from_first, collective_errors

CALIBRATION_SECONDS = 1.0
"""For the all-reduces that are timed."""
SIZES = (2**12, 2**16, 2**20, 2**23)
"""Bytes of the all-reduces that are measured."""


class CodecDecision(NamedTuple):
    """Decides by the seconds that coding a segment saves.

    ``rounds`` is the number of exchanges, one after the other, of a coded segment.
    """

    all_reduce: Curve
    cost: CodecCost
    rounds: int

    def saved(self, num_bytes: int) -> float:
        """Seconds of network and compute that coding a segment of so many bytes saves.

        Each exchange of a coded segment carries its share of what is sent and has its own latency.
        """
        wire = max(num_bytes * self.cost.ratio / self.rounds, 1.0)
        coded = self.rounds * self.all_reduce.seconds(wire)
        coding = (self.cost.encode + self.cost.decode) * num_bytes + 2 * self.cost.startup
        return self.all_reduce.seconds(max(num_bytes, 1)) - coded - coding

    def pays(self, num_bytes: int) -> bool:
        """Whether coding saves time."""
        return self.saved(num_bytes) > 0


def measure(config: AdaptiveConfig, ranks: Cluster) -> CodecDecision:
    """Measure the all-reduce and the codec, which is all that the decision reads.

    A collective: all ranks call this, and all get the decision of rank 0.

    Raises:
        ClusterError: there is only one rank.
        ExchangeError: another rank is gone.
    """
    timer = CollectiveTimer(ranks, SIZES, rounds=3)
    with collective_errors("the measurement for codec: adaptive"):
        all_reduce, _ = timer.curve("all_reduce", timer.world, CALIBRATION_SECONDS)
        cost = slowest_cost(config.codec, timer.world, ranks.device)
        rounds = 1 if config.codec.summed else 2
        # Curves are fitted on each rank: a last bit of difference would code other segments.
        return broadcast_from_first(CodecDecision(all_reduce, cost, rounds), timer.world)
