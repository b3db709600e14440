"""A habit of users of a framework: a script that runs with an adapter, and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Noted = list[torch.Tensor]


@dataclass
class Given:
    """The side on which a habit runs.

    Attributes:
        strategy: of slipstream; None: the framework by itself.
        folder: to save into, the same on all ranks.
        close: what is to be closed where the habit fails.
    """

    strategy: dict[str, Any] | None
    folder: Path
    close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank()


HABITS: dict[str, dict[str, Callable[[Given], Noted]]] = {}
"""By framework and name."""


def habits_of(framework: str) -> Callable[[str], Callable[[Any], Any]]:
    """A decorator that names a habit of this framework."""
    mine = HABITS.setdefault(framework, {})

    def named(name: str) -> Callable[[Any], Any]:
        def kept(function: Any) -> Any:
            assert name not in mine
            mine[name] = function
            return function

        return kept

    return named
