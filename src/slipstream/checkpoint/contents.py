"""The contents of a rank's checkpoint: collected from a session, and given back to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from slipstream.checks.sketch import NARROW, Signs, sketch
from slipstream.data import randomness
from slipstream.data.prefetch.samplers import samplers_of
from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import UsageError, warn
from slipstream.optim.dealt_state import may_be_part
from slipstream.parallel.dims import mesh_of
from slipstream.session.session import Session
from slipstream.transport.consistency import any_of, broadcast_from_first

AnySession = Session[Any, Any]
BESIDE = "rank"
"""The part of a rank's state that ``session.checkpoint()`` does not have."""
KeptEntries = dict[str, dict[str, tuple[float, ...]]]
"""Names of what an optimizer keeps by parameter; with its sketch and its norm, where each rank may
have a part of it."""


class KeepsState(Protocol):
    """A scheduler, a sampler, a counter of the script."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


def check_places(session: AnySession, also: Mapping[str, KeepsState]) -> None:
    """Refuse what keeps its place in the data itself, beside the session, which does so, too: a
    resumed run would skip twice.

    Raises:
        UsageError: says what to leave out.
    """
    loader = _loader_of(session)
    parts = () if loader is None else (*samplers_of(loader), getattr(loader, "dataset", None))
    for name, keeper in also.items():
        counts = type(keeper).__module__.startswith(("torchdata.", "datasets."))
        if counts and any(keeper is part for part in parts):
            raise UsageError(
                f"also={{{name!r}: ...}} is a {type(keeper).__name__}, which keeps the place in "
                "the data, as the session's loader does, and a resumed run would skip twice; leave "
                "it out of also"
            )


def collected(
    session: AnySession, also: Mapping[str, KeepsState]
) -> tuple[dict[str, Any], KeptEntries]:
    """The state of this rank, and what its optimizer keeps by parameter, where that of rank 0 is
    saved for all. A collective.

    Args:
        session: between two updates.
        also: what else of the script has a state.
    """
    # first: ranks wait for one another in it, also for one whose other states fail
    state = session.checkpoint(sharded=True)
    loader = _loader_of(session)
    place = {} if loader is None else loader.position()
    state[BESIDE] = {
        "also": {name: keeper.state_dict() for name, keeper in also.items()},
        "random": randomness.state(),
        "mesh": _mesh(session),
        "pass": None if loader is None else loader.drawn_with,
        "generators": [] if loader is None else loader.generators,
        "workers": loader is not None and loader.workers_live_on,
        "place": place if "own" in place else None,
    }
    kept: KeptEntries = {}
    if state["optimizer"]["ranks"] == 1:  # the first rank has the same
        states = state["optimizer"]["optimizer"].get("state", {})
        kept = _kept(session.optimizer, states)
        if session.rank:
            del state["optimizer"]
    return state, kept


def _kept(optimizer: torch.optim.Optimizer, states: Mapping[Any, Any]) -> KeptEntries:
    held = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))

    def sketched(number: Any, value: object) -> tuple[float, ...]:
        if number not in held or type(value) is not torch.Tensor:
            return ()
        return _sketched(value) if may_be_part(value, held[number]) else ()

    return {
        str(number): {str(key): sketched(number, value) for key, value in state.items()}
        for number, state in states.items()
        if isinstance(state, dict)
    }


def _sketched(value: torch.Tensor) -> tuple[float, ...]:
    value = value.coalesce().values() if value.is_sparse else value
    value = value if value.is_complex() else value.double()  # 8 bits have no sums
    sums = sketch(value, Signs.random(value.numel(), 0, value.device))
    return (*sums.tolist(), float(torch.linalg.vector_norm(value)))


def _are_alike(one: KeptEntries, other: KeptEntries) -> bool:
    """Whether these are the same states, but for rounding: processors of several kinds round the
    statistics of a factored optimizer in other ways."""
    pairs = [(state, other.get(number, {})) for number, state in one.items()]
    if one.keys() != other.keys() or any(a.keys() != b.keys() for a, b in pairs):
        return False
    return all(
        len(own) == len(theirs)
        and not any(abs(x - y) > NARROW * own[-1] for x, y in zip(own, theirs, strict=True))
        for a, b in pairs
        for own, theirs in ((a[key], b[key]) for key in a)
    )


def check_alike(
    session: AnySession,
    also: Mapping[str, KeepsState],
    kept: KeptEntries,
    group: dist.ProcessGroup,
) -> None:
    """Refuse to save the optimizer of rank 0 alone, where others keep what it does not. A
    collective.

    Args:
        session, also: as in `collected`.
        kept: from there.
        group: all ranks.

    Raises:
        UsageError: on all ranks alike.
    """
    if any(_has_state_of(session.optimizer, keeper) for keeper in also.values()):
        return  # each rank saves its own
    first = broadcast_from_first(kept, group)
    if any_of(not _are_alike(kept, first), group):
        name = type(session.optimizer).__name__
        raise UsageError(
            f"{name} keeps other states on some ranks than on rank 0, as one that "
            "deals its work out to ranks does, and a checkpoint has those of rank 0; "
            "save those of each rank, too: Checkpoints(..., also={'optimizer': optimizer})"
        )


def _has_state_of(optimizer: torch.optim.Optimizer, part: object) -> bool:
    """Whether the state of ``part`` is that of the optimizer: it, or a framework's wrapper of it;
    schedulers, which have it, too, save their own alone."""
    wrapped = isinstance(part, torch.optim.Optimizer) and getattr(part, "optimizer", None)
    return part is optimizer or wrapped is optimizer


def give_back(
    session: AnySession, also: Mapping[str, KeepsState], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Let a session, and what else has a state, go on from what all ranks of a run have saved."""
    states = [{k: v for k, v in one.items() if k != BESIDE} for one in saved]
    mesh = saved[0][BESIDE].get("mesh", _mesh(session))
    same = len(saved) == session.world_size and mesh == _mesh(session)
    mine = saved[session.rank if same else 0][BESIDE]
    if (place := mine.get("place")) is not None:  # older checkpoints have that of rank 0
        states[0] = {**states[0], "session": {**states[0]["session"], "data": place}}
    session.restore([state for state in states if state])
    if place is not None and not same and session.rank == 0:
        warn(
            "the loader keeps a state of its own, and the ranks that saved it are others: each "
            "goes on with that of rank 0",
        )
    if missing := sorted({*also} - {*mine["also"]}):
        warn(
            f"the checkpoint has no state of {', '.join(missing)}, which begins anew",
        )
    for name, keeper in also.items():
        if name in mine["also"]:
            keeper.load_state_dict(mine["also"][name])
    if not same:  # random numbers of other ranks or places: each goes on with its own
        return
    loader = _loader_of(session)
    if loader is not None:  # older checkpoints have those of a pass under way alone
        loader.restore_generators(mine.get("generators", ()))
        loader.let_workers_live_on(mine.get("workers", False))
    begun = mine["pass"]
    if isinstance(begun, list):  # as it was written first: torch's own numbers alone
        begun = {"default": {**mine["random"], "torch": begun[0]}, "loader": begun[1:]}
    if begun is not None and loader is not None:
        loader.draw_with(begun)
    randomness.restore(mine["random"])


def warn_of_joining(updates: int, also: Mapping[str, KeepsState]) -> None:
    """Say what a job that has joined others begins anew: all but schedules that were made where
    these are, by updates or by epochs."""
    anew = {name: part for name, part in also.items() if getattr(part, "last_epoch", 0) <= 0}
    if not anew:
        return
    schedules = any(hasattr(part, "last_epoch") for part in anew.values())
    remedy = "; make a schedule after accelerate(), by last_epoch=session.updates - 1"
    warn(
        f"this job has joined others after {updates} updates, and has their model and "
        f"optimizer, but no state of {', '.join(sorted(anew))}, which begins anew"
        f"{remedy if schedules else ''}",
    )


def _loader_of(session: AnySession) -> UnevenInputLoader | None:
    try:
        return session.loader
    except UsageError:
        return None


def _mesh(session: AnySession) -> dict[str, int]:
    """The ranks along each axis: what a rank computes is told by its number and these."""
    return mesh_of(session.strategy.parallel, session.world_size).sizes
