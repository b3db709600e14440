"""What a session saves and goes on from: the states of its parts, gathered and dealt out.

Never says what a state is as a value: ``checkpoint`` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from slipstream.gradients.engine import Engine
from slipstream.parallel.dims import ParallelDims
from slipstream.parallel.model import ModelParallel
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session import checkpoint
from slipstream.strategy import Split, Strategy, keeps_state
from slipstream.transport.consistency import agree
from slipstream.tuner.online_split import OnlineSplit


class Saving:
    """The state of a session, out of the parts that ``accelerate()`` has put together.

    Args:
        model: the user's.
        strategy: of the session.
        names: of the trainable parameters that this rank holds.
        engine: None: nothing is exchanged.
        axes: all ranks.
        shared: None: every rank has the whole model.
        online_split: None: no split is searched for.
        precision: of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        names: Sequence[str],
        engine: Engine | None,
        dims: ParallelDims,
        shared: ModelParallel | None,
        online_split: OnlineSplit | None,
        precision: ModelPrecision,
    ) -> None:
        self._model, self._names = model, names
        self._engine, self._dims, self._shared = engine, dims, shared
        self._online_split, self._precision = online_split, precision
        self._control = dims.control
        # the same on every rank, whatever codecs keep so far
        self._codecs_keep = self._control is not None and keeps_state(strategy.gradients.codec)

    def state(self, steps: int) -> dict[str, Any]:
        """What ``Session.state_dict`` returns after so many updates."""
        order = self._engine.order if self._engine else None
        kept = self._engine.codec_state() if self._engine else {}
        codecs = []
        if self._codecs_keep:
            assert self._control is not None
            codecs = checkpoint.gathered(kept, self._control)
        split, scale = self._chosen_split(), self._precision.state_dict()
        state = checkpoint.state_of(steps, split, order, self._names, codecs, scale)
        if self._shared is not None and self._shared.pipeline is not None:
            assert self._control is not None
            state["ready_order"] = checkpoint.joined_order(state["ready_order"], self._control)
        return state

    def load(self, state: dict[str, Any]) -> int:
        """Go on from ``state()``; returns how many updates are done.

        Raises:
            UsageError: the state is another version's or another model's.
            MismatchError: ranks load different states.
        """
        mesh = self._dims.mesh
        ranks = mesh.data * mesh.model_parallel if self._shared is not None else None
        every = [name for name, p in self._model.named_parameters() if p.requires_grad]
        error = checkpoint.refusal(state, every, ranks)
        if self._control is not None:
            agree({"state": checkpoint.digest(state)}, self._control, error)
        elif error is not None:
            raise error
        if state["codecs"] and not self._codecs_keep:
            warnings.warn(
                "the state holds what codecs have not sent yet, but this run has no such codec: "
                "that part of the gradients is lost",
                stacklevel=3,
            )
        steps: int = state["steps"]
        self._precision.load_state_dict(state.get("loss_scale"))
        order = checkpoint.order_of(state, self._names)
        if self._engine is not None:
            self._engine.updated(steps)
            if order is not None:
                self._engine.install(order)
        if self._online_split is not None and state["split"] is not None:
            chosen = Strategy.load({"gradients": {"split": state["split"]}}).gradients.split
            self._online_split.settle(chosen, "chosen before the checkpoint")
        if self._engine is not None and self._codecs_keep and state["codecs"]:
            # behind the last change of the layout: who serves which piece depends on it
            kept = state["codecs"]
            if self._shared is not None:
                kept = [kept[rank] for rank in self._dims.data_ranks]
            kept = checkpoint.dealt_out(kept, self._dims.data_rank, self._dims.data_size)
            self._engine.load_codec_state(kept)
        return steps

    def _chosen_split(self) -> Split | None:
        """What the search for the best split has settled on, if it has."""
        if self._online_split is None or self._engine is None or not self._online_split.settled:
            return None
        return self._engine.split
