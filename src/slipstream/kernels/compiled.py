"""Functions of tensors as compiled kernels: C++ on a CPU, Triton on CUDA."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch

from slipstream.errors import UsageError
from slipstream.kernels.surroundings import outside_autocast

OPTIONS: dict[str, Any] = {
    "compile_threads": 1,  # no pool of workers
    # Each loop computes a chain again: stored, it would be written and read once more.
    "realize_reads_threshold": 100,
    "realize_opcount_threshold": 1000,
}


def check_compiler(needed_by: str) -> None:
    """Refuse what needs a compiler on a host without one.

    Raises:
        UsageError: names what needs it.
    """
    compiler = os.environ.get("CXX", "g++")
    if not torch.cuda.is_available() and shutil.which(compiler) is None:
        raise UsageError(
            f"{needed_by} needs the C++ compiler {compiler}, which was not found; install it "
            f"(apt-get install g++), name another in CXX, or leave {needed_by} out"
        )


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that torch compiles apart from others: it compiles a code object at most
    eight times, whoever calls it."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


@functools.cache
def compiled(function: Callable[..., Any], *key: Hashable) -> Callable[..., Any]:
    """``torch.compile(function)`` for tensors of any size, apart for each ``key``, which says what
    else the result depends on.

    Calls are not recorded for backward: an autograd function makes them. The first argument is a
    tensor.
    """
    own = own_code(function)
    made = torch.compile(own, dynamic=True, options=OPTIONS)

    def call(*args: Any) -> Any:
        # torch would compile again under autocast, and for tensors that learn, and read the .grad
        # of results
        with outside_autocast(args[0].device):
            return made(*(a.detach() if isinstance(a, torch.Tensor) else a for a in args))

    return call
