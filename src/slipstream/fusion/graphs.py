"""Blocks as CUDA graphs: a block's kernels start with one call, forward and backward.

[Note: What a graph needs]
A graph repeats kernels on the memory that they were captured with. So inputs are copied into static
buffers, and a graph serves calls of the same shapes, types and settings (``settings_of``) alone;
others get a graph of their own, up to ``MOST_GRAPHS`` a block. What forward keeps lies in static
memory, too: a second forward before the backward of the first would overwrite it, so it runs
without the graph. Results and gradients are copied out of static memory, as the user may keep both.

[Note: Why blocks]
The exchange of gradients cannot be captured with them. Block by block, gradients come out of a
graph while backward goes on, and their hooks run as always.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from slipstream.errors import ModelError
from slipstream.fusion.regions import regions_of
from slipstream.fusion.settings import settings_of
from slipstream.memory.forward_override import ForwardReplacement
from slipstream.memory.recompute.buffers import buffers_of
from slipstream.memory.recompute.module_state import modules_in, settings_kept
from slipstream.strategy import Row

MOST_GRAPHS = 4

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
"""What may be the same in every call."""

Capture = Callable[[nn.Module, tuple[Tensor, ...]], Callable[..., Any]]
"""From a module and tensors like its arguments to what replays its forward and backward."""


def graph_blocks(model: nn.Module, capture: Capture | None = None) -> GraphedBlocks:
    """Replay the blocks of a model as CUDA graphs, until ``close()`` of the result.

    Where kernels are short, starting them takes longer than they run; a graph starts all of them at
    once. Blocks are those of `compile_blocks`. A graph is captured in the first call of a kind, by
    ``torch.cuda.make_graphed_callables``; the runs before it leave buffers, attributes and random
    states as they were. A block that cannot be captured, or whose forward assigns attributes or
    buffers, runs as without this, and the report says why. So do evaluation, calls without
    gradients, and a call before the backward of the last one.

    Args:
        model: on a CUDA device.
        capture: another way to capture, as on a host without a device.

    Exactness: bitwise, but for dropout, which draws other numbers.

    Raises:
        ModelError: the model is not on a CUDA device, or has no block.
    """
    if capture is None:
        check_cuda(model)
    return GraphedBlocks(model, capture or _capture_on_cuda)


def check_cuda(model: nn.Module) -> None:
    """Refuse a model elsewhere.

    Raises:
        ModelError: says where it is.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        raise ModelError(
            f"compute.cuda_graph: {type(model).__name__} is on {device.type}; allowed: cuda"
        )


class GraphedBlocks:
    """A model whose blocks are graphs; made by `graph_blocks`."""

    def __init__(self, model: nn.Module, capture: Capture) -> None:
        paths = {m: path for path, m in model.named_modules()}
        regions = regions_of(model, "compute.cuda_graph")
        self._blocks = {paths[m]: _Block(m, capture) for m in regions}
        self._overrides = [
            ForwardReplacement(block.module, block) for block in self._blocks.values()
        ]

    def close(self) -> None:
        """Restore the blocks and free their graphs; idempotent."""
        while self._overrides:
            self._overrides.pop().remove()
        for block in self._blocks.values():
            block.close()

    def report_rows(self) -> list[Row]:
        """Report how many graphs there are, and what could not be captured."""
        graphs = sum(len(block.graphs) for block in self._blocks.values())
        rows = [Row("CUDA graphs", f"{graphs} of {len(self._blocks)} blocks", "")]
        failed = {path: block.failure for path, block in self._blocks.items() if block.failure}
        reasons = "; ".join(f"{path}: {reason}" for path, reason in failed.items())
        return [*rows, Row("not captured", str(len(failed)), reasons)] if failed else rows


@dataclass(eq=False, slots=True)
class _Graph:
    """One captured kind of call."""

    replay: Callable[..., Any]
    needed_by: object = None
    """The node of autograd whose backward needs its results, or what stands for it."""

    def release(self, node: object) -> None:
        if self.needed_by == node:
            self.needed_by = None


@dataclass(eq=False, slots=True)
class _Block:
    """A block's graphs, by kind of call, the least recently used first."""

    module: nn.Module
    capture: Capture
    graphs: OrderedDict[Any, _Graph] = field(default_factory=OrderedDict)
    failure: str = ""
    _assigns: bool = False
    _freed: int = 0
    _hooks: dict[Tensor, RemovableHandle] = field(default_factory=dict)

    def close(self) -> None:
        """Free the graphs."""
        self.graphs.clear()
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.failure or not self.module.training or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        others = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))]
        if others:
            self.failure = f"it is called with a {type(others[0]).__name__}"
            return forward(*args, **kwargs)
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        if not any(t.requires_grad for t in (*inputs, *self.module.parameters())):
            return forward(*args, **kwargs)  # nothing would say when its results are done with
        key = self._key(leaves, spec)
        if key in self.graphs:
            self.graphs.move_to_end(key)
        elif not self._add(key, _Call(self.module, forward, leaves, spec), inputs):
            return forward(*args, **kwargs)
        graph = self.graphs[key]
        if graph.needed_by is not None:
            return forward(*args, **kwargs)
        return _marked(graph, graph.replay(*inputs))

    def _add(self, key: Any, call: nn.Module, inputs: Sequence[Tensor]) -> bool:
        samples = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
        try:
            replay, assigned = _without_traces(self.module, partial(self.capture, call, samples))
        except RuntimeError as error:
            self.failure = str(error).strip().partition("\n")[0]
            return False
        if assigned:  # a cache is there in the next call
            if self._assigns:
                self.failure = f"its forward assigns {assigned[0]}, and a replay would not"
            self._assigns = True
            return False
        self._assigns = False
        self.graphs[key] = _Graph(replay)
        for p in self.module.parameters():
            if p.requires_grad and p not in self._hooks:
                # before a gradient becomes the parameter's, which would be static
                self._hooks[p] = p.register_hook(_copied)
        if len(self.graphs) > MOST_GRAPHS:
            oldest = next((k for k, graph in self.graphs.items() if graph.needed_by is None), key)
            del self.graphs[oldest]
            self._freed += 1
            if self._freed == MOST_GRAPHS:
                self.failure = "it is called with other tensors in attributes, or shapes, each time"
        return key in self.graphs

    def _key(self, leaves: Sequence[Any], spec: Any) -> Any:
        """Collect all that a graph depends on."""
        kinds = [
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (type(leaf), leaf)
            for leaf in leaves
        ]
        memory = [t.data_ptr() for t in (*self.module.parameters(), *self.module.buffers())]
        kept = [_place(t) for m in self.module.modules() for t in _tensors_in(m)]
        learning = [parameter.requires_grad for parameter in self.module.parameters()]
        device = next(self.module.parameters()).device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        settings = settings_of(self.module)
        return (
            *kinds,
            spec,
            *memory,
            *kept,
            *learning,
            autocast,
            torch.get_default_dtype(),
            settings,
        )


def _copied(gradient: Tensor | None) -> Tensor | None:
    """None for a parameter that forward does not use."""
    return None if gradient is None else gradient.clone()


class _Call(nn.Module):
    """A block's own forward as a module of tensors, with everything else as it was in one call."""

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], leaves: Sequence[Any], spec: Any
    ) -> None:
        super().__init__()
        self.block, self._forward, self._spec = block, forward, spec
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self._others)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self._forward(*args, **kwargs)


class _Mark(torch.autograd.Function):
    """Notices when the backward of a graph has run, or will never run."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.node, ctx.graph = _Node(), graph
        graph.needed_by = id(ctx.node)
        finalize(ctx.node, graph.release, id(ctx.node))
        return tuple(result.clone() for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.graph.release(id(ctx.node))  # replays run in order: the next one waits for this one
        return None, *gradients


class _Node:
    """Lives as long as the node of autograd that holds it, which has no weak references."""


def _marked(graph: _Graph, results: Any) -> Any:
    leaves, spec = tree_flatten(results)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not leaf.requires_grad:
            leaves[i] = leaf.clone()
    operation: Any = _Mark
    marked = operation.apply(graph, *(leaves[i] for i in places))
    for place, leaf in zip(places, marked, strict=True):
        leaves[place] = leaf
    return tree_unflatten(leaves, spec)


def _without_traces(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Run, and restore what forward writes into modules, and the random states.

    Returns:
        What ``run`` returns, and the names of attributes and buffers that forward assigned.
    """
    modules, names = modules_in([module]), {m: path for path, m in module.named_modules()}
    buffers = buffers_of(modules)
    written = [(buffer, buffer.clone()) for buffer in buffers.values() if buffer is not None]
    devices = [p.device for p in module.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices):
        try:
            with settings_kept(module) as changed:
                result = run()
        finally:
            now = buffers_of(modules)
            for owner, name in now.keys() - buffers.keys():
                del owner._buffers[name]
            for (owner, name), buffer in buffers.items():
                owner._buffers[name] = buffer
            with torch.no_grad():
                for tensor, before in written:
                    tensor.copy_(before)
    others = [key for key in {**buffers, **now} if buffers.get(key) is not now.get(key)]
    assigned = [(m, name) for m, name in (*changed, *others) if isinstance(m, nn.Module)]
    return result, [f"{names[m]}.{name}".lstrip(".") for m, name in assigned]


def _tensors_in(module: nn.Module) -> list[Tensor]:
    """The tensors among a module's attributes, which are no buffers."""
    return [t for t in vars(module).values() if isinstance(t, Tensor) and not t.is_inference()]


def _place(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _capture_on_cuda(module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., Any]:
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # torch captures only so: replays cast weights anew
    try:
        with warnings.catch_warnings():  # torch keeps the results of its runs before the capture
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream", UserWarning)
            made: Callable[..., Any] = torch.cuda.make_graphed_callables(
                module, samples, allow_unused_input=True
            )
    finally:
        torch.set_autocast_cache_enabled(caches)
    return made
