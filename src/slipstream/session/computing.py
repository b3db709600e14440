"""Install what changes how the device computes a forward and a backward."""

from __future__ import annotations

import torch
from torch import nn

from slipstream.fusion.channels_last import ChannelsLast
from slipstream.fusion.compiled_blocks import compile_blocks
from slipstream.fusion.graphs import graph_blocks
from slipstream.fusion.patterns import fuse_patterns
from slipstream.session.handles import Handle, HandleStack
from slipstream.strategy.compute import Compute


def install_compute(
    model: nn.Module, optimizer: torch.optim.Optimizer, compute: Compute, handles: HandleStack
) -> list[Handle]:
    """Install what ``compute`` says of the model; returns the handles."""
    installed: list[Handle] = []
    if compute.channels_last:
        installed.append(handles.add(ChannelsLast(model, optimizer)))
    if compute.patterns:
        installed.append(handles.add(fuse_patterns(model, compute.patterns)))
    if compute.compile:
        installed.append(handles.add(compile_blocks(model)))
    if compute.cuda_graph:
        installed.append(handles.add(graph_blocks(model)))
    return installed
