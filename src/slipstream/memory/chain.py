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
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import UsageError
from slipstream.memory import selective
from slipstream.memory.budget import Parts, Region, segments
from slipstream.memory.buffers import UpdatedOnce
from slipstream.memory.links import Call, Link, same
from slipstream.memory.replaced import Forward, Replaced
from slipstream.strategy.memory import Operation


class Watch(Protocol):
    """Sees each call of a block for as long as blocks are computed again one by one."""

    def begins(self, name: str, forward: Forward, call: Call) -> None:
        """A block is about to run; may install a plan."""

    def ends(self, call: Call, output: Any) -> None:
        """It has run."""


class Chain:
    """Takes the place of the forward of blocks; modules in eval mode or without gradients run as
    ever.

    Args:
        blocks: by name; each is a region of its own until `install`.
        keep: operations whose results are kept inside regions.

    Attributes:
        blocks: as given.
        parts: what is kept, and the regions.
        watch: sees calls, while there is one.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], keep: Sequence[Operation] = ()) -> None:
        self.blocks, self._keep = blocks, keep
        self.watch: Watch | None = None
        self._ahead: dict[str, _Ahead] = {}
        self.install(tuple(blocks), segments(len(blocks), 1), {})
        self._replaced = {
            name: Replaced(module, partial(self._call, name)) for name, module in blocks.items()
        }

    def install(self, order: Sequence[str], parts: Parts, links: Mapping[str, Link]) -> None:
        """From the next call on blocks run in these regions, and those not in ``order`` one by one.

        Raises:
            UsageError: a region over blocks that are not linked.
        """
        rest = [name for name in self.blocks if name not in order]
        alone = (Region((len(order) + number,)) for number in range(len(rest)))
        self._order, self.parts, self._links = (*order, *rest), (*parts, *alone), links
        self._regions: dict[str, Region] = {}
        self._inside: dict[str, str] = {}
        self._once: dict[Region, UpdatedOnce] = {}
        for region in self.parts:
            if isinstance(region, Region):
                first, *others = (self._order[number] for number in region.blocks)
                self._regions[first] = region
                self._inside |= dict.fromkeys(others, first)
        for name in self._inside.keys() - links.keys():
            raise UsageError(
                f"{name} is to be computed again together with the block before it, but is not "
                "called with what that returns on this rank, unlike on the first; use "
                "memory.recompute: {every: 1}"
            )

    @property
    def regions(self) -> tuple[tuple[str, ...], ...]:
        """The blocks that are computed again, those together that are one region."""
        found = (part.blocks for part in self.parts if isinstance(part, Region))
        return tuple(tuple(self._order[number] for number in numbers) for numbers in found)

    @property
    def kept(self) -> tuple[str, ...]:
        """The others."""
        return tuple(self._order[part] for part in self.parts if isinstance(part, int))

    def forget(self) -> None:
        """Let go of what a forward that ended early has left."""
        self._ahead.clear()

    def close(self) -> None:
        """Every block has its own forward again."""
        self.forget()
        for replaced in reversed(self._replaced.values()):
            replaced.remove()

    def _call(self, name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """In the place of a block's forward."""
        if not torch.is_grad_enabled() or not self.blocks[name].training:
            return forward(*args, **kwargs)
        call = Call.of(args, kwargs)
        _check_no_cache(name, call)
        if self.watch is not None:
            self.watch.begins(name, forward, call)
        ahead = self._ahead.pop(name, None)
        if ahead is not None:
            return ahead.output_for(call)
        if name in self._inside:
            raise UsageError(
                f"{name} was called without {self._inside[name]} before it, unlike in the first "
                "forward, but both are computed again together; a model whose blocks are not "
                "always called in turn needs memory.recompute: {every: 1}"
            )
        if name not in self._regions:
            return forward(*args, **kwargs)
        region = self._regions[name]
        output, *others = self._region(region, call)
        one, returned = call, output
        for number, result in enumerate(others, region.blocks[1] if others else 0):
            later = self._order[number]
            one, returned = self._links[later].call(one, returned), result
            self._ahead[later] = _Ahead(later, name, one, _versions(one), result)
        if self.watch is not None:
            self.watch.ends(call, output)
        return output

    def _region(self, region: Region, call: Call) -> list[Any]:
        """What the blocks of a region return; of it only the arguments are kept."""
        run = partial(self._run, region, call.names)
        contexts = partial(self._contexts, region)
        outputs: list[Any] = checkpoint(run, *call.values, use_reentrant=False, context_fn=contexts)
        return outputs

    def _run(self, region: Region, names: tuple[str, ...], *values: Any) -> list[Any]:
        """Run the blocks and the inner regions of a region."""
        call, outputs = Call(values, names), list[Any]()
        last = region.blocks[-1]
        for part in region.parts:
            if isinstance(part, Region):
                first, got = part.blocks[0], self._region(part, call)
            else:
                forward = self._replaced[self._order[part]].forward
                first, got = part, [forward(*call.args, **call.kwargs)]
            for number, output in enumerate(got, first):
                outputs.append(output)
                if number < last:
                    call = self._links[self._order[number + 1]].call(call, output)
        return outputs

    def _contexts(
        self, region: Region
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of the first run of a region, and of its repetitions."""
        if region not in self._once:
            modules = [self.blocks[self._order[number]] for number in region.blocks]
            self._once[region] = UpdatedOnce(modules)
        first, again = self._once[region].contexts()
        if not self._keep:
            return first, again
        caching, cached = selective.contexts(self._keep)
        return _Both(first, caching), _Both(again, cached)


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
            or _versions(call) != self.versions
        ):
            raise UsageError(
                f"{self.name} was not called with what the block before it returned, unlike in the "
                f"first forward, but is computed again together with {self.first}; a model that "
                "changes what it does between blocks needs memory.recompute: {every: 1}"
            )
        return self.output


class _Both:
    """Two contexts as one that may be entered several times."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts, self._stack = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)


def _versions(call: Call) -> list[int]:
    return [v._version for v in call.values if isinstance(v, torch.Tensor)]


def _check_no_cache(name: str, call: Call) -> None:
    """Refuse a cache of keys and values, to which each run of a block would append."""
    for value in call.values:
        if hasattr(value, "get_seq_length"):
            raise UsageError(
                f"{name} is called with a {type(value).__name__}, to which it would append keys "
                "and values twice when it is computed again; train without it: "
                "model.config.use_cache = False"
            )
