"""Replace the ``forward`` of one module by a wrapper around it.

The names, hooks and ``state_dict()`` of the model do not change, and no class is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from slipstream.errors import UsageError
from slipstream.plain_copy import Attached, copy_plainly, detached

Forward = Callable[..., Any]


class ForwardOverride(Attached):
    """Sets ``module.forward`` to a call of ``wrapper(forward, *args, **kwargs)``, where ``forward``
    is the forward it replaces.

    Overrides stack on one module and come off in reverse order. A copy of the module has none
    (`plain_copy`).

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
        self.replaced = vars(module).get("forward", Attached.replaced)
        self.__wrapped__ = self.forward  # for inspect.signature
        self._installed = True
        module.forward = self
        copy_plainly(module)

    @property
    def forward(self) -> Forward:
        """The forward that is replaced: that of the class, as it is now."""
        if self.replaced is not Attached.replaced:
            return self.replaced  # type: ignore[no-any-return]
        return type(self._module).forward.__get__(self._module)  # type: ignore[no-any-return]

    @property
    def __globals__(self) -> Any:
        raise UsageError(
            f"the forward of {type(self._module).__name__} is overridden by slipstream, and "
            "torch.jit.script reads its source; script a copy, which is plain: "
            "torch.jit.script(copy.deepcopy(model)), or script after close()"
        )

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
        if self.replaced is Attached.replaced:
            del self._module.forward
        else:
            self._module.forward = self.replaced
        detached(self._module)

    def __reduce__(self) -> tuple[Any, ...]:
        # Inside of another override of the user's. A copy of a module is made before its attributes
        # are copied: it has no "forward" of its own yet, so getattr finds that of its class.
        return getattr, (self._module, "forward")


class ForwardReplacement(ForwardOverride):
    """Computes what the forward that it replaces computes, in another way. So a technique that
    wraps the forwards of a model, such as recomputation, may wrap it.
    """


def is_wrapped(module: nn.Module) -> bool:
    """Whether a technique wraps the forward of a module."""
    forward = vars(module).get("forward")
    return isinstance(forward, ForwardOverride) and not isinstance(forward, ForwardReplacement)
