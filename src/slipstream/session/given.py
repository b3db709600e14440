"""Values that the steps of an installation have in common."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.checks.own_view import UpdateCount
from slipstream.cluster.connect import Cluster
from slipstream.parallel.dims import ParallelDims
from slipstream.session.handles import HandleStack
from slipstream.strategy import CodecConfig, Strategy
from slipstream.trace.recorder import Recorder
from slipstream.tuner.search_space import SearchSpace


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments that the steps of an installation share. What is installed keeps those that it
    needs, and not this: it holds the handles, and they hold what is installed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    cluster: Cluster
    dims: ParallelDims
    recorder: Recorder | None
    space: SearchSpace
    handles: HandleStack
    explaining: Callable[[], AbstractContextManager[object]]
    """Turns an exchange that failed inside into an error that says why."""
    name: str | None
    """Of the session, on all its ranks; None: there is one rank."""
    progress: UpdateCount
    """Is told of each update."""

    @property
    def codec(self) -> CodecConfig | None:
        """Gradient codec; None without data-parallel peers."""
        return self.strategy.gradients.codec if self.dims.data is not None else None

    @property
    def looks(self) -> bool:
        """Whether gradients that are not finite are looked for."""
        return self.strategy.checks.nonfinite != "allow"
