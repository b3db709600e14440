"""Parameters that a model gets later, or for one call by ``torch.func.functional_call``."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

import torch
from torch import nn


class LateParameters:
    """fp32 parameters that are their own masters: they are cast while the model computes.

    Args:
        model: as it is now.
        floats: modules that stay fp32.
        dtype: of the others.
    """

    def __init__(self, model: nn.Module, floats: Collection[nn.Module], dtype: torch.dtype) -> None:
        self._model, self._floats, self._dtype = model, floats, dtype
        self._known = {*model.parameters()}
        modules = [*model.modules()]
        self._places: list[dict[str, Any]] = [m._parameters for m in modules]
        self._places += [m._modules for m in modules]
        self._stamp = self._stamp_now()
        self._cast: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def _stamp_now(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(dict.values, self._places)))]

    def narrow(self) -> None:
        """The model begins to compute."""
        if self._stamp_now() == self._stamp:
            return
        for module in self._model.modules():
            place: dict[str, Any] = module._parameters if module not in self._floats else {}
            for name, held in place.items():
                if held is not None and held.dtype == torch.float32 and held not in self._known:
                    self._cast.append((place, name, held))
        for place, name, held in self._cast:
            place[name] = held.to(self._dtype)

    def widen(self) -> None:
        """The model has computed."""
        while self._cast:
            place, name, held = self._cast.pop()
            place[name] = held
