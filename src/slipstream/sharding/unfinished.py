"""A model that a session has left between two updates: whoever uses it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from slipstream.errors import UsageError


def refuse_unfinished(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse to compute with ``model`` or to save it, until a state is loaded.

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

    def loaded(*_: Any) -> None:
        for handle in handles:
            handle.remove()

    handles.append(model.register_state_dict_pre_hook(refuse))
    handles.append(model.register_forward_pre_hook(refuse))
    handles.append(model.register_load_state_dict_post_hook(loaded))
