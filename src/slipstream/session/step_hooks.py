"""Tells a training loop of every ``optimizer.step()``, whoever calls it, and of those of others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from slipstream.optim.nested_step import around_all, closure_of, let_have_hooks


def collectives_so_far() -> int:
    """Count the collectives in the process group of the script, for what happens inside a step."""
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    with suppress(RuntimeError):  # a backend that counts none
        return 0 if world is None else int(world._get_sequence_number_for_group())
    return 0


class StepHooks:
    """Hooks on the steps of an optimizer.

    Other hooks of a step exchange the ``data`` and gradients of parameters for the time of it:
    these are made before theirs and attached after them, so that they work outside. An optimizer
    that is none of torch's may have no hooks: its steps are not seen.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._begins: Callable[[object], None] = lambda closure: None
        self._ends: Callable[[], None] = lambda: None
        self._inside = False  # a step, which may be one around that of another optimizer
        self._hooks: list[Any] = []
        if hasattr(optimizer, "register_step_pre_hook"):
            let_have_hooks(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(around_all(self._pre)))

    def attach(
        self,
        begins: Callable[[object], None],
        ends: Callable[[], None],
        other: Callable[[torch.optim.Optimizer], None],
        other_ends: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        """Call ``begins(closure)`` before and ``ends()`` after each step from now on, ``other``
        before each step of any other optimizer of the script, and ``other_ends`` after it, also
        where it is made inside of this one's."""
        self._begins, self._ends = begins, ends
        eager: Any = torch.compiler.disable

        def before_any(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if optimizer is not self._optimizer and not self._inside:
                other(optimizer)

        def after_any(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if optimizer is not self._optimizer:
                other_ends(optimizer)

        self._hooks.append(register_optimizer_step_pre_hook(eager(before_any)))
        self._hooks.append(register_optimizer_step_post_hook(eager(after_any)))
        if hasattr(self._optimizer, "register_step_post_hook"):
            self._hooks.append(self._optimizer.register_step_post_hook(around_all(self._post)))

    def broken_off(self) -> None:
        """A step that has begun has ended by an error, if it has not ended."""
        self._inside = False

    def close(self) -> None:
        """Take the hooks off; idempotent."""
        while self._hooks:
            self._hooks.pop().remove()

    def _pre(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begins(closure_of(args, kwargs))
        self._inside = True

    def _post(self, *_: object) -> None:
        self._inside = False
        self._ends()
