"""Hooks of an optimizer's step that exchange the data of parameters: inside all others.

torch runs step hooks in the order of their registration, before the step and after it. A hook of
the user's that was registered before ours would see a rank's shards after the step, one that was
registered later would see them before it. Handles of other hooks have ``prepend`` for that; those
of steps do not, so the order is set here, as ``prepend`` sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from slipstream.errors import UsageError
from slipstream.optim.nested_step import around_all

_ROOMS = ("slipstream.fusion.", "slipstream.precision.", "slipstream.sharding.")
"""Whose hooks exchange data, each inside that of the room before it."""


class InnerHooks:
    """A pre- and a post-hook of a step, between which other rooms' hooks of that kind may run.

    Args:
        begins, ends: as torch calls step hooks.
    """

    def __init__(
        self, optimizer: Optimizer, begins: Callable[..., None], ends: Callable[..., None]
    ) -> None:
        self._before = optimizer.register_step_pre_hook(around_all(begins, self._refuse_others))
        self._after = optimizer.register_step_post_hook(around_all(ends, self._refuse_others))
        self._last: int | None = None

    def arrange(self) -> None:
        """Put the hooks of others outside; call it between two steps."""
        before, after = self._before.hooks_dict_ref(), self._after.hooks_dict_ref()
        assert before is not None
        assert after is not None
        if self._last == next(reversed(before)):
            return
        for key in [key for key, hook in before.items() if _exchanges(hook)]:
            before.move_to_end(key)
        for key in [key for key, hook in after.items() if not _exchanges(hook)]:
            after.move_to_end(key)
        self._last = next(reversed(before))

    def check(self) -> None:
        """Refuse a step with a hook that would see shards.

        Raises:
            UsageError: it was registered since the last ``arrange``.
        """
        before = self._before.hooks_dict_ref()
        assert before is not None
        last = next(reversed(before))
        if last != self._last and not _exchanges(before[last]):
            raise UsageError(
                "with gradients.transport sharded a hook that was registered between backward() "
                "and step() by optimizer.register_step_pre_hook would see this rank's shards of "
                "the parameters; register it before session.backward()"
            )

    def _refuse_others(self, optimizer: Optimizer) -> None:
        handles = self._before, self._after
        hooks = [hook for handle in handles for hook in (handle.hooks_dict_ref() or {}).values()]
        if any(map(is_foreign, hooks)):
            raise UsageError(
                f"hooks of {type(optimizer).__name__}.step() run around its super().step(), too, "
                "where with gradients.transport sharded they would see this rank's shards of the "
                "parameters; take them off, or use transport: direct"
            )

    def remove(self) -> None:
        """Take the hooks off."""
        self._before.remove()
        self._after.remove()


def is_foreign(hook: Callable[..., Any]) -> bool:
    """Whether a hook is not slipstream's."""
    return not str(hook.__module__).startswith("slipstream.")


def _exchanges(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_ROOMS)
