"""Refusals of ``compute``: what a model or a host cannot use, found before it is installed."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from slipstream.errors import SlipstreamError, StrategyError
from slipstream.fusion.chains import BATCH_NORMS, CHAIN_PARTS
from slipstream.fusion.channels_last import weights_of_convolutions
from slipstream.fusion.graphs import check_cuda
from slipstream.fusion.optimizer import check_fusible
from slipstream.fusion.patterns import has_own_forward
from slipstream.fusion.regions import regions_of
from slipstream.kernels.compiled import check_compiler
from slipstream.strategy import ComputeConfig, Strategy


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


def compute_warnings(model: nn.Module, compute: ComputeConfig) -> list[str]:
    """Say what is slower where the model is."""
    if not compute.patterns or all(p.device.type != "cuda" for p in model.parameters()):
        return []
    settings = ", ".join(f"compute.fuse_{name}" for name in compute.patterns)
    return [
        f"{settings}: on an H200 chains took longer than torch's kernels one after another; leave "
        "them out, take compute.channels_last, or let slipstream tune measure them here"
    ]


def useful_settings(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The settings of ``compute`` that may change how this model computes on this host.

    Example:
        >>> import torch
        >>> model = nn.Linear(4, 4)
        >>> useful_settings(model, torch.optim.SGD(model.parameters()))
        ['fuse_optimizer']
    """
    can_compile = _accepts(check_compiler, "compute")
    useful = {
        "channels_last": _accepts(weights_of_convolutions, model),
        "compile": can_compile and _accepts(regions_of, model, "compute.compile"),
        "fuse_bn_act": can_compile and _has(model, BATCH_NORMS),
        "fuse_add_act": can_compile and _has(model, CHAIN_PARTS) and _may_add(model),
        "fuse_optimizer": _accepts(check_fusible, optimizer),
    }
    return [name for name, is_useful in useful.items() if is_useful]


def _accepts(check: Callable[..., object], *args: object) -> bool:
    try:
        check(*args)
    except SlipstreamError:
        return False
    return True


def _has(model: nn.Module, layers: tuple[type[nn.Module], ...]) -> bool:
    """Looks for no chain: that would run the forward of a model whose user did not ask for it."""
    return any(isinstance(layer, layers) for layer in model.modules())


def _may_add(model: nn.Module) -> bool:
    """Whether a forward may have a sum, of which torch's containers have none."""
    return any(map(has_own_forward, model.modules()))
