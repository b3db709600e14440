"""Blocks of a model that are computed again in backward, one by one or several in one region.

[Note: Running ahead]
The model's own code calls one block after another, but a region of several is one checkpoint. It is
made when the model calls the first of them, and runs ahead through the others, whose arguments
follow from the links between them (see ``links``). When the model calls these with exactly what
they were given, they return what is there already; with anything else there is an error. What they
return are outputs of the region, so that a model may use them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.memory.forward_override import Forward, ForwardOverride
from slipstream.memory.recompute.block_dataflow import Call, Link, same, versions
from slipstream.memory.recompute.budget import Parts, Region
from slipstream.memory.recompute.layout import Layout
from slipstream.pytree import tensors
from slipstream.strategy.memory import Operation


class Watch(Protocol):
    """Sees each call of a block for as long as blocks are computed again one by one."""

    def begins(self, name: str, forward: Forward, call: Call) -> None:
        """A block is about to run; may install a plan."""

    def ends(self, call: Call, output: Any) -> None:
        """It has run."""


class Chain:
    """Takes the place of the forward of blocks; without gradients they run as ever.

    Args:
        blocks: by name; each is a region of its own until `install`.
        keep: operations whose results are kept inside regions.

    Attributes:
        blocks: as given.
        layout: what is kept, and the regions, from the next forward of the model on.
        watch: sees calls, while there is one.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], keep: Sequence[Operation] = ()) -> None:
        self.blocks, self._keep = blocks, keep
        self.watch: Watch | None = None
        self._ahead: dict[str, _Ahead] = {}
        self._replaced = {
            name: ForwardOverride(module, partial(self._call, name))
            for name, module in blocks.items()
        }
        self._forwards = {
            name: partial(_on_unchanged, name, replaced.forward)
            for name, replaced in self._replaced.items()
        }
        self.install((), (), {})
        self.begin()

    def install(self, order: Sequence[str], parts: Parts, links: Mapping[str, Link]) -> None:
        """From the next `begin` on blocks run in these regions, and those not in ``order`` one by
        one.

        Raises:
            UsageError: a region over blocks that are not linked.
        """
        every = dict.fromkeys([*order, *self.blocks])
        alone = tuple(Region((number,)) for number in range(len(order), len(every)))
        self.layout = Layout(
            tuple(every), (*parts, *alone), links, self.blocks, self._forwards, self._keep
        )

    def begin(self) -> None:
        """A forward of the model begins; what one that ended early has left is let go.

        Until then blocks keep to the layout of the last one: a checkpoint that the model puts
        around them itself calls them in backward once more.
        """
        self._running = self.layout
        self._ahead.clear()

    def close(self) -> None:
        """Every block has its own forward again."""
        self._ahead.clear()
        for replaced in reversed(self._replaced.values()):
            replaced.remove()

    def _call(self, name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """In the place of a block's forward."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = Call.of(args, kwargs)
        _check_repeatable(name, call)
        if self.watch is not None:
            self.watch.begins(name, self._forwards[name], call)
        ahead = self._ahead.pop(name, None)
        if ahead is not None:
            return ahead.output_for(call)
        layout = self._running
        if name in layout.first_of:
            raise UsageError(
                f"{name} was called without {layout.first_of[name]} before it, unlike in the "
                "first forward, but both are computed again together; a model whose blocks are not "
                "always called in turn needs memory.recompute: {every: 1}"
            )
        if name not in layout.regions:
            return forward(*args, **kwargs)
        region = layout.regions[name]
        (_, output), *others = layout.run(region, call)
        for later, (one, result) in zip(layout.names(region)[1:], others, strict=True):
            self._ahead[later] = _Ahead(later, name, one, versions(one.tensors), result)
        if self.watch is not None:
            self.watch.ends(call, output)
        return output


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What a block has returned before the model has called it."""

    name: str
    first: str
    call: Call
    versions: list[int]
    output: Any

    def output_for(self, call: Call) -> Any:
        """The output, for this call.

        Raises:
            UsageError: it is not the call for which it was computed.
        """
        same_form = call.names == self.call.names and len(call.values) == len(self.call.values)
        if (
            not same_form
            or not all(map(same, call.values, self.call.values))
            or versions(call.tensors) != self.versions
        ):
            raise UsageError(
                f"{self.name} was not called with what the block before it returned, unlike in the "
                f"first forward, but is computed again together with {self.first}; a model that "
                "changes what it does between blocks needs memory.recompute: {every: 1}"
            )
        return self.output


def _on_unchanged(name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """What a block returns, which finds its inputs as they are when it is computed again.

    Raises:
        UsageError: it has changed one of them.
    """
    given = tensors((args, kwargs))
    before = versions(given)
    output = forward(*args, **kwargs)
    if versions(given) != before:
        raise UsageError(
            f"{name} changes what it is called with in place, so that it cannot be computed again "
            "from that; let it change a copy (x = x.clone(), or inplace=False), or leave it out: "
            "memory.recompute: {checkpoints: [path, ...]}"
        )
    return output


def _check_repeatable(name: str, call: Call) -> None:
    """Refuse a cache of keys and values, to which each run of a block would append, and what can be
    gone through once only."""
    for value in call.values:
        if hasattr(value, "__next__"):
            raise UsageError(
                f"{name} is called with a {type(value).__name__}, which has come to its end when "
                "the block is computed again; give it a list"
            )
        if hasattr(value, "get_seq_length"):
            raise UsageError(
                f"{name} is called with a {type(value).__name__}, to which it would append keys "
                "and values twice when it is computed again; train without it: "
                "model.config.use_cache = False"
            )
