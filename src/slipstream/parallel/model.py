"""Applies a strategy's model parallelism to a model, and gathers the whole model's state.

Layers are split first, then the model is split into stages, so that a stage holds its shards of
layers; `ModelParallel.close` undoes both in reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.comm import group_of
from slipstream.errors import UsageError
from slipstream.parallel.checks import cut_of
from slipstream.parallel.clip import clip_grad_norm_
from slipstream.parallel.dims import ParallelDims, gather_objects
from slipstream.parallel.part_of_model import PartOfModel
from slipstream.parallel.pipeline.pipeline import Pipeline
from slipstream.parallel.tensor.plans import plan_of
from slipstream.parallel.tensor.split import SplitLayers, split_layers
from slipstream.parallel.whole_model import WholeModel
from slipstream.strategy import ParallelConfig, Row
from slipstream.trace.recorder import Recorder
from slipstream.transport import broadcast


class ModelParallel(WholeModel):
    """A model that is spread over several ranks, as a strategy says.

    Attributes:
        split: its split layers; None without tensor parallelism.
        pipeline: its stages; None without pipeline parallelism.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: ParallelConfig,
        dims: ParallelDims,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(model, optimizer)
        self._dims = dims
        self._num_parameters = sum(p.numel() for p in model.parameters())
        if dims.model is not None:
            broadcast.broadcast([*model.parameters(), *model.buffers()], dims.model)
        cut = cut_of(model, config.pipeline) if config.pipeline is not None else ()
        self.split: SplitLayers | None = None
        if config.tensor is not None:
            self.split = split_layers(model, dims.tensor, plan_of(config.tensor, model), optimizer)
        if config.pipeline is not None:
            settings = config.pipeline.model_dump(exclude={"ranks", "cut"})
            self.pipeline = Pipeline(model, dims.pipeline, cut=cut, recorder=recorder, **settings)
        self._part: PartOfModel | None = None
        if dims.model is not None:
            shards = {} if self.split is None else self.split.shards
            names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
            parts = {n for n in names if n in shards or not self.is_local(n)}
            self._part = PartOfModel(model, parts)

    def is_local(self, name: str) -> bool:
        """Whether this rank has the parameter, or its shard of it."""
        return self.pipeline is None or self.pipeline.stage_parameters.is_local(name)

    @property
    def largest_shapes(self) -> Mapping[str, torch.Size] | None:
        """The shape of the largest shard of each split parameter, by name; None: none is split."""
        return None if self.split is None else self.split.largest_shapes

    def full_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` of the whole model, on every rank. Collective."""
        with self._inside():
            if self.pipeline is None:
                state: dict[str, Any] = dict(self._model.state_dict())
            else:
                state = self.pipeline.full_state_dict()
        return state if self.split is None else self.split.gather_state(state)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state of the whole model.

        Raises:
            ModelError: the state is another model's.
        """
        with self._inside():
            if self.pipeline is None:
                assert self.split is not None
                self.split.load_full_state_dict(state)
            else:
                shards = state if self.split is None else self.split.shard_state(state)
                self.pipeline.load_full_state_dict(dict(shards))

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """``optimizer.state_dict()`` as of the whole model, on every rank. Collective."""
        self.check_in_step()
        state = self._optimizer.state_dict()
        if self.split is not None:
            state = self.split.full_optimizer_state_dict(self._optimizer)
        if self.pipeline is None or self._dims.pipeline is None:
            return state
        local, what = self._local_entries(state), "the optimizer's state"
        stages = gather_objects(local, what, self._dims.pipeline)
        # In reverse, so that of a parameter on several stages the first stage's state remains.
        merged = {index: entry for stage in reversed(stages) for index, entry in stage.items()}
        return {**state, "state": merged}

    def load_full_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's part of a state from `full_optimizer_state_dict`."""
        local_state = {**state, "state": self._local_entries(state)}
        if self.split is None:
            self._optimizer.load_state_dict(local_state)
        else:
            self.split.load_full_optimizer_state_dict(self._optimizer, local_state)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that the norm of the whole model's is at most ``max_norm``."""
        counted = [p for name, p in self._model.named_parameters() if self._counts_in_norm(name)]
        assert self._dims.model is not None
        group = group_of(self._dims.model, check=False)
        norm = clip_grad_norm_(self._model.parameters(), counted, max_norm, group)
        self.note_gradients()
        return norm

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the whole model, on every rank."""
        self.check_in_step()
        return super().evaluate(args, kwargs)

    def note_gradients(self) -> None:
        """The gradients are as the session has made them."""
        if self._part is not None:
            self._part.note_gradients()

    def check_gradients(self) -> None:
        """Refuse gradients that were clipped by the norm of this rank's part."""
        if self._part is not None:
            self._part.check_gradients()

    def abort(self, error: BaseException) -> None:
        """A backward pass raised ``error`` on this rank, and maybe on no other."""
        if self._part is not None and (self.pipeline is None or self.pipeline.failure is not None):
            self._part.fail(error)

    def check_in_step(self) -> None:
        """Refuse to go on where this rank has left a backward pass by an error."""
        if self._part is not None:
            self._part.check()

    @property
    def failed(self) -> bool:
        """Whether the ranks that share the model may be out of step."""
        return self._part is not None and self._part.failed

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Inside, the model gives and takes this rank's part."""
        self.check_in_step()
        if self._part is None:
            yield
            return
        with self._part.inside():
            yield

    def close(self) -> None:
        """Restore the whole model and its optimizer's state on every rank. Collective."""
        if self._part is not None:
            self._part.close()
        state = self.full_optimizer_state_dict() if self.pipeline is not None else None
        if self.pipeline is not None:
            self.pipeline.close()
        if self.split is not None:
            self.split.close()
        if state is not None:
            self._optimizer.load_state_dict(state)

    def abandon(self) -> None:
        """Leave the model as it is after an error, of no use, and the groups to other ranks."""
        if self._part is not None:
            self._part.fail(UsageError("a session that ended with an error"))
        if self.pipeline is not None:
            self.pipeline.abandon()
        if self.split is not None:
            self.split.abandon()

    def report_rows(self) -> list[Row]:
        """The mesh and this rank's part of the model, for the session's report."""
        sizes = [f"{size} {axis}" for axis, size in self._dims.mesh.sizes.items() if size > 1]
        local = sum(p.numel() for n, p in self._model.named_parameters() if self.is_local(n))
        parameters = f"{local / 1e6:.3g} of {self._num_parameters / 1e6:.3g} M parameters"
        rows = [Row("parallel", " x ".join(sizes), f"this rank holds {parameters}")]
        if self.pipeline is not None:
            paths = ", ".join(self.pipeline.split_points.paths)
            rows.append(Row("stages", f"begin at {paths}", "the first one with the model"))
        return rows

    def _local_entries(self, state: Mapping[str, Any]) -> dict[Any, Any]:
        """Select the entries of an optimizer's state for parameters that this rank has, by index,
        and those of no parameter."""
        names = {p: name for name, p in self._model.named_parameters()}
        order = [names[p] for group in self._optimizer.param_groups for p in group["params"]]
        return {
            index: entry
            for index, entry in state["state"].items()
            if not isinstance(index, int) or self.is_local(order[index])
        }

    def _counts_in_norm(self, name: str) -> bool:
        """Whether this rank's gradient counts in a norm: of replicas the first one does."""
        if self.pipeline is not None and not self.pipeline.stage_parameters.is_owner(name):
            return False
        is_split = self.split is not None and name in self.split.shards
        return is_split or self._dims.tensor.rank == 0
