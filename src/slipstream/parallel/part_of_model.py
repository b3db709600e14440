"""Refuses what would take a rank's part of a model for the whole: states, copies, files, clipping.

Where ranks share a model, each has the shards or the stages of its own. torch's verbs on the model
know nothing of the other ranks, so each of them would save, load, copy or clip a part, and most of
them without an error. Those of the session gather all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.gradients.finite import stored
from slipstream.plain_copy import refuse_copies


class PartOfModel:
    """Guards a model of which this rank has a part, until `close`.

    Args:
        model: the root.
        parts: names of the parameters that this rank has in part, or not at all; a module without
            any of them is whole, and may be saved and copied.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> part = PartOfModel(model, {"1.weight"})
        >>> len(model[0].state_dict())
        2
        >>> model.state_dict()
        Traceback (most recent call last):
        slipstream.errors.UsageError: state_dict() of a model that ranks share (parallel): ...
        >>> with part.inside():
        ...     len(model.state_dict())
        4
        >>> part.close()
    """

    def __init__(self, model: nn.Module, parts: Collection[str]) -> None:
        self._model = model
        self._inside = False
        self._failure: str | None = None
        self._gradients: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        self._undo: list[Callable[[], object]] = [
            model.register_forward_pre_hook(lambda *_: self.check()).remove
        ]
        for path, module in model.named_modules():
            named = module.named_parameters(prefix=path, remove_duplicate=False)
            if module is model or any(name in parts for name, _ in named):
                self._undo += [
                    module.register_state_dict_pre_hook(self._before_save).remove,
                    module.register_load_state_dict_pre_hook(self._before_load).remove,
                    refuse_copies(module, _no_copies),
                ]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, the states of the model are those of the part, as the session's verbs need."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def close(self) -> None:
        """Refuse nothing any more; idempotent."""
        while self._undo:
            self._undo.pop()()
        self._gradients = []

    # An error in the middle of a backward pass.

    @property
    def failed(self) -> bool:
        """Whether this rank has left a backward pass by an error."""
        return self._failure is not None

    def fail(self, error: BaseException) -> None:
        """This rank leaves a backward pass, in which the others may go on."""
        self._failure = self._failure or f"{type(error).__name__}: {error}"

    def check(self) -> None:
        """Refuse to exchange anything with ranks that may be elsewhere.

        Raises:
            UsageError: names the error by which this rank has left them.
        """
        if self._failure is not None:
            raise UsageError(
                "the ranks that share this model (parallel) are out of step since this rank has "
                f"left a backward pass by {self._failure}; end this run and resume from a "
                "checkpoint"
            )

    # Clipping.

    def note_gradients(self) -> None:
        """The gradients are as the session has made them."""
        present = [(p, p.grad) for p in self._model.parameters()]
        self._gradients = [(p, g, g._version) for p, g in present if g is not None]

    def check_gradients(self) -> None:
        """Refuse gradients that were all changed in place, as torch's clipping does.

        To assign new ones is another thing: what a script computes of each gradient on its own is
        right on every rank.

        Raises:
            UsageError: names the verb of the session.
        """
        noted, self._gradients = self._gradients, []
        if noted and all(p.grad is g and g._version != version for p, g, version in noted):
            if not any(bool(stored(g).any()) for _, g, _ in noted):
                return  # zeroed
            raise UsageError(
                f"all {len(noted)} gradients of this rank were changed in place after backward, as "
                "by torch.nn.utils.clip_grad_norm_, but ranks share this model (parallel), and "
                "this would clip by the norm of this rank's part; call "
                "session.clip_grad_norm_(max_norm), and for a change of each value by itself, as "
                "by clip_grad_value_, assign: parameter.grad = parameter.grad.clamp(-1, 1)"
            )

    def _before_save(self, *_: Any) -> None:
        if not self._inside:
            raise UsageError(
                "state_dict() of a model that ranks share (parallel): it would have this rank's "
                "part alone; call session.checkpoint() on all ranks, which has the state of the "
                "whole model, and save that on one"
            )

    def _before_load(self, *_: Any) -> None:
        if not self._inside:
            raise UsageError(
                "load_state_dict() of a model that ranks share (parallel): each has a part of it; "
                "call session.restore({'model': state}) on all ranks with a state of the whole "
                "model, as session.checkpoint()['model'] or a plain run has it"
            )


def _no_copies() -> UsageError:
    return UsageError(
        "a copy or a pickle (deepcopy, torch.save, AveragedModel) of a model that ranks share "
        "(parallel): it would have this rank's part alone; call session.checkpoint('model') on all "
        "ranks, and load it into a model that is built anew, or average its tensors"
    )
