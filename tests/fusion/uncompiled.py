"""Fused chains on tensors of any size, without compiling them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from slipstream.kernels import add_act, batch_norm_act, relu_depthwise


@contextmanager
def uncompiled() -> Iterator[None]:
    """Runs the functions that would be compiled, which takes seconds each, as they are."""
    thresholds = ((add_act, "SMALL"), (batch_norm_act, "SMALL"), (relu_depthwise, "LARGE"))
    torch.compiler.set_stance("force_eager")
    with ExitStack() as patches:
        for kernel, name in thresholds:
            patches.enter_context(mock.patch.object(sys.modules[kernel.__module__], name, 0))
        yield
    torch.compiler.set_stance("default")
