"""``torch.compile`` block by block, so that gradients come out as backward goes.

[Note: Why blocks]
One graph for the whole model gives its gradients at the end of backward, so nothing is left to hide
their exchange. ``DistributedDataParallel`` cuts the graph at the borders of its buckets instead. A
block is a graph of its own here: the compiler fuses inside it, equal blocks are compiled once, and
its gradients are ready when backward leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from slipstream.errors import UsageError
from slipstream.fusion.regions import regions_of
from slipstream.fusion.settings import hooks_of
from slipstream.kernels.compiled import check_compiler, own_code
from slipstream.kernels.surroundings import needs_plain_functions
from slipstream.memory.forward_override import ForwardReplacement
from slipstream.strategy import Row


def compile_blocks(model: nn.Module) -> CompiledBlocks:
    """Compile the blocks of a model, each by itself, until ``close()`` of the result.

    Blocks are the repeated ones (the layers of a transformer, the residual blocks of a ResNet), and
    the largest other modules that contain none. Single layers stay as they are. Blocks of one class
    with parameters of the same shapes share a compilation, which happens at their first call. The
    names of parameters, hooks of blocks and ``state_dict()`` do not change. A block that gets other
    hooks inside later runs uncompiled, as do calls under ``torch.func`` and ``torch.jit.trace``;
    for other changes torch's guards compile again.

    Exactness: reordered.

    Raises:
        ModelError: no block to compile.
        UsageError: no compiler on a host without CUDA; later, a gradient with
            ``create_graph=True``.

    Example:
        >>> model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)])
        >>> compiled = compile_blocks(model)
        >>> compiled.report_rows()[0].value
        '3 blocks of 1 kind'
        >>> compiled.close()

    Source: "regional compilation" of PyTorch's recipes; DDP's cuts: torch issue 108966.
    """
    check_compiler("compute.compile")
    return CompiledBlocks(model)


class CompiledBlocks:
    """A model with compiled blocks; made by `compile_blocks`."""

    def __init__(self, model: nn.Module) -> None:
        blocks = regions_of(model, "compute.compile")
        self._model = model
        self._kinds: dict[Any, Callable[..., Any]] = {}
        self._overrides = [
            ForwardReplacement(block, partial(_call, block, self._compiled(block), hooks_of(block)))
            for block in blocks
        ]

    def close(self) -> None:
        """Restore the blocks; idempotent."""
        while self._overrides:
            self._overrides.pop().remove()

    def report_rows(self) -> list[Row]:
        """Report how many blocks were compiled."""
        kinds = f"{len(self._kinds)} kind{'s' if len(self._kinds) > 1 else ''}"
        value = f"{len(self._overrides)} block{'s' if len(self._overrides) > 1 else ''} of {kinds}"
        note = "at their first call"
        if self._copies_maps():
            note += "; with channels_last, too, convolutions need not copy their maps"
        return [Row("compiled", value, note)]

    def _copies_maps(self) -> bool:
        """Whether there are convolutions whose kernels want another order in memory."""
        weights = (m.weight for m in self._model.modules() if isinstance(m, nn.Conv2d))
        order = torch.channels_last
        return any(not weight.is_contiguous(memory_format=order) for weight in weights)

    def _compiled(self, block: nn.Module) -> Callable[..., Any]:
        """The compilation that blocks of this kind share."""
        parameters = tuple((name, p.shape, p.dtype) for name, p in block.named_parameters())
        kind = type(block), parameters, hooks_of(block)  # which the compiler does not tell apart
        if kind not in self._kinds:
            device = next(block.parameters()).device.type
            options: Any = {"joint_custom_post_pass": _masks_again()} if device == "cpu" else None
            self._kinds[kind] = torch.compile(own_code(_forward), options=options)
        return self._kinds[kind]


def _call(
    block: nn.Module,
    compiled: Callable[..., Any],
    hooks: tuple[int, ...],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    # The compiler looks for hooks once, and is followed by no transform.
    if hooks_of(block) != hooks or needs_plain_functions():
        return forward(*args, **kwargs)
    # Outside of the graph: a parameter that a transport still gathers arrives when it is read.
    for parameter in block.parameters():
        parameter.detach()
    result = compiled(block, *args, **kwargs)
    if torch.is_grad_enabled():
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(_refuse_second)
    return result


def _refuse_second(gradient: Tensor) -> None:
    """Refuse a second derivative before the backward of a block.

    Raises:
        UsageError: it is to be differentiated again.
    """
    if torch.is_grad_enabled():
        raise UsageError(
            "a gradient with create_graph=True through a compiled block: torch.compile computes no "
            "second derivatives; leave out compute.compile"
        )


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the block's own forward, the function that is compiled."""
    return type(block).forward(block, *args, **kwargs)


_COMPARISONS = [
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("le", "lt", "ge", "gt", "eq", "ne")
    for overload in ("Scalar", "Tensor")
]


def _masks_again() -> Any:
    """A pass by which backward compares again instead of keeping masks: Inductor stores a mask ten
    times slower than a tensor on a CPU, which makes networks with ReLU slower than uncompiled."""
    # read here, because torch takes a second to import its compiler
    base: Any = torch._inductor.custom_graph_pass.CustomGraphPass

    class MasksAgain(base):  # type: ignore[misc]
        def __call__(self, graph: fx.Graph) -> None:
            for node in graph.nodes:
                if node.target in _COMPARISONS and isinstance(node.meta.get("val"), Tensor):
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                    node.meta["ac_graph_id"] = 0

        def uuid(self) -> str:
            return "slipstream: masks again, 1"

    return MasksAgain()
