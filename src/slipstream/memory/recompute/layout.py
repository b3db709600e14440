"""Which blocks form which region, and how a region runs, the first time and in recomputation.

A layout is immutable: a graph is recomputed by the layout with which its forward ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import UsageError
from slipstream.memory.forward_override import Forward
from slipstream.memory.recompute import selective
from slipstream.memory.recompute.block_dataflow import Call, Link
from slipstream.memory.recompute.budget import Region, RegionParts
from slipstream.memory.recompute.buffers import BufferReplay
from slipstream.memory.recompute.module_state import StateReplay, WrittenParameters, modules_in
from slipstream.memory.recompute.rng_state import RngReplay, generators_of
from slipstream.strategy.memory import KeptOperation

_PLACEHOLDER = torch.empty(0)


@dataclass(eq=False)
class RegionLayout:
    """Blocks in order, and the regions among them.

    Args:
        order: names of the blocks; the numbers in ``parts`` are positions in it.
        parts: the blocks that are kept, and the regions.
        links: by name of a block, its link to the block before it.
        modules: the blocks by name.
        forwards: the blocks' own forwards by name.
        keep: operations whose results are kept inside of regions.

    Attributes:
        regions: by the name of their first block.
        first_of: for each other block of a region, the name of the region's first block.

    Raises:
        UsageError: a region contains a block that is not linked to the one before it.
    """

    order: Sequence[str]
    parts: RegionParts
    links: Mapping[str, Link]
    modules: Mapping[str, nn.Module]
    forwards: Mapping[str, Forward]
    keep: Sequence[KeptOperation]

    def __post_init__(self) -> None:
        self.regions: dict[str, Region] = {}
        self.first_of: dict[str, str] = {}
        self._buffer_replays: dict[Region, BufferReplay] = {}
        self._looked_at: set[Region] = set()
        for region in self.parts:
            if isinstance(region, Region):
                first, *others = self.names(region)
                self.regions[first] = region
                self.first_of |= dict.fromkeys(others, first)
        for name in self.first_of.keys() - self.links.keys():
            raise UsageError(
                f"{name} shares a region with the block before it, but on this rank, unlike on the "
                "first, it is not called with what that block returns; use "
                "memory.recompute: {every: 1}"
            )

    def names(self, region: Region) -> tuple[str, ...]:
        """Names of the blocks of a region."""
        return tuple(self.order[number] for number in region.blocks)

    def run(self, region: Region, call: Call) -> list[tuple[Call, Any]]:
        """Run a region, keeping only the arguments of its first block for backward.

        Returns:
            The call of each block of the region, and its output.
        """
        outputs = self._checkpoint(region, call)
        calls = list[tuple[Call, Any]]()
        for name, output in zip(self.names(region), outputs, strict=True):
            if calls:
                call = call.next_call(self.links[name], calls[-1][1])
            calls.append((call, output))
        return calls

    def _checkpoint(self, region: Region, call: Call) -> list[Any]:
        """Outputs of the blocks of a region, run under ``torch.utils.checkpoint``.

        checkpoint() takes tensors as separate arguments, so that hooks on saved tensors (offload)
        see them. A tensor that is passed twice is passed to it once, and is one object again in
        recomputation.
        """
        given = call.tensors
        distinct = {id(tensor): tensor for tensor in given}
        numbers = [[*distinct].index(id(tensor)) for tensor in given]
        # The first run uses the caller's own call. It is popped, and the form that remains holds
        # placeholders, because this closure lives until backward and must not keep the tensors.
        first_run, form = [call], call.with_tensors(repeat(_PLACEHOLDER))

        def run(*saved: torch.Tensor) -> list[Any]:
            if first_run:
                return self._run(region, first_run.pop())
            return self._run(region, form.with_tensors(saved[number] for number in numbers))

        contexts = partial(self._contexts, region, call.objects)
        outputs: list[Any] = checkpoint(
            run, *distinct.values(), use_reentrant=False, context_fn=contexts
        )
        return outputs

    def _run(self, region: Region, call: Call) -> list[Any]:
        """Outputs of all blocks of a region; inner regions are checkpoints again."""
        outputs, last = list[Any](), region.blocks[-1]
        for part in region.parts:
            if isinstance(part, Region):
                first, part_outputs = part.blocks[0], self._checkpoint(part, call)
            else:
                forward = self.forwards[self.order[part]]
                first, part_outputs = part, [forward(*call.args, **call.kwargs)]
            for number, output in enumerate(part_outputs, first):
                outputs.append(output)
                if number < last:
                    call = call.next_call(self.links[self.order[number + 1]], output)
        return outputs

    def _contexts(
        self, region: Region, objects: Sequence[object]
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of the first run of a region, and of its recomputation."""
        modules = [self.modules[name] for name in self.names(region)]
        if region not in self._buffer_replays:  # one a region: it remembers unchanged masks
            self._buffer_replays[region] = BufferReplay(modules)
        state, rng = StateReplay(modules, objects), RngReplay(generators_of(modules_in(modules)))
        contexts = [(state.record(), state), self._buffer_replays[region].contexts()]
        contexts.append((rng.record(), rng))
        if region not in self._looked_at:  # once: what a forward does, it does each time
            self._looked_at.add(region)
            written = WrittenParameters(modules)
            contexts.append((written.record(), written))
        if self.keep:
            contexts.append(selective.contexts(self.keep))
        first, recomputation = zip(*contexts, strict=True)
        return _Combined(*first), _Combined(*recomputation)


class _Combined(ExitStack):
    """Several contexts as one, which may be entered several times (``retain_graph``)."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._contexts = contexts

    def __enter__(self) -> Self:
        for context in self._contexts:
            self.enter_context(context)
        return self
