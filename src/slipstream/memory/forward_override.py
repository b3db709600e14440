"""Replace the ``forward`` of one module by a wrapper around it.

The names, hooks and ``state_dict()`` of the model do not change, and no class is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from slipstream.errors import UsageError

Forward = Callable[..., Any]


class ForwardOverride:
    """Sets ``module.forward`` to a call of ``wrapper(forward, *args, **kwargs)``, where ``forward``
    is the forward it replaces.

    Overrides stack on one module and come off in reverse order. A copy of the module
    (``copy.deepcopy``, ``pickle``) has no override: it calls its own forward.

    Example:
        >>> import copy
        >>> layer = nn.Identity()
        >>> doubled = ForwardOverride(layer, lambda forward, x: 2 * forward(x))
        >>> layer(3), copy.deepcopy(layer)(3)
        (6, 3)
        >>> doubled.remove()
        >>> layer(3)
        3
    """

    def __init__(self, module: nn.Module, wrapper: Callable[..., Any]) -> None:
        self._module, self._wrapper = module, wrapper
        self._was_instance_attribute = "forward" in vars(module)
        self._replaced: Forward = module.forward
        self.__wrapped__ = self._replaced  # for inspect.signature
        self._installed = True
        module.forward = self

    @property
    def forward(self) -> Forward:
        """The forward that is replaced: that of the class, as it is now."""
        if self._was_instance_attribute:
            return self._replaced
        return type(self._module).forward.__get__(self._module)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(self.forward, *args, **kwargs)

    def remove(self) -> None:
        """Restore the forward that was replaced; idempotent.

        Raises:
            UsageError: a later override of the same module is still installed.
        """
        if not self._installed:
            return
        if vars(self._module).get("forward") is not self:
            raise UsageError(
                f"the forward of {type(self._module).__name__} was overridden again later; remove "
                "the later override first"
            )
        self._installed = False
        if self._was_instance_attribute:
            self._module.forward = self._replaced
        else:
            del self._module.forward

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a module is made before its attributes are copied. When this override is copied
        # the module's copy has no "forward" of its own yet, so getattr finds that of its class.
        return getattr, (self._module, "forward")


class ForwardReplacement(ForwardOverride):
    """Computes what the forward that it replaces computes, in another way. So a technique that
    wraps the forwards of a model, such as recomputation, may wrap it.
    """


def is_wrapped(module: nn.Module) -> bool:
    """Whether a technique wraps the forward of a module."""
    forward = vars(module).get("forward")
    return isinstance(forward, ForwardOverride) and not isinstance(forward, ForwardReplacement)
