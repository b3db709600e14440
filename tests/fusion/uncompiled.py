"""Fused chains on tensors of any size, without compiling them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from slipstream.kernels import add_act, batch_norm_act


@contextmanager
def uncompiled() -> Iterator[None]:
    """Runs the functions that would be compiled, which takes seconds each, as they are."""
    modules = [sys.modules[kernel.__module__] for kernel in (add_act, batch_norm_act)]
    torch.compiler.set_stance("force_eager")
    with mock.patch.object(modules[0], "SMALL", 0), mock.patch.object(modules[1], "SMALL", 0):
        yield
    torch.compiler.set_stance("default")
