"""Refuses forwards through DistributedDataParallel while a session averages the same gradients.

A wrapper is no part of the model that ``accelerate()`` gets: it may have been there before, or come
later. Both would write into the same gradients, at the same time.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from slipstream.errors import UsageError


class Wrappers:
    """Watches every wrapper of ``model``, or of a module of it, until ``close``."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {*model.modules()}
        self._hooks: list[Any] = [register_module_module_registration_hook(self._notice)]
        if dist.is_available() and dist.is_initialized():  # else there can be none yet
            # An object refers to its class.
            for wrapper in gc.get_referrers(DistributedDataParallel):
                if isinstance(wrapper, DistributedDataParallel):
                    self._notice(wrapper, "module", wrapper.module)

    def close(self) -> None:
        """Let forwards through wrappers pass again."""
        while self._hooks:
            self._hooks.pop().remove()

    def _notice(self, wrapper: nn.Module, name: str, member: object) -> None:
        if isinstance(wrapper, DistributedDataParallel) and member in self._modules:
            self._hooks.append(wrapper.register_forward_pre_hook(_refuse))


def _refuse(*_: object) -> None:
    """Refuse a forward of a wrapper.

    Raises:
        UsageError: gradients may follow.
    """
    if torch.is_grad_enabled():
        raise UsageError(
            "a forward through DistributedDataParallel while the session averages the gradients of "
            "the same model: both would write into them; call session.model, the plain module, or "
            "close() the session before"
        )
