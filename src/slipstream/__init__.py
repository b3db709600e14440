"""slipstream: data-parallel training for PyTorch that is faster, and says why.

Public names and rooms are resolved when they are first used, so ``import slipstream`` alone does
not import torch.
"""

from __future__ import annotations

import random
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.checkpoint.checkpoints import Checkpoints as Checkpoints
    from slipstream.errors import HangError as HangError, SlipstreamError as SlipstreamError
    from slipstream.session.accelerate import accelerate as accelerate, data_share as data_share
    from slipstream.session.checkpoint_file import (
        read_checkpoint as read_checkpoint,
        write_checkpoint as write_checkpoint,
    )
    from slipstream.session.session import Session as Session
    from slipstream.strategy import Strategy as Strategy

_HOMES = {
    "Checkpoints": "slipstream.checkpoint.checkpoints",
    "HangError": "slipstream.errors",
    "Session": "slipstream.session.session",
    "SlipstreamError": "slipstream.errors",
    "Strategy": "slipstream.strategy",
    "accelerate": "slipstream.session.accelerate",
    "data_share": "slipstream.session.accelerate",
    "read_checkpoint": "slipstream.session.checkpoint_file",
    "write_checkpoint": "slipstream.session.checkpoint_file",
}

__all__ = [
    "Checkpoints",
    "HangError",
    "Session",
    "SlipstreamError",
    "Strategy",
    "__version__",
    "accelerate",
    "data_share",
    "read_checkpoint",
    "write_checkpoint",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(_imported(_HOMES[name]), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return _imported(f"{__name__}.{name}")  # slipstream.fusion.fuse_swin(model)
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")


def _imported(module: str) -> ModuleType:
    """Import a module beside the random numbers of the script: some that it imports draw from them
    when they are loaded (rich), on those ranks alone that have not loaded them yet."""
    if module in sys.modules:
        return sys.modules[module]
    before = random.getstate()
    try:
        return import_module(module)
    finally:
        random.setstate(before)


def __dir__() -> list[str]:
    return __all__
