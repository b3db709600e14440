"""Chains of operations of a model, each in one operation that keeps less, from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from slipstream.errors import UsageError
from slipstream.fusion.block_graph import BlockGraph, Untraceable, record
from slipstream.fusion.chains import CHAIN_PARTS, Chains
from slipstream.kernels.activations import ACTIVATIONS, ActivationName
from slipstream.kernels.add_act import is_alike, reference as plain_sum
from slipstream.kernels.batch_norm_act import batch_norm_act, is_small
from slipstream.kernels.compiled import check_compiler
from slipstream.kernels.relu_depthwise import relu_depthwise
from slipstream.memory.forward_override import ForwardReplacement
from slipstream.strategy import Row
from slipstream.strategy.compute import Pattern

_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)


def fuse_patterns(model: nn.Module, patterns: Iterable[Pattern] = PATTERNS) -> FusedPatterns:
    """Run chains of a model's operations as one each, until ``close()`` of the result.

    - ``bn_act``: batch norm and an activation, with a residual between them or without.
    - ``add_act``: a sum and an activation.
    - ``relu_depthwise``: ReLU and a depthwise convolution.

    The activations are relu, relu6, sigmoid, tanh, gelu, silu and hardswish. Blocks are recorded
    one by one (``block_graph``): a block whose forward torch.fx cannot follow stays as it is, and
    the report says why. So does a call with other arguments, or after a setting of the block has
    changed. Names of parameters, hooks and ``state_dict()`` do not change; hooks on activations
    added later do not fire.

    Exactness: reordered; in evaluation batch norm and activation are torch's.

    Raises:
        UsageError: an unknown pattern, or no compiler on a host without CUDA.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> fused = fuse_patterns(model)
        >>> fused.report_rows()[0].value
        '1 batch norm + activation'
        >>> model(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 8, 6, 6])
        >>> fused.close()

    Source: the graph passes of Paddle's Fleet; they rewrite a whole program, here each block.
    """
    wanted = frozenset(patterns)
    if not wanted or wanted - set(PATTERNS):
        raise UsageError(f"patterns are {sorted(wanted)}; allowed: some of {', '.join(PATTERNS)}")
    if wanted & {"bn_act", "add_act"}:
        check_compiler("fusion of chains")
    return FusedPatterns(model, wanted)


class FusedPatterns:
    """A model with fused chains; made by `fuse_patterns`."""

    def __init__(self, model: nn.Module, patterns: frozenset[Pattern]) -> None:
        self._overrides: list[ForwardReplacement] = []
        self._found: Counter[str] = Counter()
        self._num_blocks = 0
        self._skipped: dict[str, str] = {}
        owners: dict[nn.Module, None] = {}
        for block in _blocks(model):
            try:
                graph = record(block)
            except Untraceable as reason:
                if _may_hold_chains(block):
                    self._skipped.setdefault(type(block).__name__, str(reason))
                continue
            chains = Chains(block, graph.graph, patterns)
            if chains.found:
                self._num_blocks += 1
                self._found.update(chains.found)
                owners.update(dict.fromkeys(chains.owners))
                self._override(block, partial(_forward, graph, graph.function()))
        for owner in owners:
            run: Any = _convolution if hasattr(owner, "kernel_size") else _batch_norm
            self._override(owner, partial(run, owner))

    def close(self) -> None:
        """Restore the model; idempotent."""
        while self._overrides:
            self._overrides.pop().remove()

    @property
    def num_chains(self) -> int:
        """How many were found."""
        return self._found.total()

    def report_rows(self) -> list[Row]:
        """How many chains were found, and which blocks were left alone."""
        found = ", ".join(f"{count} {name}" for name, count in self._found.items()) or "none found"
        blocks = f"in {self._num_blocks} blocks" if self._num_blocks else ""
        skipped = "; ".join(f"{name}: {reason}" for name, reason in self._skipped.items())
        rows = [Row("fused chains", found, blocks)]
        return (
            [*rows, Row("not looked into", str(len(self._skipped)), skipped)] if skipped else rows
        )

    def _override(self, module: nn.Module, wrapper: Callable[..., Any]) -> None:
        self._overrides.append(ForwardReplacement(module, wrapper))


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with a forward of their own, and sequences of modules."""
    for module in model.modules():
        kind = type(module)
        own = not kind.__module__.startswith("torch.") and kind.forward is not nn.Module.forward
        if (own or type(module).forward is nn.Sequential.forward) and "forward" not in vars(module):
            yield module


def _may_hold_chains(block: nn.Module) -> bool:
    """Whether a chain would be expected in its forward."""
    return any(isinstance(child, CHAIN_PARTS) for child in block.children())


def _forward(
    graph: BlockGraph,
    fused: Callable[..., Any],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The fused forward, for calls like the recorded one."""
    tensors = graph.tensors_of(args, kwargs) if graph.holds() else None
    return forward(*args, **kwargs) if tensors is None else fused(graph.block, *tensors)


def _batch_norm(
    module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    residual: Tensor | None = None,
    activation: ActivationName | None = None,
    into: Literal["normal", "residual"] | None = None,
) -> Tensor:
    """A batch norm with the rest of its chain; ``into``: the operand that the model adds to."""
    if activation is None:
        return forward(x)
    fits = x.ndim in _DIMS[type(module)] and x.shape[1] == module.num_features < x.numel()
    alike = residual is None or is_alike(x, residual)
    if is_small(x) or not (fits and alike and module.training):
        total = forward(x)
        if residual is not None:
            terms = (residual, total) if into == "residual" else (total, residual)
            return plain_sum(*terms, activation, in_place=into is not None)
        return ACTIVATIONS[activation].forward(total)
    normed = batch_norm_act(
        x, module.weight, module.bias, activation, residual=residual, eps=module.eps
    )
    _update_statistics(module, normed.mean, normed.variance, x.numel() // x.shape[1])
    return normed.values


@torch.no_grad()
def _update_statistics(
    module: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor, count: int
) -> None:
    """As torch's batch norm does in training."""
    if module.running_mean is None or module.running_var is None:
        return
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(module.num_batches_tracked)
    unbiased = variance * (count / (count - 1))
    for running, batch in ((module.running_mean, mean), (module.running_var, unbiased)):
        running.mul_(1 - (factor or 0.0)).add_(batch.to(running.dtype), alpha=factor or 0.0)


def _convolution(
    module: nn.Conv2d, forward: Callable[[Tensor], Tensor], x: Tensor, relu: bool = False
) -> Tensor:
    """A depthwise convolution, and the ReLU before it."""
    if not relu:
        return forward(x)
    if not torch.is_grad_enabled() or x.ndim != module.weight.ndim:
        return forward(torch.relu(x))
    return relu_depthwise(
        x,
        module.weight,
        module.bias,
        stride=list(module.stride),
        padding=[int(side) for side in module.padding],
        dilation=list(module.dilation),
    )
