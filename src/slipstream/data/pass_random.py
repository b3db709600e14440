"""The random states with which a pass of a loader began, so that another run can draw its order.

A loader that shuffles draws the order of a pass when it begins, from torch's default generator or
one of its own. A run that is resumed in the middle of a pass draws it again, and then goes on with
the random numbers that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

RandomStates = list[torch.Tensor]
"""Of torch's default generator, and of those that the loader has."""


def _generators(loader: object) -> list[torch.Generator]:
    found = [torch.default_generator]
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batch_sampler
    # beside a batch_sampler of the user's, torch gives the loader a sampler that draws nothing
    for owner in (loader, *samplers, getattr(batch_sampler, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
            found.append(generator)
    return found


def states(loader: object) -> RandomStates:
    """The states of all generators from which a loader may draw its order."""
    return [generator.get_state() for generator in _generators(loader)]


@contextmanager
def drawn_with(loader: object, saved: RandomStates, *, again: bool) -> Iterator[None]:
    """Inside, where a pass is drawn again, the generators are as saved; then torch's default one is
    as it was before, and those of the loader go on from what they have drawn."""
    if not again:
        yield
        return
    before = torch.get_rng_state()
    for generator, state in zip(_generators(loader), saved, strict=False):
        generator.set_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)
