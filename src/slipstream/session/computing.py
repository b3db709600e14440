"""Install what changes how the device computes a forward and a backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from slipstream.errors import ModelError
from slipstream.fusion.channels_last import ChannelsLast
from slipstream.fusion.compiled_blocks import compile_blocks
from slipstream.fusion.graphs import graph_blocks
from slipstream.fusion.patterns import FusedPatterns, fuse_patterns
from slipstream.session.given import Given
from slipstream.session.handles import Handle
from slipstream.strategy.compute import Pattern


def install_compute(given: Given) -> list[Handle]:
    """Install what ``compute`` says of the model; returns the handles.

    Raises:
        ModelError: there is nothing in the model that a setting could change.
    """
    model, compute, handles = given.model, given.strategy.compute, given.handles
    installed: list[Handle] = []
    if compute.channels_last:
        installed.append(handles.add(ChannelsLast(model, given.optimizer)))
    if compute.patterns:
        installed.append(handles.add(_fuse_patterns(model, compute.patterns)))
    if compute.compile:
        installed.append(handles.add(compile_blocks(model)))
    if compute.cuda_graph:
        installed.append(handles.add(graph_blocks(model)))
    return installed


def _fuse_patterns(model: nn.Module, patterns: Sequence[Pattern]) -> FusedPatterns:
    fused = fuse_patterns(model, patterns)
    if fused.num_chains:
        return fused
    settings = ", ".join(f"compute.fuse_{name}" for name in patterns)
    reasons = "; ".join(f"{row.setting}: {row.note}" for row in fused.report_rows()[1:])
    raise ModelError(
        f"{settings}: {type(model).__name__} has no such chain of operations; leave out {settings}"
        + (f" ({reasons})" if reasons else "")
    )
