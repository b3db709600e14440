"""The state of an exchange under FSDP2: what codecs have not sent yet, a part for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from slipstream.adapters.fsdp2_units import Unit
from slipstream.errors import UsageError


def state_of(units: Sequence[Unit], updates: int) -> dict[str, Any]:
    """Copy what this rank needs in order to go on bit for bit."""
    coded = {
        unit.name: {
            "calls": unit.compressor.calls,
            "parameters": unit.trainable,
            "error": None if (e := unit.compressor.error) is None else e.clone(),
        }
        for unit in units
        if unit.compressor is not None
    }
    ranks = dist.get_rank(), dist.get_world_size()
    return {"rank": ranks[0], "ranks": ranks[1], "updates": updates, "units": coded}


def load_state(units: Sequence[Unit], state: Mapping[str, Any]) -> int:
    """Put the state of this rank back; returns its number of updates.

    Raises:
        UsageError: the state is of another rank, of another number of ranks, or of other modules.
    """
    if missing := sorted({"rank", "ranks", "updates", "units"} - {*state}):
        raise UsageError(
            f"this state lacks {', '.join(missing)}; allowed: what state_dict() of this exchange "
            "returned on this rank"
        )
    here, there = (dist.get_rank(), dist.get_world_size()), (state["rank"], state["ranks"])
    if here != there:
        raise UsageError(
            f"this state is of rank {there[0]} of {there[1]}, this is rank {here[0]} of "
            f"{here[1]}: what a codec has not sent yet differs from rank to rank; save and "
            "load one state a rank, and train on as many ranks"
        )
    coded = {unit.name: unit for unit in units if unit.compressor is not None}
    if coded.keys() != state["units"].keys():
        raise UsageError(
            f"this state is of the modules {sorted(state['units'])}, coded are here "
            f"{sorted(coded)}: load it under the strategy and the calls of fully_shard that it "
            "was saved with"
        )
    for name, unit in coded.items():
        saved, compressor = state["units"][name], unit.compressor
        assert compressor is not None
        error = saved["error"]
        if error is not None and (
            saved["parameters"] != unit.trainable or error.shape[1] != unit.width
        ):
            raise UsageError(
                f"{name}: this state is of {saved['parameters']} with {error.shape[1]} values "
                f"a rank, trainable are here {unit.trainable} with {unit.width}: load it into "
                "the model that it was saved with"
            )
        compressor.calls = saved["calls"]
        compressor.error = None if error is None else error.clone()
    updates: int = state["updates"]
    return updates
