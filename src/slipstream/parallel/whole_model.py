"""A model as a whole, however many ranks hold it: its state, its gradient norm, its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slipstream.errors import ModelError, UsageError
from slipstream.optim.shard_state import is_part
from slipstream.strategy import Row

if TYPE_CHECKING:
    from slipstream.parallel.pipeline.pipeline import Pipeline


class WholeModel:
    """The whole model and optimizer, of which this rank holds everything: torch's own verbs.

    ``ModelParallel`` overrides them for ranks that share a model; its verbs are collectives.

    Attributes:
        pipeline: runs forward and backward of a model that is cut into stages; None: it is not.
    """

    pipeline: Pipeline | None = None

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def complete(self) -> None:
        """Return when all parameters hold their newest values."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Inside, the model has the parameters that evaluate best: here, those that it has."""
        return nullcontext()

    def full_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` of the whole model, on every rank."""
        return dict(self._model.state_dict())

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state of the whole model.

        Raises:
            ModelError: it is another model's.
        """
        try:
            self._model.load_state_dict(state)
        except RuntimeError as error:  # torch's words name the keys
            raise ModelError(str(error)) from error

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """``optimizer.state_dict()`` as of the whole model, on every rank.

        Raises:
            UsageError: each rank has a part, and torch gathers the whole on one alone.
        """
        try:
            return self._optimizer.state_dict()
        except RuntimeError as error:
            if "has not been consolidated" not in str(error):
                raise
            raise UsageError(
                f"{type(self._optimizer).__name__} keeps a part of its state on each rank, and a "
                "checkpoint takes the whole from all of them; build its inner optimizer itself, "
                "with gradients: {transport: sharded}, which deals the state out, too, and saves "
                'it; or save session.checkpoint("model", "session"), and behind '
                "optimizer.consolidate_state_dict(to=0) rank 0's optimizer.state_dict()"
            ) from error

    def load_full_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's part of a state of the whole optimizer.

        Raises:
            UsageError: it is a single rank's part.
        """
        is_part(state)
        self._optimizer.load_state_dict(state)

    def sharded_optimizer_state_dict(self) -> dict[str, Any]:
        """The part of the optimizer's state that this rank saves, and which part it is: the whole,
        unless ranks share the update."""
        whole = self.full_optimizer_state_dict()
        return {"rank": 0, "ranks": 1, "shapes": {}, "optimizer": whole}

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that the norm of the whole model's is at most ``max_norm``."""
        return torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the whole model, on every rank."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(args, kwargs)
        return self._model(*args, **kwargs)

    def note_gradients(self) -> None:
        """The gradients are as the session has made them."""

    def check_gradients(self) -> None:
        """Refuse gradients that were clipped by the norm of this rank's part.

        Raises:
            UsageError: says what to call.
        """

    def abort(self, error: BaseException) -> None:
        """A backward pass raised ``error`` on this rank."""

    def check_in_step(self) -> None:
        """Refuse to go on where the ranks that share the model may be out of step.

        Raises:
            UsageError: says since when.
        """

    @property
    def failed(self) -> bool:
        """Whether the ranks that share the model may be out of step."""
        return False

    def is_local(self, name: str) -> bool:
        """Whether this rank has the parameter, or a shard of it."""
        return True

    @property
    def largest_shapes(self) -> Mapping[str, Sequence[int]] | None:
        """The shape of the largest shard of each split parameter, by name; None: none is split."""
        return None

    @property
    def local_tensors(self) -> list[torch.Tensor]:
        """The parameters that this rank has, and all buffers."""
        parameters = [p for name, p in self._model.named_parameters() if self.is_local(name)]
        return [*parameters, *self._model.buffers()]

    def close(self) -> None:
        """Restore the whole model on every rank."""

    def report_rows(self) -> list[Row]:
        """The mesh and this rank's part of the model, where that is not all of it."""
        return []
