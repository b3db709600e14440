"""The state of an optimizer of which every rank has a shard, marked so that it passes for no other.

[Note: A part that looks whole] Where ranks have equal shards, a rank's part of the state has the
shapes that every other rank expects. So it says whose part it is: in memory by its class, in a file
by an entry that survives ``torch.save`` and copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.optim import Optimizer

from slipstream.errors import UsageError

MARK = "slipstream_share"
"""The entry of a rank's part: ``{"rank": 0, "ranks": 2}``."""

REMEDY = (
    "call session.checkpoint() on every rank, and save it on one; or save what "
    "session.checkpoint(sharded=True) returns on every rank, to a file of each"
)


class ShardState(defaultdict[Any, dict[str, Any]]):
    """``optimizer.state`` of one rank; neither copied nor saved but by the session.

    Args:
        rank, ranks: whose part it is, and how many there are.
        state: what the optimizer has so far.

    Example:
        >>> import copy
        >>> copy.copy(ShardState(0, 2, {}))
        Traceback (most recent call last):
        slipstream.errors.UsageError: the optimizer's state is the part of rank 0 of 2 ...
    """

    def __init__(self, rank: int, ranks: int, state: Mapping[Any, dict[str, Any]]) -> None:
        super().__init__(dict, state)
        self.rank, self.ranks = rank, ranks
        self.may_be_saved = False

    @property
    def mark(self) -> dict[str, int]:
        """The mark by which a file of this part is known."""
        return {"rank": self.rank, "ranks": self.ranks}

    def refuse(self, *_: object) -> NoReturn:
        """Refuse to give out a part as if it were the whole."""
        raise UsageError(
            f"the optimizer's state is the part of rank {self.rank} of {self.ranks} (gradients."
            f"transport sharded): saved or copied by itself, the other parts are lost; {REMEDY}; "
            "after session.close() every rank has the whole"
        )

    __copy__ = __deepcopy__ = __reduce_ex__ = refuse


def refuse_part(optimizer: Optimizer) -> None:
    """A hook before ``optimizer.state_dict()``: refuse a part, unless the session asks for it."""
    state = optimizer.state
    if isinstance(state, ShardState) and not state.may_be_saved:
        state.refuse()


@contextmanager
def saving(optimizer: Optimizer) -> Iterator[None]:
    """Inside, ``optimizer.state_dict()`` returns this rank's part."""
    state = optimizer.state
    assert isinstance(state, ShardState)
    state.may_be_saved = True
    try:
        yield
    finally:
        state.may_be_saved = False


def is_part(state: Mapping[str, Any], mark: Mapping[str, int] | None = None) -> bool:
    """Whether ``state`` is the part that ``mark`` names; False: it is a whole state.

    Raises:
        UsageError: it is the part of another rank, or of a run with another number of ranks.

    Example:
        >>> is_part({"state": {}, "param_groups": []})
        False
        >>> is_part({MARK: {"rank": 1, "ranks": 2}}, {"rank": 0, "ranks": 2})
        Traceback (most recent call last):
        slipstream.errors.UsageError: this optimizer state is the part of rank 1 of 2, ...
    """
    found = state.get(MARK)
    if found is None and {"rank", "ranks", "optimizer"} <= state.keys():
        found = state  # with what joins it to the others'
    if found is None or (mark is not None and state.get(MARK) == mark):
        return found is not None
    here = "a whole state"
    if mark is not None:
        here += f", or the part of rank {mark['rank']} of {mark['ranks']}"
    raise UsageError(
        f"this optimizer state is the part of rank {found['rank']} of {found['ranks']}, as "
        f"session.checkpoint(sharded=True) returned it there; allowed here: {here}; pass the "
        "checkpoints of all ranks to session.restore(states)"
    )
