"""Refuses buffers that ranks of a pipeline would update each in its own way.

The model's own forward runs on every stage, and so do modules around a split point. Each rank has a
copy of their buffers, and a state has the copy of the first of these ranks, the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.parallel.pipeline.placeholders import has_nan
from slipstream.parallel.pipeline.split_points import SplitPoints

Changes = dict[str, Tensor | None]
"""By name, what a stage makes of a buffer; None: it is gone."""


def shared_buffers(model: nn.Module, split_points: SplitPoints, ranks: int) -> dict[str, Tensor]:
    """Copies of the buffers of ``state_dict()`` that several ranks hold."""
    held = split_points.tensor_stages(model)
    return {
        name: buffer.clone()
        for name, buffer in model.named_buffers()
        if len({stage % ranks for stage in held[name]}) > 1 and is_saved(model, name)
    }


def changed(model: nn.Module, before: Mapping[str, Tensor]) -> Changes:
    """Find those that have other values now."""
    now = dict(model.named_buffers()) if before else {}
    return {
        name: now[name].detach().cpu() if name in now else None
        for name, values in before.items()
        if name not in now or not are_equal(values, now[name])
    }


def check_changes(
    model: nn.Module, split_points: SplitPoints, ranks: int, changes: Sequence[Changes]
) -> None:
    """Refuse a buffer of which the owner's copy is not the one that a single process would have.

    It is that if the owner changes it once, and other ranks in the same way, as a count of calls;
    or to NaN, where they have placeholders.

    Args:
        model: with the buffers.
        split_points: of the model.
        ranks: of the pipeline.
        changes: by stage, each from the same values.

    Raises:
        ModelError: names the buffer.
    """
    held = split_points.tensor_stages(model)
    for name in dict.fromkeys(name for change in changes for name in change):
        stages = [stage for stage, change in enumerate(changes) if name in change]
        owner = min(stage % ranks for stage in held[name])
        owned = [changes[stage][name] for stage in stages if stage % ranks == owner]
        alike = len(stages) == len({stage % ranks for stage in stages}) and all(
            any(are_equal(value, mine) for mine in owned) or has_nan(value)
            for value in (changes[stage][name] for stage in stages)
        )
        if not owned or not alike:
            raise ModelError(
                f"the buffer {name} is updated in stages {stages} of {[*held[name]]}, which hold "
                f"it: each rank updates a copy of its own, and that of rank {owner} of the "
                "pipeline is the one that is saved; move it, with the code that updates it, into a "
                "module of one stage"
            )


def is_saved(model: nn.Module, name: str) -> bool:
    """Whether the buffer of that name is in ``state_dict()``."""
    path, _, key = name.rpartition(".")
    return key not in model.get_submodule(path)._non_persistent_buffers_set


def are_equal(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether two tensors have the same shape and values, NaN included."""
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())
