"""The random states with which a pass of a loader began, so that another run can draw its order.

A loader that shuffles draws the order of a pass when it begins, from the generators that training
draws from by default or from one of its own. A run that is resumed in the middle of a pass draws it
again, drops the samples that it has used, and then goes on with the random numbers that it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypedDict

import torch
from torch.utils.data import IterableDataset

from slipstream.data import randomness
from slipstream.data.balance.loader import BalancedLoader
from slipstream.data.prefetch.samplers import samplers_of


class RandomStates(TypedDict):
    """The states from which a loader may draw."""

    default: randomness.State
    """Of torch, Python and NumPy."""
    loader: list[torch.Tensor]
    """Of the generators that the loader has."""


def _generators(loader: object) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    # beside a batch_sampler of the user's, torch gives the loader a sampler that draws nothing
    for owner in (loader, getattr(loader, "sampler", None), *samplers_of(loader)):
        generator = getattr(owner, "generator", None)
        known = [torch.default_generator, *found]
        if isinstance(generator, torch.Generator) and all(generator is not g for g in known):
            found.append(generator)
    return found


def own_states(loader: object) -> list[torch.Tensor]:
    """The states of the generators that a loader has."""
    return [generator.get_state() for generator in _generators(loader)]


def restore_own(loader: object, saved: Sequence[torch.Tensor]) -> None:
    """Go on with the numbers of `own_states`."""
    for generator, state in zip(_generators(loader), saved, strict=False):
        generator.set_state(state)


def states(loader: object) -> RandomStates:
    """The states of all generators from which a loader may draw its order."""
    return {"default": randomness.state(), "loader": own_states(loader)}


@contextmanager
def drawn_with(loader: object, saved: RandomStates, *, again: bool) -> Iterator[None]:
    """Inside, where a pass is drawn again, the generators are as saved; then the default ones are
    as they were before, and those of the loader go on from what they have drawn."""
    if not again:
        yield
        return
    before = randomness.state()
    randomness.restore(saved["default"])
    restore_own(loader, saved["loader"])
    try:
        yield
    finally:
        randomness.restore(before)


def seeds_once(loader: object) -> bool:
    """Whether a loader draws a seed for workers in its first pass alone, as they live on; it comes
    from the numbers that the order is drawn from.

    Example:
        >>> seeds_once([1, 2])
        False
    """
    lives_on = bool(getattr(loader, "num_workers", 0) and getattr(loader, "persistent_workers", 0))
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    draws_apart = isinstance(loader, BalancedLoader) or hasattr(loader, "state_dict")
    return lives_on and not is_stream and not draws_apart


def begin_workers(loader: Iterable[object]) -> None:
    """Let workers that live on begin before a pass, as those of an earlier run had: it draws no
    seed for them, and what this draws does not count."""
    before = states(loader)
    iter(loader)
    randomness.restore(before["default"])
    restore_own(loader, before["loader"])


def draw_seed(loader: object) -> None:
    """Draw the seed that a pass has drawn for workers which have begun since."""
    torch.empty((), dtype=torch.int64).random_(generator=getattr(loader, "generator", None))
