"""Gradients that an update has used, and those that were thrown away, under FSDP2.

A codec that owes takes what it has sent for given. An average that no update uses was given in
vain: a discriminator's, of the pass of its generator, or that of an update that was skipped. So
what is owed goes back to what it was before, where gradients are gone when the next ones come. Each
rank sees that for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from slipstream.adapters.fsdp2_units import Unit


class Uses:
    """Tells the codecs of units which of their exchanges count.

    Args:
        units: of the model, whose parts any optimizer may step.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [unit for unit in units if unit.compressor and unit.compressor.feedback]
        self._hooks: list[Any] = []
        if self._units:
            noted = WeakMethod(self.note)  # torch keeps the hook of an exchange that nobody closes

            def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
                if (found := noted()) is not None:
                    found(optimizer)

            hook: Any = torch.compiler.disable(note)
            self._hooks.append(register_optimizer_step_post_hook(hook))

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: the gradients that it holds were used."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for unit in self._units:
            params = [p.sharded_param for p in unit.group.fsdp_params]
            if any(id(p) in held and p.grad is not None for p in params):
                unit.used = True

    def before_exchange(self, unit: Unit) -> None:
        """Gradients of a unit come: settle what is owed for those before, if they were used, or
        take it back, if they are gone."""
        if unit not in self._units:
            return
        assert unit.compressor is not None
        if unit.counts:
            unit.compressor.settle()
        elif unit.gone:
            unit.compressor.take_back()
        unit.used, unit.versions = False, unit.versions_now

    def close(self) -> None:
        """See no step any more."""
        for hook in self._hooks:
            hook.remove()
