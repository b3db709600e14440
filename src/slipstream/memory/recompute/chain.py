"""Recompute blocks of a model in backward, one by one or several in one region.

[Note: Running ahead]
The model's own code calls one block after another, but a region of several blocks is one
checkpoint. The checkpoint runs when the model calls the first block of the region, and runs ahead
through the others: their arguments follow from the links between blocks (see ``block_dataflow``).
When the model then calls these blocks with exactly those arguments, they return the outputs that
exist already; with any other arguments they raise an error. All outputs are outputs of the
checkpoint, so the model may use each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.kernels.surroundings import needs_plain_functions
from slipstream.memory.forward_override import Forward, ForwardOverride
from slipstream.memory.recompute.block_dataflow import Call, Link, versions
from slipstream.memory.recompute.budget import Region, RegionParts
from slipstream.memory.recompute.layout import RegionLayout
from slipstream.memory.untraced import leave_to_python
from slipstream.strategy.memory import KeptOperation

_USED_UP = {
    "__next__": "which is exhausted when the block is recomputed; pass a list",
    "get_seq_length": "to which recomputation would append keys and values a second time; train "
    "without a cache: model.config.use_cache = False",
}
"""Why iterators and key-value caches, known by an attribute, cannot be arguments of a block."""


class CallObserver(Protocol):
    """Is told of each call of a block, as long as every block is a region of its own."""

    def before_call(self, name: str, forward: Forward, call: Call) -> None:
        """A block is about to run; the observer may install a layout."""

    def after_call(self, call: Call, output: Any) -> None:
        """The block has returned."""


class Chain:
    """Overrides the forward of blocks. Without gradients they run as before, and so they do under
    transforms of ``torch.func`` and ``torch.jit.trace``, which know no checkpoint.

    Args:
        blocks: modules by name; each is a region of its own until `install`.
        keep: operations whose results are kept inside of regions.

    Attributes:
        blocks: as given.
        layout: the layout of the next forward of the model.
        observer: is told of calls; None: nobody.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], keep: Sequence[KeptOperation] = ()) -> None:
        leave_to_python()
        self.blocks, self._keep = blocks, keep
        self.observer: CallObserver | None = None
        # By name: first block of the region, call, versions of the call's tensors, output.
        self._pending: dict[str, tuple[str, Call, list[int], Any]] = {}
        self._overrides = {
            name: ForwardOverride(module, partial(self._call, name))
            for name, module in blocks.items()
        }
        self._forwards = {
            name: partial(_forward_on_unchanged_inputs, name, override.forward)
            for name, override in self._overrides.items()
        }
        self.install((), (), {})
        self.begin()

    def install(self, order: Sequence[str], parts: RegionParts, links: Mapping[str, Link]) -> None:
        """Use these regions from the next `begin` on; blocks not in ``order`` are regions of one.

        Raises:
            UsageError: a region contains a block that is not linked to the one before it.
        """
        all_names = dict.fromkeys([*order, *self.blocks])
        single = tuple(Region((number,)) for number in range(len(order), len(all_names)))
        self.layout = RegionLayout(
            tuple(all_names), (*parts, *single), links, self.blocks, self._forwards, self._keep
        )

    def begin(self) -> None:
        """A forward of the model begins: use the installed layout, drop unclaimed outputs.

        The layout does not change in between, nor in backward: a checkpoint in the model's own
        code, or around the model, calls blocks once more, which must run as they did in forward.
        """
        if not _in_backward():
            self._active_layout = self.layout
        self._pending.clear()

    def close(self) -> None:
        """Restore the forward of every block."""
        self._pending.clear()
        for override in reversed(self._overrides.values()):
            override.remove()

    def _call(self, name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The forward of block ``name``."""
        if not torch.is_grad_enabled() or needs_plain_functions():
            return forward(*args, **kwargs)
        call = Call(args, kwargs)
        for value in call.values:
            for attribute, why in _USED_UP.items():
                if hasattr(value, attribute):
                    raise UsageError(f"{name} is called with a {type(value).__name__}, {why}")
        if self.observer is not None:
            self.observer.before_call(name, self._forwards[name], call)
        pending = self._pending.pop(name, None)
        if pending is not None:
            first, its_call, its_versions, output = pending
            if not call.is_same(its_call) or versions(call.tensors) != its_versions:
                raise UsageError(
                    f"{name} was not called with what the block before it returned, unlike in the "
                    f"first forward, but is in one region with {first}; a model that changes what "
                    "it does between blocks needs memory.recompute: {every: 1}"
                )
            return output
        layout = self._active_layout
        if name in layout.first_of:
            raise UsageError(
                f"{name} was called without {layout.first_of[name]} before it, unlike in the first "
                "forward, but both are in one region; a model that does not always call its blocks "
                "in the same order needs memory.recompute: {every: 1}"
            )
        if name not in layout.regions:
            return forward(*args, **kwargs)
        region = layout.regions[name]
        (_, output), *others = layout.run(region, call)
        for other, (its_call, its_output) in zip(layout.names(region)[1:], others, strict=True):
            self._pending[other] = name, its_call, versions(its_call.tensors), its_output
        if self.observer is not None:
            self.observer.after_call(call, output)
        return output


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _forward_on_unchanged_inputs(name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run a block and check that recomputation will find its inputs unchanged.

    Raises:
        UsageError: the block changed one of its inputs in place.
    """
    inputs = Call(args, kwargs).tensors
    before = versions(inputs)
    output = forward(*args, **kwargs)
    if versions(inputs) != before:
        raise UsageError(
            f"{name} changes its input in place, so it cannot be recomputed from that input; let "
            "it change a copy (x = x.clone(), or inplace=False), or exclude it: "
            "memory.recompute: {checkpoints: [path, ...]}"
        )
    return output
