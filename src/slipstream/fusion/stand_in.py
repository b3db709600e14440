"""A step of an optimizer on other groups than the user's.

[Note: Stand-in] A hook before a step may change its arguments, of which the first is the optimizer.
So the step runs on a *stand-in*: an object with the optimizer's attributes, of a subclass whose
``param_groups`` and ``state`` are prepared here. The user's optimizer does not change: hooks see
its groups, and a step that raises leaves nothing to undo. The groups are prepared when the step
asks for them, which is after all hooks before it, so what these do to gradients counts; the hook
after it runs ahead of the others, so these see what the step has done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from slipstream.errors import ModelError
from slipstream.optim.layerwise import ParamGroup
from slipstream.optim.nested_step import closure_of

States = dict[Tensor, dict[str, Any]]
"""As in ``torch.optim.Optimizer.state``."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """The groups and states that a step finds in place of the optimizer's."""

    groups: list[ParamGroup]
    states: States


class StandIn:
    """Makes every step of an optimizer run on prepared groups, until ``close()``.

    A step with a closure runs as it is: its gradients are those that the closure will compute.

    Args:
        optimizer: is stepped by the user.
        prepare: called in a step, when it asks for its groups.
        ends: called after a step that has not raised, with what was prepared.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        prepare: Callable[[], PreparedStep],
        ends: Callable[[PreparedStep], None],
    ) -> None:
        self._optimizer, self._prepare, self._stage_ends = optimizer, prepare, ends
        self._stage: PreparedStep | None = None  # of the step that runs, or that raised
        self._inner_ended = False
        self._class: Any = type(
            type(optimizer).__name__,
            (type(optimizer),),
            {
                "param_groups": property(lambda _: self._staged().groups),
                "state": property(lambda _: self._staged().states),
            },
        )
        self._hooks = _add_hooks(optimizer, self._begins, self._ends)

    def close(self) -> None:
        """Idempotent."""
        self._stage = None
        while self._hooks:
            self._hooks.pop().remove()

    def _begins(self, optimizer: object, args: Any, kwargs: Any) -> Any:
        self._inner_ended = False
        if optimizer is not self._optimizer:
            self._give_back()
            return None  # super().step() in a step, which is on the stand-in already
        self._stage = None
        if closure_of(args, kwargs) is not None:
            return None
        stand_in = self._class.__new__(self._class)
        stand_in.__dict__ = vars(optimizer)
        return (stand_in, *args[1:]), kwargs

    def _ends(self, optimizer: object, *_: object) -> None:
        self._give_back()
        self._inner_ended = optimizer is not self._optimizer

    def _give_back(self) -> None:
        if self._stage is not None:
            stage, self._stage = self._stage, None
            self._stage_ends(stage)

    def _staged(self) -> PreparedStep:
        if self._inner_ended:  # hooks come next, and what a class does after super().step()
            return PreparedStep(self._optimizer.param_groups, self._optimizer.state)
        if self._stage is None:
            self._stage = self._prepare()
        return self._stage


def _add_hooks(
    optimizer: Optimizer, begins: Callable[..., Any], ends: Callable[..., None]
) -> list[RemovableHandle]:
    """A hook before steps, and one after them that runs ahead of those that are there.

    Raises:
        ModelError: there is no step that hooks know of.
    """
    try:
        before = optimizer.register_step_pre_hook(begins)
        after = optimizer.register_step_post_hook(ends)
    except AttributeError as error:
        raise ModelError(
            f"the optimizer {type(optimizer).__name__} cannot be fused: it has no hooks around "
            "its steps; allowed: a torch.optim.Optimizer whose __init__ calls "
            "super().__init__(params, defaults); leave fuse_optimizer out, or fuse the optimizer "
            "that it wraps"
        ) from error
    hooks: Any = after.hooks_dict_ref()
    hooks.move_to_end(after.id, last=False)
    return [before, after]
