"""What a column is, and the table of all."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from tests.conformance import habits
from tests.conformance.loop import Loop

SECTIONS = (
    "state",
    "parameters",
    "copies",
    "autograd",
    "updates",
    "windows",
    "optimizers",
    "loading",
    "sessions",
    "faults",
)
"""The files of habits, in the order of the page."""


@dataclass(frozen=True)
class Habit:
    """A column.

    Attributes:
        name: as the table shows it.
        section: the file that it is in.
        run: what a user does.
        needs: what a technique must have for it, see ``not_applicable``.
        bf16: computes in 16 bits, so that another order of sums shows more.
        own_buffers: ends where ranks have not exchanged buffers yet, as under DDP before the next
            forward; those of the first rank are compared.
        apart: runs in a process of its own, as it may leave others waiting.
    """

    name: str
    section: str
    run: Callable[[Loop], None]
    needs: frozenset[str]
    apart: bool
    bf16: bool
    own_buffers: bool


_habits: list[Habit] = []


def habit(
    name: str,
    *needs: str,
    apart: bool = False,
    bf16: bool = False,
    own_buffers: bool = False,
) -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
    """Adds a function to the columns."""

    def add(function: Callable[[Loop], None]) -> Callable[[Loop], None]:
        section = function.__module__.rpartition(".")[2]
        needed = frozenset(needs)
        _habits.append(Habit(name, section, function, needed, apart, bf16, own_buffers))
        return function

    return add


def all_habits() -> tuple[Habit, ...]:
    for module in pkgutil.iter_modules(habits.__path__):
        importlib.import_module(f"{habits.__name__}.{module.name}")
    return tuple(sorted(_habits, key=lambda habit: SECTIONS.index(habit.section)))
