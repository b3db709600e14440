"""The state of an exchange under FSDP2: what codecs have not sent yet, a part for each rank.

It lies under a key of its rank, and has its tensors before the first update, too: DCP
(``torch.distributed.checkpoint``) keeps one value for each key of all ranks, and loads into tensors
that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from slipstream.adapters.fsdp2_units import Unit
from slipstream.errors import UsageError, warn


def state_of(units: Sequence[Unit], updates: int) -> dict[str, Any]:
    """Copy what this rank needs in order to go on bit for bit."""
    coded = {
        unit.name: {
            "calls": unit.compressor.calls,
            "parameters": unit.owes or unit.trainable,
            "error": unit.owed(),
        }
        for unit in units
        if unit.compressor is not None
    }
    return {_this_rank(): {"updates": updates, "units": coded}}


def load_state(units: Sequence[Unit], state: Mapping[str, Any]) -> int:
    """Put the state of this rank back; returns its number of updates. Warns of what is owed to
    parameters that were frozen since, or beside others that were thawed: it is dropped.

    Raises:
        UsageError: the state is of another rank, of another number of ranks, or of other modules.
    """
    here = _this_rank()
    if here not in state:
        raise UsageError(
            f"this state is of {', '.join([*state][:3]) or 'nothing'}, this is {here}; allowed: "
            "what state_dict() returned on the same rank of as many: what a codec has not sent yet "
            "differs from rank to rank"
        )
    state = state[here]
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
        if error is not None and not error.any():
            error = None  # nothing is owed yet, and other parameters may train since
        changed = sorted({*saved["parameters"]} ^ {*unit.trainable})
        if error is None or not unit.trainable:
            pass  # frozen for the moment, as a discriminator is
        elif changed and {*saved["parameters"]} <= {*map(unit.path, unit.group.fsdp_params)}:
            warn(
                f"{name}: since this state was saved, {', '.join(changed)} were frozen or "
                "unfrozen; what the codec owed to its parameters is dropped",
            )
            error = None
        elif changed or error.shape[1] != unit.width:
            raise UsageError(
                f"{name}: this state is of {saved['parameters']} with {error.shape[1]} values "
                f"a rank, trainable are here {unit.trainable} with {unit.width}: load it into "
                "the model that it was saved with"
            )
        compressor.calls = saved["calls"]
        compressor.error = None if error is None else error.clone()
        unit.versions = ()  # what is loaded counts
        unit.owes = [] if error is None else saved["parameters"]
    updates: int = state["updates"]
    return updates


def _this_rank() -> str:
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"
