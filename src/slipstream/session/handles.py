"""Handles of installed techniques: each takes its own off, and has rows for the report.

A room that installs something returns a handle: an object with ``close()`` and ``report_rows()``.
No room imports this file; the protocol is structural.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, Self, TypeVar

from slipstream.strategy import Row


class Handle(Protocol):
    """An installed technique."""

    def close(self) -> None:
        """Restore the model and the optimizer."""

    def report_rows(self) -> Sequence[Row]:
        """Report what the technique resolved to and has done so far; never communicates."""


H = TypeVar("H", bound=Handle)


class HandleStack(ExitStack):
    """The handles of a session in the order of installation; closed in reverse.

    An ``ExitStack``: if one ``close()`` raises, the others still run.

    Example:
        >>> class Technique:
        ...     def close(self): print("closed")
        ...     def report_rows(self): return [Row("technique", "on", "")]
        >>> with HandleStack() as handles:
        ...     _ = handles.add(Technique())
        ...     [row.setting for row in handles.report_rows()]
        ['technique']
        closed
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: list[Callable[[], Sequence[Row]]] = []

    def add(self, handle: H, *, on_error: Callable[[], object] | None = None) -> H:
        """Keep a handle; ``on_error`` is as for `defer`."""
        self.add_rows(handle.report_rows)
        self.defer(handle.close, on_error=on_error)
        return handle

    def add_rows(self, source: Callable[[], Sequence[Row]]) -> None:
        """Append rows to the report that belong to no handle."""
        self._sources.append(source)

    def defer(
        self, close: Callable[[], object], *, on_error: Callable[[], object] | None = None
    ) -> None:
        """Call ``close`` at the end; after an error call ``on_error`` instead, if given.

        A ``close`` that communicates needs ``on_error``: after an error the other ranks may never
        join its collective.
        """

        def leave(kind: type[BaseException] | None, *_: object) -> None:
            end = close if kind is None or on_error is None else on_error
            end()

        self.push(leave)

    def report_rows(self) -> list[Row]:
        """The rows of all handles, in order."""
        return [row for source in self._sources for row in source()]

    def pop_all(self) -> Self:
        """Move everything to a new stack, whose report outlives it: its last rows stay."""
        stack = super().pop_all()
        stack._sources, self._sources = self._sources, []
        stack.callback(stack._freeze_report)  # pushed last, so it runs before any close()
        return stack

    def _freeze_report(self) -> None:
        # Handles hold process groups, and a report must not keep these alive: rows replace them.
        rows = self.report_rows()
        self._sources = [lambda: rows]
