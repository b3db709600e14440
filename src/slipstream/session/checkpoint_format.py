"""The format of a checkpoint and of a session's state: what they hold, and must hold to be loaded.

Values in, values out: nothing here knows a session.

[Note: Another number of ranks]
What error feedback has not sent yet (and the momentum that DGC accumulates) is in units of the
mean: the sum over ranks is what the mean still lacks. So a rank can take over another rank's part
by adding it to its own. Of p old and q new ranks, new rank r takes the parts of old ranks r, r + q,
r + 2q ...; PowerSGD's directions (``q``) are the same on all ranks and are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from slipstream.errors import UsageError, warn
from slipstream.gradients.compressed import NamedState
from slipstream.gradients.ready_order import ReadyOrder
from slipstream.local.model import KEY as LOCAL, joined_ranks
from slipstream.parallel.dims import gather_objects
from slipstream.pytree import checksum, mapped
from slipstream.session.checkpoint_shape import mistakes, session_mistakes
from slipstream.sharding.state import join_shards

VERSION = 2
KEYS = {"version", "steps", "split", "ready_order", "codecs"}
LATER = {"transport", "overlap", "speed", "loss_scale", "data", "local"}
"""Keys of a state that those of the first sessions of this version lack."""
REPLICATED = {"q"}
"""Entries of a codec's state that are the same on all ranks that have them."""

Part = Literal["model", "optimizer", "session"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Of a checkpoint, in the order in which they are restored."""

OrderDocument = dict[str, list[Any]]
"""A ready order by parameter names, so that a resumed run may register them in another order."""


def checked(parts: Iterable[str]) -> tuple[Part, ...]:
    """The parts of a checkpoint that are asked for, in order; none: all.

    Raises:
        UsageError: names one that does not exist.
    """
    asked = {*parts}
    if unknown := sorted(asked - {*PARTS}):
        raise UsageError(f"a checkpoint has no part {unknown[0]!r}; allowed: {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in asked or not asked)


def joined(state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One checkpoint of the whole run, from itself or from those of all its ranks.

    Raises:
        UsageError: it is no checkpoint, a rank's part is missing or there twice, or parts are of
            different updates.
    """
    ranks: list[Any] = [*state] if isinstance(state, list | tuple) else [state]
    how = "pass what session.checkpoint() returned, or those of all ranks with sharded=True"
    for one in ranks:
        if not isinstance(one, Mapping):
            raise UsageError(f"this checkpoint is a {type(one).__name__}; {how}")
        if not one or {*one} - {*PARTS}:
            found = ", ".join(sorted(map(str, one))) or "nothing"
            if there := [part for part in PARTS if part in one]:  # beside entries of the script's
                how = f"leave the others out: session.restore({{p: state[p] for p in {there}}})"
            raise UsageError(f"this checkpoint has {found}; allowed: {', '.join(PARTS)}; {how}")
        if (mistake := next(mistakes(one), None)) is not None:
            raise UsageError(f"this checkpoint is damaged: {mistake}; {how}")
    if isinstance(state, Mapping):
        return state
    found_in = (_updates(one["session"]) for one in ranks if "session" in one)
    moments = {updates for updates in found_in if updates is not None}
    if len(moments) > 1:
        found = ", ".join(map(str, sorted(moments)))
        raise UsageError(
            f"these parts are of different updates, {found}, as where a run was killed while ranks "
            "wrote over their last ones; allowed: those of all ranks after one update: write its "
            "number into the names, or use slipstream.Checkpoints"
        )
    whole = {key: one[key] for one in ranks for key in one if key != "optimizer"}
    if parts := [one["optimizer"] for one in ranks if "optimizer" in one]:
        local = all(LOCAL in part for part in parts)
        alike = all(isinstance(one, dict) and one.get("ranks") == 1 for one in parts)
        parts = parts[:1] if alike else parts  # every rank has updated the whole
        whole["optimizer"] = joined_ranks(parts) if local else join_shards(parts)
    return whole


def _updates(session: Mapping[str, Any]) -> int | None:
    """The updates of the run, which all ranks count alike; None: they do not."""
    local: Mapping[str, Any] | None = session.get("local")
    if local is None:
        return int(session["steps"])
    # a rank alone may skip an update, by its loss scale; others may make more than it
    return None if local["config"].get("stretch") else int(local["updates"])


_COMPILED = (
    "; _orig_mod. before names is of torch.compile(model): accelerate() a model that is compiled "
    "as that of the saved run was, or take it off the names of 'model', and restore 'model' and "
    "'optimizer' alone"
)


def refusal(state: object, sizes: Mapping[str, int], ranks: int | None = None) -> UsageError | None:
    """Why a state cannot be loaded by a session of a model of these parameters; None: it can be.

    ``sizes``: by name, how many numbers they have, frozen ones too, which the saved run may have
    trained. ``ranks``: how many ranks it must come from, where ranks share a model; None: any
    number.
    """
    how = "pass what session.state_dict() returned"
    if not isinstance(state, Mapping):
        return UsageError(f"this state is a {type(state).__name__}; {how}")
    version = state.get("version")
    if type(version) is not int or version != VERSION:
        return UsageError(f"this state has version {version!r:.40}; allowed: {VERSION}")
    if missing := KEYS - state.keys():
        return UsageError(f"this state lacks {sorted(missing)}; {how}")
    if unknown := sorted(map(str, state.keys() - KEYS - LATER)):
        return UsageError(
            f"this state has {unknown}, which this version of slipstream does not know; allowed: "
            f"{', '.join(sorted(KEYS | LATER))}; {how}, keep what is the script's beside it, and "
            "load what a newer slipstream has saved with that one"
        )
    mistake = next(session_mistakes(state, sizes if ranks is None else None), None)
    if mistake is not None:
        return UsageError(f"this state is damaged: {mistake}; {how}")
    saved, codecs = state["ready_order"], state["codecs"]
    if saved is not None and (others := sorted(set(saved["names"]) - set(sizes))):
        return UsageError(
            f"this state is another model's: these parameters are not in this one: {others[:5]}"
            + _COMPILED * any("_orig_mod." in name for name in (*others, *sizes))
        )
    if ranks is not None and len(codecs) not in (0, ranks):
        return UsageError(
            f"this state is of {len(codecs)} ranks, this run has {ranks}, some of which "
            "share a model; allowed: the same number, or {**state, 'codecs': []}, which discards "
            "what codecs have not sent yet"
        )
    return None


def digest(state: object) -> str:
    """Digest what must be equal on all ranks that load a state; tensors count by their
    checksums."""
    return repr(mapped(state, lambda tensor: (tuple(tensor.shape), checksum(tensor))))


# The ready order.


def order_document(order: ReadyOrder | None, names: Sequence[str]) -> OrderDocument | None:
    """A ready order of the parameters ``names``."""
    if order is None:
        return None
    return {
        "names": [names[i] for i in order.order],
        "firings": [order.firings[i] for i in order.order],
        "sparse_dims": [order.sparse_dims[i] for i in order.order],
    }


def joined_order(local: OrderDocument | None, control: dist.ProcessGroup) -> OrderDocument | None:
    """The ready order of the whole model of a pipeline, the last stage first."""
    by_name: dict[str, tuple[Any, ...]] = {}
    for order in reversed(gather_objects(local, "the ready orders", control)):
        if order is None:
            return None
        for row in zip(*order.values(), strict=True):
            by_name.setdefault(row[0], row)
    columns = zip(*by_name.values(), strict=True)
    return dict(zip(("names", "firings", "sparse_dims"), map(list, columns), strict=True))


def order_of(state: Mapping[str, Any], names: Sequence[str]) -> ReadyOrder | None:
    """The ready order of the parameters ``names`` in a state that `refusal` accepts; None: it lacks
    some, which the saved run did not train."""
    saved = state["ready_order"]
    if saved is None or not {*names} <= {*saved["names"]}:
        return None
    index = {name: i for i, name in enumerate(names)}
    rows = zip(saved["names"], saved["firings"], saved["sparse_dims"], strict=True)
    local = [(index[name], firings, dims) for name, firings, dims in rows if name in index]
    by_index = sorted(local)
    return ReadyOrder(
        order=tuple(i for i, _, _ in local),
        firings=tuple(firings for _, firings, _ in by_index),
        sparse_dims=tuple(dims for _, _, dims in by_index),
    )


# The state of codecs.


def gathered(local: NamedState, control: dist.ProcessGroup) -> list[NamedState]:
    """The codecs' states of every rank, on every rank, in host memory.

    Raises:
        ExchangeError: another rank is gone.
    """
    on_host = {name: {key: t.cpu() for key, t in state.items()} for name, state in local.items()}
    return gather_objects(on_host, "the codecs' state", control)


def dealt_out(codecs: Sequence[NamedState], rank: int, world_size: int) -> NamedState:
    """The codecs' state that a rank starts from; see the note at the top of the file.

    Example:
        >>> two = [{"w": {"error": torch.tensor([1.0])}}, {"w": {"error": torch.tensor([3.0])}}]
        >>> import warnings
        >>> with warnings.catch_warnings(action="ignore"):
        ...     dealt_out(two, 0, 1)
        {'w': {'error': tensor([4.])}}
    """
    if len(codecs) == world_size:
        return codecs[rank]
    if rank == 0:
        warn(
            f"the state is of {len(codecs)} ranks, this run has {world_size}: what codecs have not "
            "sent yet was dealt out among them; its sum is preserved, but the run does not "
            "continue bit for bit",
        )
    local: dict[str, dict[str, torch.Tensor]] = {}
    for codec in codecs:  # any of them: between hosts, one rank of each keeps a parameter's
        for name, values in codec.items():
            for key in values.keys() & REPLICATED:
                local.setdefault(name, {}).setdefault(key, values[key])
    for codec in codecs[rank::world_size]:
        for name, values in codec.items():
            sums = local.setdefault(name, {})
            for key, value in _without_served(values).items():
                if key not in REPLICATED:
                    sums[key] = sums[key] + value if key in sums else value
    return {name: values for name, values in local.items() if values}


def _without_served(values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Move the error of the piece that a rank served to its own error: pieces change with the
    number of ranks."""
    if "served" not in values:
        return values
    error, first = values["error"].clone(), int(values["served_from"])
    error[first : first + len(values["served"])] += values["served"]
    return {"error": error}
