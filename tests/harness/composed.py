"""See what a session is made of, without its private attributes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from slipstream.session import compose


@contextmanager
def composed(name: str) -> Iterator[list[Any]]:
    """What the composer makes under a name (``Engine``, ``ModelParallel``, ``recompute``), in order
    of making; the list grows while the context is open."""
    made: list[Any] = []
    make = getattr(compose, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    with patch.object(compose, name, noted):
        yield made
