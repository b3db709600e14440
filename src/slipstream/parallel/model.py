"""One model on several ranks: layers split, the chain of layers cut, or both; and it as a whole.

Never splits or cuts by itself: the room ``parallel`` does. Layers are split first, so that a stage
of the pipeline holds its share of them; what is whole again is put together in reverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.comm import group_of
from slipstream.parallel.clip import clip_grad_norm_
from slipstream.parallel.dims import ParallelDims
from slipstream.parallel.full_state import FullState
from slipstream.parallel.pipeline.pipeline import Pipeline
from slipstream.parallel.tensor.plans import plan_of
from slipstream.parallel.tensor.split import SplitLayers, split_layers
from slipstream.strategy import Parallel, Row
from slipstream.trace.recorder import Recorder
from slipstream.transport import broadcast
from slipstream.transport.consistency import collective_errors


class ModelParallel(FullState):
    """A model that several ranks share, as a strategy says.

    Attributes:
        split: its layers over tensor ranks, if they are.
        pipeline: its stages, if it is cut.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Parallel,
        axes: ParallelDims,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(model, optimizer)
        self._axes = axes
        self._numel = sum(p.numel() for p in model.parameters())
        if axes.model is not None:
            broadcast.broadcast([*model.parameters(), *model.buffers()], axes.model)
        self.split: SplitLayers | None = None
        if config.tensor is not None:
            self.split = split_layers(model, axes.tensor, plan_of(config.tensor, model), optimizer)
        if config.pipeline is not None:
            self.pipeline = Pipeline(
                model,
                axes.pipeline,
                cut=config.pipeline.cut,
                schedule=config.pipeline.schedule,
                micro_batches=config.pipeline.micro_batches,
                recorder=recorder,
            )

    def is_local(self, name: str) -> bool:
        """Whether this rank has the parameter or its share of it."""
        return self.pipeline is None or self.pipeline.stage_parameters.holds(name)

    @property
    def largest_shapes(self) -> Mapping[str, torch.Size] | None:
        """The shapes of the largest shares of split parameters, by name; None: none is split."""
        return None if self.split is None else self.split.shares

    def full_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` of the whole model, on every rank; all of them call it."""
        state: dict[str, Any] = dict(self._model.state_dict())
        if self.pipeline is not None:
            state = self.pipeline.full_state_dict()
        return state if self.split is None else self.split.joined(state)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of a state of the whole model.

        Raises:
            ModelError: the state is another model's.
        """
        if self.pipeline is None:
            assert self.split is not None
            self.split.load_full_state_dict(state)
        else:
            own = state if self.split is None else self.split.cut(state)
            self.pipeline.load_full_state_dict(dict(own))

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """``optimizer.state_dict()`` as of the whole model, on every rank; all of them call it."""
        state = self._optimizer.state_dict()
        if self.split is not None:
            state = self.split.full_optimizer_state_dict(self._optimizer)
        if self.pipeline is None or self._axes.pipeline is None:
            return state
        named = {p: name for name, p in self._model.named_parameters()}
        order = [named[p] for group in self._optimizer.param_groups for p in group["params"]]
        own = {i: kept for i, kept in state["state"].items() if self.is_local(order[i])}
        every: list[Any] = [None] * self._axes.mesh.pipeline
        with collective_errors("the gathering of the optimizer's state"):
            dist.all_gather_object(every, own, group=self._axes.pipeline)
        return {**state, "state": {i: kept for part in reversed(every) for i, kept in part.items()}}

    def load_full_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's part of what `full_optimizer_state_dict` gave."""
        named = {p: name for name, p in self._model.named_parameters()}
        order = [named[p] for group in self._optimizer.param_groups for p in group["params"]]
        own = {i: kept for i, kept in state["state"].items() if self.is_local(order[i])}
        if self.split is None:
            self._optimizer.load_state_dict({**state, "state": own})
        else:
            part = {**state, "state": own}
            self.split.load_full_optimizer_state_dict(self._optimizer, part)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that the norm of the whole model's is at most ``max_norm``."""
        counted = [
            p
            for name, p in self._model.named_parameters()
            if p.grad is not None and self._answers_for(name)
        ]
        assert self._axes.model is not None
        group = group_of(self._axes.model, check=False)
        return clip_grad_norm_(self._model.parameters(), counted, max_norm, group)

    def close(self) -> None:
        """Every rank has the whole model and its optimizer's state again; all of them call it."""
        state = self.full_optimizer_state_dict() if self.pipeline is not None else None
        if self.pipeline is not None:
            self.pipeline.close()
        if self.split is not None:
            self.split.close()
        if state is not None:
            self._optimizer.load_state_dict(state)

    def report_rows(self) -> list[Row]:
        """What became of it, for the overview."""
        sizes = [f"{size} {axis}" for axis, size in self._axes.mesh.sizes.items() if size > 1]
        held = sum(p.numel() for n, p in self._model.named_parameters() if self.is_local(n))
        share = f"this rank holds {held / 1e6:.3g} of {self._numel / 1e6:.3g} M parameters"
        return [Row("parallel", " x ".join(sizes), share)]

    def _answers_for(self, name: str) -> bool:
        """Whether this rank's gradient counts in a norm: replicas count once."""
        if self.pipeline is not None:
            stage_parameters = self.pipeline.stage_parameters
            if stage_parameters.ranks[name][0] != stage_parameters.rank:
                return False
        split = self.split is not None and name in self.split.shards
        return split or self._axes.tensor.rank == 0
