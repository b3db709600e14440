"""Another forward in the place of a module's own: what surrounds a module from outside of it.

Names, hooks and ``state_dict()`` of the model stay, and no class is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from slipstream.errors import UsageError

Forward = Callable[..., Any]


class ForwardOverride:
    """Stands in ``module.forward`` and calls ``around(forward, *args, **kwargs)`` with the forward
    that stood there before.

    A copy of the module (``copy.deepcopy``, ``pickle``) is a plain one: it calls its own forward.
    Several may be put around one module; they come off in reverse order.

    Example:
        >>> import copy
        >>> layer = nn.Identity()
        >>> twice = ForwardOverride(layer, lambda forward, x: 2 * forward(x))
        >>> layer(3), copy.deepcopy(layer)(3)
        (6, 3)
        >>> twice.remove()
        >>> layer(3)
        3
    """

    def __init__(self, module: nn.Module, around: Callable[..., Any]) -> None:
        self._module, self._around = module, around
        self.forward: Forward = module.forward
        self.__wrapped__ = self.forward  # for inspect.signature
        self._had_own = "forward" in vars(module)
        self._there = True
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self.forward, *args, **kwargs)

    def remove(self) -> None:
        """Put back the forward that stood there before; twice is once.

        Raises:
            UsageError: another one was put around this one, and is still there.
        """
        if not self._there:
            return
        if vars(self._module).get("forward") is not self:
            raise UsageError(
                f"the forward of {type(self._module).__name__} was replaced once more since; take "
                "that off first"
            )
        self._there = False
        if self._had_own:
            self._module.forward = self.forward
        else:
            del self._module.forward

    def __reduce__(self) -> tuple[Any, ...]:
        # The module is copied before its attributes: this finds the copy's own forward, of its
        # class, as nothing stands in the copy yet.
        return getattr, (self._module, "forward")
