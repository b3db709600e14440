"""What holds while a cell runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from slipstream.kernels import add_act, batch_norm_act, relu_depthwise


@contextmanager
def uncompiled() -> Iterator[None]:
    """Kernels run on tensors of any size, and without being compiled, which takes seconds each."""
    modules = [sys.modules[k.__module__] for k in (add_act, batch_norm_act, relu_depthwise)]
    names = ("SMALL", "SMALL", "LARGE")
    torch.compiler.set_stance("force_eager")
    patches = [mock.patch.object(m, n, 0) for m, n in zip(modules, names, strict=True)]
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in patches:
            patch.stop()
        torch.compiler.set_stance("default")


def bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)
