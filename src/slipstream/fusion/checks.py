"""What of ``compute`` cannot serve a model or a host, found before anything is installed."""

from __future__ import annotations

from torch import nn

from slipstream.errors import StrategyError
from slipstream.fusion.channels_last import weights_of_convolutions
from slipstream.fusion.graphs import check_cuda
from slipstream.fusion.regions import regions_of
from slipstream.kernels.compiled import check_compiler
from slipstream.strategy import Strategy


def check_compute(model: nn.Module, strategy: Strategy) -> None:
    """Refuse what does not fit the model, this host, or what is recomputed.

    Raises:
        ModelError: no block to compile or capture, no convolution, or not on CUDA.
        StrategyError: graphs with recomputation or offload.
        UsageError: no compiler.
    """
    compute = strategy.compute
    if compute.compile or compute.fuse_bn_act or compute.fuse_add_act:
        check_compiler("compute.compile" if compute.compile else "fusion of chains")
    if compute.compile:
        regions_of(model, "compute.compile")
    if compute.cuda_graph:
        check_cuda(model)
        regions_of(model, "compute.cuda_graph")
        if strategy.memory.active:
            raise StrategyError(
                "compute.cuda_graph with memory: a block that runs again in backward would "
                "overwrite its own results; leave out one of them"
            )
    if compute.channels_last:
        weights_of_convolutions(model)
