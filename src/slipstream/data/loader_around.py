"""A loader around another one, which stands in its place in the script."""

from __future__ import annotations

from typing import Any, ClassVar


class LoaderAround:
    """Has the attributes of the loader inside, also when they are set.

    Names that begin with an underscore, and those in ``_own``, are its own.
    """

    _own: ClassVar[tuple[str, ...]] = ()
    _loader: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask for these before __init__ has run
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name in self._own
        if own or not hasattr(self._loader, "__dict__"):  # a list takes none
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)
