"""``local: auto``: choose how rarely ranks meet, from the first updates and the live network.

Gradients are averaged while some updates are traced; then the network and the codecs are measured,
a few seconds, and the planner chooses. Where exchanging gradients is as fast, they go on.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch.distributed as dist

from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import Cluster
from slipstream.errors import SlipstreamError
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.local_cost import meeting_curves
from slipstream.planner.iteration.transport_cost import transport_kind
from slipstream.planner.network.profile import NetworkProfile
from slipstream.strategy import Int4Config, Int8Config, LocalConfig, Strategy
from slipstream.trace.event import Trace
from slipstream.transport.consistency import broadcast_from_first, collective_errors

WINDOW = 6
"""Updates that are traced."""
CALIBRATION_SECONDS = 4.0
CODECS = (Int8Config(), Int4Config())


class Meetings(Protocol):
    """Meetings that begin as soon as they are chosen; the session's."""

    @property
    def undecided(self) -> bool:
        """Whether a choice is still to come."""

    @property
    def in_use(self) -> LocalConfig | None:
        """The meetings of ranks; None: there are none, or not yet."""
        ...

    def decide(self, config: LocalConfig | None, reason: str) -> None:
        """Meet as ``config`` says; None: never."""


class LocalSearch:
    """Chooses after one window of traced updates; rank 0 decides for all.

    Args:
        strategy: the user's, with ``local: auto``.
        ranks: whose network is measured.
        control: a group of CPU tensors.
        meetings: begin as chosen.

    Attributes:
        steps: updates in the window.
        outcome: what was chosen and why, a sentence.
    """

    steps = WINDOW
    watch = None

    def __init__(
        self, strategy: Strategy, ranks: Cluster, control: dist.ProcessGroup, meetings: Meetings
    ) -> None:
        assert strategy.local is not None
        updates, warm_up = strategy.local.updates, strategy.local.warm_up
        self._updates = None if updates is None else max(updates - warm_up, 0)  # that meet
        self._base = strategy.model_copy(update={"local": None})
        self._ranks, self._control, self._meetings = ranks, control, meetings
        self.outcome = ""

    @property
    def settled(self) -> bool:
        """Whether the choice no longer changes; a restored run may have brought it."""
        return not self._meetings.undecided

    @property
    def in_use(self) -> dict[str, Any]:
        """The meetings of ranks, in the place of what the strategy says."""
        config = self._meetings.in_use
        return {"local": None if config is None else config.document(full=True)}

    def changed(self, update: int) -> bool:
        """Whether it begins anew: never."""
        return False

    def proceed(self, trace: Trace | None) -> bool:
        """Choose from a traced window, which rank 0 has; a collective. No other window follows."""
        with collective_errors("the measurement of the network for local: auto"):
            network = calibrate(
                self._ranks,
                sizes=SIZES[::2],
                seconds=CALIBRATION_SECONDS,
                rounds=3,
                curves=meeting_curves(transport_kind(self._base.gradients.transport)),
                codecs=CODECS,
                merging=True,
            )
            decision = None if trace is None else self._choose(trace, network)
            agreed = broadcast_from_first(decision, self._control)
        assert agreed is not None
        config, self.outcome = agreed
        if trace is not None:
            print(f"slipstream: local: auto: {self.outcome}", file=sys.stderr)
        self._meetings.decide(config, self.outcome)
        return False

    def _choose(self, trace: Trace, network: NetworkProfile) -> tuple[LocalConfig | None, str]:
        try:
            forecast = Forecast.of(trace, network, self._base, self._updates)
            found = forecast.meetings(forecast.rank([self._base]))
        except SlipstreamError as error:  # the training goes on as it does
            return None, f"gradients are exchanged at every update: {error}"
        if found.strategy is None:
            return None, f"gradients are exchanged at every update: {found.reason}"
        return found.strategy.local, found.reason
