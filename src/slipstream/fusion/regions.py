"""The parts of a model that are compiled or captured, each by itself."""

from __future__ import annotations

import torch
from torch import nn

from slipstream.errors import ModelError
from slipstream.memory.blocks import blocks_of


def regions_of(model: nn.Module, setting: str) -> list[nn.Module]:
    """Repeated blocks, and the largest other modules of several layers that contain none.

    Never the whole model: its gradients would come all at once, at the end of backward. Modules
    whose forward is replaced already are left out.

    Args:
        model: is searched.
        setting: what needs them, for the error.

    Raises:
        ModelError: there is none.

    Example:
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)]
        >>> head = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> model = nn.Sequential(nn.Linear(4, 8), *layers, head)
        >>> [type(region).__name__ for region in regions_of(model, "compile")]
        ['TransformerEncoderLayer', 'TransformerEncoderLayer', 'Sequential']
    """
    blocks = {model.get_submodule(path) for path in blocks_of(model)}
    found: dict[nn.Module, None] = {}
    ahead = [model]
    while ahead:
        module = ahead.pop()
        holds_blocks = module not in blocks and not blocks.isdisjoint(module.modules())
        never_called = type(module).forward is nn.Module.forward
        if module is model or holds_blocks or never_called:
            ahead += reversed(list(module.children()))
        elif _has_layers(module):
            found[module] = None
    if not found:
        raise ModelError(
            f"{setting}: {type(model).__name__} has no block, which is a module of several layers "
            f"inside of the model; leave out {setting}"
        )
    return list(found)


def _has_layers(module: nn.Module) -> bool:
    """Whether it has parameters in layers of its own, and a forward that may be replaced."""
    has_parameters = next(module.parameters(), None) is not None
    has_children = next(module.children(), None) is not None
    is_script = isinstance(module, torch.jit.ScriptModule)
    return has_parameters and has_children and not is_script and "forward" not in vars(module)
