"""Choose regions at the end of the first forward, from how its blocks were called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.errors import StrategyError, UsageError
from slipstream.memory.forward_override import Forward, ForwardOverride
from slipstream.memory.recompute.block_dataflow import Call, DataflowRecorder
from slipstream.memory.recompute.budget import (
    BlockCost,
    RegionParts,
    cheapest,
    peak_bytes,
    seconds,
    segments,
)
from slipstream.memory.recompute.chain import Chain
from slipstream.memory.recompute.measure import measure
from slipstream.memory.recompute.rng_state import generators_of
from slipstream.strategy.memory import BudgetBytesConfig, BudgetConfig, EveryConfig

PlannedConfig = EveryConfig | BudgetConfig | BudgetBytesConfig
Decision = tuple[Sequence[str], RegionParts] | StrategyError
"""The names of the blocks in order and their plan, or why there is none."""


@dataclass(frozen=True, slots=True)
class RegionPrediction:
    """The blocks of a model in an iteration, as measured and planned (see ``budget``).

    Attributes:
        num_bytes: peak of their activations.
        plain_bytes: the same without recomputation.
        seconds: of their forward and backward.
        plain_seconds: the same without recomputation.
        costs: measured costs of each block.
    """

    num_bytes: int
    plain_bytes: int
    seconds: float
    plain_seconds: float
    costs: tuple[BlockCost, ...]


class RegionPlanner:
    """Observes the blocks of a chain in the first forward, then installs regions on it.

    Attributes:
        prediction: of the chosen plan, for a budget after the first forward.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        config: PlannedConfig,
        agree: Callable[[Decision], Decision],
    ) -> None:
        self._model, self._chain, self._config, self._agree = model, chain, config, agree
        self._in_forward = False  # of the model, as opposed to calls of blocks from elsewhere
        self.prediction: RegionPrediction | None = None
        self._reset()
        chain.observer = self
        # No forward hooks on the model: copies of the model would have them, too.
        self._override = ForwardOverride(model, self._forward)

    def _reset(self) -> None:
        self._recorder = DataflowRecorder(generators_of(self._model.modules()))
        self._costs: list[BlockCost] = []

    def close(self) -> None:
        """Restore the model's forward; let go of the process group that ``agree`` holds."""
        self._override.remove()
        self._agree = lambda decision: decision

    def _forward(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The forward of the model: marks its begin, and the end of the first one."""
        self._chain.begin()
        if self._chain.observer is None:
            return forward(*args, **kwargs)
        self._reset()  # forgets a forward that did not reach its end
        self._in_forward = True
        output = forward(*args, **kwargs)
        if self._chain.observer is not None:
            self.decide()
        return output

    def before_call(self, name: str, forward: Forward, call: Call) -> None:
        """A block is about to run: record its arguments, and measure it for a budget.

        A second call of a block means that it is used twice, or that a part of the model is called
        without the model (as a pipeline stage is), so that no end of the first forward is seen:
        regions are chosen now.

        Raises:
            UsageError: the block is used twice in one forward, so a budget cannot be met.
        """
        if name in self._recorder.order:
            if self._in_forward and not isinstance(self._config, EveryConfig):
                raise UsageError(
                    f"memory.recompute {self._config.kind}: {name} is called twice in one forward, "
                    "but a budget is divided among blocks that are called once; use "
                    "memory.recompute: {every: 1}"
                )
            self.decide()
            self._chain.begin()
            return
        self._recorder.before(name, call)
        if not isinstance(self._config, EveryConfig):
            self._costs.append(measure(self._chain.blocks[name], forward, call))

    def after_call(self, call: Call, output: Any) -> None:
        """A block has returned."""
        self._recorder.after(call, output)

    def decide(self) -> None:
        """Install the regions that this rank, or the rank that ``agree`` follows, has chosen.

        Raises:
            StrategyError: the budget is too low.
        """
        self._in_forward = False
        if not self._recorder.order:
            return  # a forward without gradients
        try:
            own: Decision = (tuple(self._recorder.order), self._plan())
        except StrategyError as error:
            own = StrategyError(f"memory.recompute.{self._config.kind}: {error}")
        decision = self._agree(own)
        if isinstance(decision, StrategyError):
            self._reset()
            raise decision
        order, parts = decision
        same_order = list(order) == self._recorder.order
        self._chain.observer = None
        self._chain.install(order, parts, self._recorder.links if same_order else {})
        if self._costs:
            costs, plans = tuple(self._costs), (parts, tuple(range(len(self._costs))))
            num_bytes, plain_bytes = (peak_bytes(plan, costs) for plan in plans)
            took, plain_took = (seconds(plan, costs) for plan in plans)
            self.prediction = RegionPrediction(num_bytes, plain_bytes, took, plain_took, costs)
        self._reset()  # lets go of tensors of the last block

    def _plan(self) -> RegionParts:
        order, links = self._recorder.order, self._recorder.links
        borders = {number for number, name in enumerate(order) if name not in links}
        match self._config:
            case EveryConfig():
                return segments(len(order), self._config.every, borders)
            case BudgetConfig():
                limit = int(self._config.budget * sum(cost.saved for cost in self._costs))
            case BudgetBytesConfig():
                limit = self._config.budget_bytes
        return cheapest(self._costs, limit, borders)
