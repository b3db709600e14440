"""The state of a session as plain values: what a checkpoint holds, and what it must hold.

Never touches a session: values in, values out.

[Note: Another number of ranks]
Residuals, and what DGC gathers, are in the units of the mean: the ranks' sum is what the mean still
lacks. So a rank may take over another's by adding it to its own. Of p old and q new ranks, the new
rank r takes those of the old ranks r, r + q, r + 2q ...; what PowerSGD knows of directions is the
same on all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from slipstream.errors import UsageError
from slipstream.gradients.compressed import NamedState
from slipstream.gradients.ready_order import ReadyOrder
from slipstream.strategy import Split
from slipstream.transport.consistency import collective_errors

VERSION = 2
KEYS = {"version", "steps", "split", "ready_order", "codecs"}
SHARED = {"q"}
"""What codecs keep that is the same on all ranks."""


def state_of(
    steps: int,
    split: Split | None,
    order: ReadyOrder | None,
    names: Sequence[str],
    codecs: Sequence[NamedState] = (),
    loss_scale: list[float] | None = None,
) -> dict[str, Any]:
    """What a resumed run needs; parameters go by name, so that it may list them in another order.

    Args:
        steps: updates so far.
        split: what the search for the best split has settled on; None: nothing.
        order: the ready order, if it was observed.
        names: of the trainable parameters.
        codecs: what they keep, by rank.
        loss_scale: its state; None: there is none.
    """
    return {
        "version": VERSION,
        "steps": steps,
        "split": None if split is None else split.document(full=True),
        "ready_order": None
        if order is None
        else {
            "names": [names[i] for i in order.order],
            "firings": [order.firings[i] for i in order.order],
            "sparse_dims": [order.sparse_dims[i] for i in order.order],
        },
        "codecs": list(codecs),
        "loss_scale": loss_scale,
    }


def gathered(kept: NamedState, control: dist.ProcessGroup) -> list[NamedState]:
    """What the codecs of every rank keep, on every rank, in the main memory.

    Raises:
        ExchangeError: another rank is gone.
    """
    own = {name: {key: t.cpu() for key, t in state.items()} for name, state in kept.items()}
    every: list[NamedState] = [{} for _ in range(dist.get_world_size(control))]
    with collective_errors("the gathering of what codecs keep"):
        dist.all_gather_object(every, own, group=control)
    return every


def joined_order(
    own: dict[str, list[Any]] | None, control: dist.ProcessGroup
) -> dict[str, list[Any]] | None:
    """The ready order of a whole model whose stages are on several ranks, the last stage first."""
    every: list[dict[str, list[Any]] | None] = [None] * dist.get_world_size(control)
    with collective_errors("the gathering of the ready orders"):
        dist.all_gather_object(every, own, group=control)
    seen: dict[str, tuple[Any, ...]] = {}
    for order in reversed(every):
        if order is None:
            return None
        for name, *facts in zip(*order.values(), strict=True):
            seen.setdefault(name, tuple(facts))
    columns = list(zip(*seen.values(), strict=True)) or [(), ()]
    return {"names": list(seen), "firings": list(columns[0]), "sparse_dims": list(columns[1])}


def digest(state: object) -> str:
    """What must be equal on all ranks that load a state: of tensors, a checksum."""
    if not isinstance(state, Mapping) or "codecs" not in state:
        return repr(state)
    plain = {key: value for key, value in state.items() if key != "codecs"}
    sums = [
        (rank, name, key, tuple(t.shape), _checksum(t))
        for rank, kept in enumerate(state["codecs"])
        for name, values in kept.items()
        for key, t in values.items()
    ]
    return repr((plain, sums))


def _checksum(tensor: torch.Tensor) -> int:
    values = tensor.detach().cpu().reshape(-1)
    return crc32(values.view(torch.uint8).numpy().tobytes())


def dealt_out(codecs: Sequence[NamedState], rank: int, world_size: int) -> NamedState:
    """What the codecs of a rank go on from; see the note at the top of the file.

    Example:
        >>> two = [{"w": {"error": torch.tensor([1.0])}}, {"w": {"error": torch.tensor([3.0])}}]
        >>> with warnings.catch_warnings(action="ignore"):
        ...     dealt_out(two, 0, 1)
        {'w': {'error': tensor([4.])}}
    """
    if len(codecs) == world_size:
        return codecs[rank]
    if rank == 0:
        warnings.warn(
            f"the state is of {len(codecs)} ranks, this run has {world_size}: what codecs have not "
            "sent yet was dealt out among them (its sum is preserved), so the run goes on well, "
            "but not bit for bit",
            stacklevel=3,
        )
    own: dict[str, dict[str, torch.Tensor]] = {}
    for name, values in codecs[0].items():
        shared = {key: values[key] for key in values.keys() & SHARED}
        if shared:
            own[name] = shared
    for kept in codecs[rank::world_size]:
        for name, values in kept.items():
            mine = own.setdefault(name, {})
            for key, value in _unserved(values).items():
                if key not in SHARED:
                    mine[key] = mine[key] + value if key in mine else value
    return own


def _unserved(values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """What a rank kept as the server of a piece becomes its own error: pieces change."""
    if "served" not in values:
        return values
    error, first = values["error"].clone(), int(values["served_from"])
    error[first : first + len(values["served"])] += values["served"]
    return {"error": error}


def order_of(state: Mapping[str, Any], names: Sequence[str]) -> ReadyOrder | None:
    """The ready order of these parameters in a state that is not refused."""
    saved = state["ready_order"]
    if saved is None:
        return None
    index = {name: i for i, name in enumerate(names)}
    saw = zip(saved["names"], saved["firings"], saved["sparse_dims"], strict=True)
    own = [(index[name], firings, dims) for name, firings, dims in saw if name in index]
    by_index = sorted(own)
    return ReadyOrder(
        tuple(i for i, _, _ in own),
        tuple(firings for _, firings, _ in by_index),
        tuple(dims for _, _, dims in by_index),
    )


def refusal(state: object, names: Sequence[str], ranks: int | None = None) -> UsageError | None:
    """Why a state cannot be loaded by a session of these trainable parameters.

    ``ranks``: how many it must be of, where ranks share a model; None: any number.
    """
    if not isinstance(state, Mapping):
        return UsageError(
            f"this state is a {type(state).__name__}; pass what session.state_dict() returned"
        )
    if state.get("version") != VERSION:
        return UsageError(f"this state has version {state.get('version')!r}; allowed: {VERSION}")
    if missing := KEYS - state.keys():
        return UsageError(
            f"this state lacks {sorted(missing)}; pass what session.state_dict() returned"
        )
    saved = state["ready_order"]
    if saved is not None and set(saved["names"]) != set(names):
        odd = sorted(set(saved["names"]) ^ set(names))
        return UsageError(f"this state is another model's: only one of both has {odd[:5]}")
    if ranks is not None and len(state["codecs"]) not in (0, ranks):
        return UsageError(
            f"this state is of {len(state['codecs'])} ranks, this run has {ranks}, some of which "
            "share a model; allowed: as many as before, or {**state, 'codecs': []}, which forgets "
            "what codecs have not sent yet"
        )
    return None
