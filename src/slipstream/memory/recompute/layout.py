"""Which blocks of a chain are computed again together, and how they run, the first time and again.

Never changes: a graph is run again by the layout with which it was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import UsageError
from slipstream.memory.forward_override import Forward
from slipstream.memory.recompute import selective
from slipstream.memory.recompute.block_dataflow import Call, Link
from slipstream.memory.recompute.budget import Parts, Region
from slipstream.memory.recompute.buffers import UpdatedOnce
from slipstream.memory.recompute.rng_state import SameDraws
from slipstream.strategy.memory import Operation

_NOTHING = torch.empty(0)
"""In the place of a tensor, in the form of a call."""


class Layout:
    """Blocks in order, and regions of them.

    Args:
        order: names of the blocks, to which the numbers in ``parts`` refer.
        parts: which are kept, and which belong to which region.
        links: what each block gets from the one before it.
        modules: by name of the block.
        forwards: their own, by name.
        keep: operations whose results are kept inside regions.

    Attributes:
        regions: by the name of their first block.
        first_of: the first block of the region that another block belongs to, by its name.

    Raises:
        UsageError: a region over blocks that are not linked.
    """

    def __init__(
        self,
        order: Sequence[str],
        parts: Parts,
        links: Mapping[str, Link],
        modules: Mapping[str, nn.Module],
        forwards: Mapping[str, Forward],
        keep: Sequence[Operation],
    ) -> None:
        self.order, self.parts, self._links = order, parts, links
        self._modules, self._forwards, self._keep = modules, forwards, keep
        self.regions: dict[str, Region] = {}
        self.first_of: dict[str, str] = {}
        self._once: dict[Region, UpdatedOnce] = {}
        for region in parts:
            if isinstance(region, Region):
                first, *others = self.names(region)
                self.regions[first] = region
                self.first_of |= dict.fromkeys(others, first)
        for name in self.first_of.keys() - links.keys():
            raise UsageError(
                f"{name} is to be computed again together with the block before it, but is not "
                "called with what that returns on this rank, unlike on the first; use "
                "memory.recompute: {every: 1}"
            )

    def names(self, region: Region) -> tuple[str, ...]:
        """Of the blocks of a region."""
        return tuple(self.order[number] for number in region.blocks)

    def run(self, region: Region, call: Call) -> list[tuple[Call, Any]]:
        """The calls of the blocks of a region and what they return, of which only the arguments of
        the first are kept for backward.
        """
        outputs = self._checkpoint(region, call)
        made = list[tuple[Call, Any]]()
        for name, output in zip(self.names(region), outputs, strict=True):
            if made:
                call = self._links[name].call(*made[-1])
            made.append((call, output))
        return made

    def _checkpoint(self, region: Region, call: Call) -> list[Any]:
        first, form = [call], call.of_tensors(repeat(_NOTHING))
        given = call.tensors
        distinct = {id(tensor): tensor for tensor in given}  # one given twice stays one
        numbers = [[*distinct].index(id(tensor)) for tensor in given]

        def run(*kept: torch.Tensor) -> list[Any]:
            if first:
                return self._run(region, first.pop())
            return self._run(region, form.of_tensors(kept[number] for number in numbers))

        contexts = partial(self._contexts, region)
        outputs: list[Any] = checkpoint(
            run, *distinct.values(), use_reentrant=False, context_fn=contexts
        )
        return outputs

    def _run(self, region: Region, call: Call) -> list[Any]:
        """What the blocks and the inner regions of a region return."""
        outputs, last = list[Any](), region.blocks[-1]
        for part in region.parts:
            if isinstance(part, Region):
                first, got = part.blocks[0], self._checkpoint(part, call)
            else:
                forward = self._forwards[self.order[part]]
                first, got = part, [forward(*call.args, **call.kwargs)]
            for number, output in enumerate(got, first):
                outputs.append(output)
                if number < last:
                    call = self._links[self.order[number + 1]].call(call, output)
        return outputs

    def _contexts(
        self, region: Region
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of the first run of a region, and of its repetitions."""
        if region not in self._once:
            self._once[region] = UpdatedOnce([self._modules[name] for name in self.names(region)])
        draws = SameDraws()
        contexts = [self._once[region].contexts(), (draws.first(), draws)]
        if self._keep:
            contexts.append(selective.contexts(self._keep))
        first, again = zip(*contexts, strict=True)
        return _All(*first), _All(*again)


class _All:
    """Several contexts as one that may be entered several times."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts, self._stack = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)
