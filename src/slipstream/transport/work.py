"""A started request, for its caller: something to wait for."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Work(Protocol):
    """Part of a request under way: `torch.distributed.Work`, or what a thread of ours completes."""

    def wait(self) -> Any:
        """Return when it is done, the caller's CUDA stream ordered behind it.

        Raises:
            RuntimeError: it failed.
        """

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done when it is."""


class ThreadWork:
    """A work that a thread completes, with or without an error.

    Example:
        >>> work = ThreadWork()
        >>> work.complete()
        >>> work.wait()
    """

    def __init__(self) -> None:
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def complete(self, error: Exception | None = None) -> None:
        """Wake up who waits; once."""
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)

    def wait(self) -> None:
        self._future.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future
