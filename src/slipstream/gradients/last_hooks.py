"""Hooks on accumulated gradients that stay behind those which a script registers later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle


class LastHooks:
    """The last hook of each parameter: others see, and may change, the gradient of this rank, not
    one on its way to others.

    Args:
        parameters: each gets one.
        act: called with the number of a parameter, and with it, once its gradient has accumulated.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], act: Callable[[int, torch.Tensor], None]
    ) -> None:
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(act, index))
            for index, parameter in enumerate(parameters)
        ]
        self._next_id = RemovableHandle.next_id

    def come_last(self) -> None:
        """Run behind hooks that were registered since."""
        if RemovableHandle.next_id == self._next_id:
            return
        self._next_id = RemovableHandle.next_id
        for hook in self._hooks:
            hooks = hook.hooks_dict_ref()
            if hooks is not None and next(reversed(hooks), hook.id) != hook.id:
                hooks[hook.id] = hooks.pop(hook.id)  # torch does not see move_to_end()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
