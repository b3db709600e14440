"""Saved states that a training can go on from: refusals, found before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import UsageError, warn
from slipstream.local.meeting import Meeting
from slipstream.strategy import LocalConfig


def check_settings(state: Mapping[str, Any], saved: LocalConfig, config: LocalConfig) -> None:
    """Refuse a state of rounds that this run does not have.

    Args:
        state: of a run that has met.
        saved, config: settings of that run and of this one.

    Raises:
        UsageError: its fragments are others, or this run would warm up beyond it.
    """
    if saved.fragments != config.fragments:
        raise UsageError(
            f"this state has local.fragments {saved.fragments}, this run {config.fragments}; "
            "allowed: the same, or session.restore({'model': ...}), which begins new rounds"
        )
    if state["updates"] < config.warm_up:
        raise UsageError(
            f"this state has met already, with local.warm_up {saved.warm_up}, and this run would "
            f"warm up until update {config.warm_up}; allowed: at most {state['updates']}"
        )


def own_part(
    state: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    meetings: Sequence[Meeting],
    name: str,
) -> Mapping[str, Any] | None:
    """Refuse another model's state; return a rank's own part of it, if it is of the same moment.

    Args:
        state: in common of all ranks.
        own: of this rank alone; None: there is none.
        meetings: of the fragments of this run.
        name: of this rank, for a warning.

    Raises:
        UsageError: says in what the models differ.
    """
    for part in (state, own or state):
        if len(part["meetings"]) != len(meetings):
            raise UsageError(
                f"this state has {len(part['meetings'])} local.meetings; allowed: one for each of "
                f"{len(meetings)} fragments"
            )
    parts = own["meetings"] if own else [None] * len(meetings)
    triples = [*zip(meetings, state["meetings"], parts, strict=True)]
    for meeting, shared, mine in triples:
        if problem := meeting.refusal(shared, mine):
            raise UsageError(f"this state is another model's: {problem}")
    if own is None or all(meeting.fits(shared, mine) for meeting, shared, mine in triples):
        return own
    warn(
        f"{name} was at another meeting than rank 0 when this state was saved, as ranks of "
        "different speed are: it goes on from the outer parameters; save where "
        "session.all_updates has changed",
    )
    return None
