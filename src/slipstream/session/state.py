"""What a session saves and restores: the states of its parts, gathered from and dealt to all ranks.

The format of a state, as plain values, is that of ``checkpoint``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from slipstream.gradients.interface import GradientEngine
from slipstream.parallel.dims import ParallelDims
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session import checkpoint
from slipstream.strategy import Codec, Strategy, keeps_state
from slipstream.transport.consistency import agree
from slipstream.tuner.online_split import OnlineSplit


class SessionState:
    """Saves and restores the parts of a session.

    Args:
        model: the user's.
        names: of the trainable parameters that this rank holds.
        engine: has the ready order and the codecs' state.
        dims: all ranks.
        online_split: the search for the split; None: there is none.
        precision: has the loss scale.
        codec: of the strategy.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        engine: GradientEngine,
        dims: ParallelDims,
        online_split: OnlineSplit | None,
        precision: ModelPrecision,
        codec: Codec | None,
    ) -> None:
        self._model, self._names = model, names
        self._engine, self._dims, self._precision = engine, dims, precision
        self._online_split = online_split
        # from the strategy: all ranks must decide alike whether to gather, whatever they keep
        self._codecs_keep_state = keeps_state(codec)

    def state(self, steps: int) -> dict[str, Any]:
        """What ``Session.state_dict`` returns after ``steps`` updates; a collective."""
        control, codecs = self._dims.control, []
        if control is not None and self._codecs_keep_state:
            codecs = checkpoint.gathered(self._engine.codec_state(), control)
        order = checkpoint.order_document(self._engine.order, self._names)
        if control is not None and self._dims.mesh.pipeline > 1:
            order = checkpoint.joined_order(order, control)
        split = None if self._online_split is None else self._online_split.chosen
        return checkpoint.state_of(steps, split, order, codecs, self._precision.state_dict())

    def load(self, state: dict[str, Any]) -> int:
        """Restore ``state()``; returns the number of updates so far. A collective.

        Raises:
            UsageError: the state is another version's or another model's.
            MismatchError: ranks load different states.
        """
        mesh, control = self._dims.mesh, self._dims.control
        sharded = mesh.model_parallel > 1
        trainable = [name for name, p in self._model.named_parameters() if p.requires_grad]
        ranks = mesh.data * mesh.model_parallel if sharded else None
        error = checkpoint.refusal(state, trainable, ranks)
        if control is not None:
            agree({"state": checkpoint.digest(state)}, control, error)
        elif error is not None:
            raise error
        keeps_codecs = control is not None and self._codecs_keep_state
        if state["codecs"] and not keeps_codecs:
            warnings.warn(
                "the state holds what codecs have not sent yet, but this run has no such codec: "
                "that part of the gradients is lost",
                stacklevel=3,
            )
        steps: int = state["steps"]
        self._precision.load_state_dict(state.get("loss_scale"))
        self._engine.updated(steps)
        order = checkpoint.order_of(state, self._names)
        if order is not None:
            self._engine.install(order)
        if self._online_split is not None and state["split"] is not None:
            chosen = Strategy.load({"gradients": {"split": state["split"]}}).gradients.split
            self._online_split.settle(chosen, "chosen before the checkpoint")
        if keeps_codecs and state["codecs"]:
            # after the last change of the layout, which says who serves which piece
            codecs = state["codecs"]
            if sharded:
                codecs = [codecs[rank] for rank in self._dims.data_ranks]
            local = checkpoint.dealt_out(codecs, self._dims.data_rank, self._dims.data_size)
            self._engine.load_codec_state(local)
        return steps
