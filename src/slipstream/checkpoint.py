"""The state of a session as plain values: what a checkpoint holds, and what it must hold.

Never touches a session: values in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import UsageError
from slipstream.gradients.order import ReadyOrder
from slipstream.strategy import Split

VERSION = 1
KEYS = {"version", "steps", "split", "ready_order"}


def state_of(
    steps: int, split: Split | None, order: ReadyOrder | None, names: Sequence[str]
) -> dict[str, Any]:
    """What a resumed run needs; parameters go by name, so that it may list them in another order.

    Args:
        steps: updates so far.
        split: what the search for the best split has settled on; None: nothing.
        order: the ready order, if it was observed.
        names: of the trainable parameters.
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
    }


def order_of(state: Mapping[str, Any], names: Sequence[str]) -> ReadyOrder | None:
    """The ready order of a state that is not refused."""
    saved = state["ready_order"]
    if saved is None:
        return None
    index = {name: i for i, name in enumerate(names)}
    order = tuple(index[name] for name in saved["names"])
    at = sorted(range(len(order)), key=order.__getitem__)
    return ReadyOrder(
        order,
        tuple(saved["firings"][i] for i in at),
        tuple(saved["sparse_dims"][i] for i in at),
    )


def refusal(state: object, names: Sequence[str]) -> UsageError | None:
    """Why a state cannot be loaded by a session of these trainable parameters."""
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
    return None
