"""A model that a session has left between two updates: whoever uses it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slipstream.errors import UsageError


def refuse_unfinished(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse to compute with ``model`` or to save it, until a state has been loaded that has these
    parameters.

    Args:
        model: that a session with transport ``sharded`` had when it ended with an error.
        names: of the parameters that lack what other ranks have updated.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> state = model.state_dict()
        >>> refuse_unfinished(model, ["weight"])
        >>> model.state_dict()
        Traceback (most recent call last):
        slipstream.errors.UsageError: the last update of weight ...
        >>> model.load_state_dict({"bias": state["bias"]}, strict=False)
        _IncompatibleKeys(missing_keys=['weight'], unexpected_keys=[])
        >>> model(torch.ones(2))
        Traceback (most recent call last):
        slipstream.errors.UsageError: the last update of weight ...
        >>> model.load_state_dict(state)
        <All keys matched successfully>
        >>> list(model.state_dict())
        ['weight', 'bias']
    """
    shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other parameters"

    def refuse(*_: object) -> None:
        raise UsageError(
            f"the last update of {shown} has not arrived from the other ranks: the session with "
            "gradients.transport sharded ended with an error before; load a checkpoint into the "
            "model (model.load_state_dict), or build it anew"
        )

    handles: list[RemovableHandle] = []
    left = set(names)

    def loads(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        sizes = {name: p.shape for name, p in module.named_parameters()}
        left.difference_update(
            [name for name in left if _shape(state.get(prefix + name)) == sizes.get(name)]
        )

    def loaded(*_: Any) -> None:
        for handle in () if left else handles:
            handle.remove()

    handles.append(model.register_state_dict_pre_hook(refuse))
    handles.append(model.register_forward_pre_hook(refuse))
    handles.append(model.register_load_state_dict_pre_hook(loads))
    handles.append(model.register_load_state_dict_post_hook(loaded))


def _shape(value: object) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None
