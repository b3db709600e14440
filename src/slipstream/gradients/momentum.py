"""The momentum of an optimizer, lent to a codec that must apply it before gradients are sent.

Never applies it: ``codecs.dgc`` does. While it is lent, the optimizer's own is 0; what was lent
stands beside it in the parameter group, so that a checkpoint of the optimizer does not forget it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.codecs import Momentum
from slipstream.codecs.compressor import memory_order
from slipstream.errors import ModelError, UsageError
from slipstream.gradients.segments import NamedParameter
from slipstream.strategy import Codec, Dgc, codec_of

LENT = "lent_to_dgc"
_SETTINGS = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}


def check_momentum_correction(
    optimizer: torch.optim.Optimizer, trainables: Sequence[NamedParameter], codec: Codec | None
) -> None:
    """Refuse what DGC cannot take over.

    Raises:
        ModelError: names the optimizer or the group, the reason and the way out.
    """
    coded = _coded(trainables, codec)
    if not coded:
        return
    if type(optimizer) is not torch.optim.SGD:
        raise ModelError(
            f"gradients.codec dgc with {type(optimizer).__name__}: DGC takes over momentum and "
            "weight decay, which it knows of torch.optim.SGD alone (an optimizer that divides by "
            "second moments would see rare, large gradients); use that, or another codec "
            "(powersgd, int8)"
        )
    for number, group in enumerate(optimizer.param_groups):
        inside = [id(p) in coded for p in group["params"] if p.requires_grad]
        if any(inside) and not all(inside):
            raise ModelError(
                f"the optimizer's group {number} holds parameters with and without the codec dgc, "
                "but momentum is a setting of a group; give them groups of their own"
            )
        odd = [name for name in ("dampening", "maximize") if any(inside) and group.get(name)]
        if odd:
            raise ModelError(
                f"the optimizer's group {number} has {odd[0]} {group[odd[0]]!r}, which DGC does "
                f"not know; leave {odd[0]} at its default, or use another codec"
            )


class MomentumCorrection:
    """What an optimizer has lent; ``give_back`` undoes it: before the first update in full, later
    the settings, as the momentum is spent by then.

    Args:
        optimizer: as ``check_momentum_correction`` accepts it.
        trainables: every parameter that requires a gradient.
        codec: of the strategy.
        world_size: each rank applies its share of a momentum that was built up before.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trainables: Sequence[NamedParameter],
        codec: Codec | None,
        world_size: int,
    ) -> None:
        coded = _coded(trainables, codec)
        self._optimizer, self._numbers = optimizer, set[int]()
        self._unspent: dict[torch.Tensor, torch.Tensor] = {}  # momentum as the optimizer had it
        self.momenta: dict[str, Momentum] = {}
        self.buffers: dict[str, Mapping[str, torch.Tensor]] = {}
        for number, group in enumerate(optimizer.param_groups):
            inside = [p for p in group["params"] if id(p) in coded]
            if not inside:
                _give_back(group)
                continue
            momentum_correction = dict(group.get(LENT) or {name: group[name] for name in _SETTINGS})
            for parameter in inside:
                name = coded[id(parameter)]
                decayed = parameter if momentum_correction["weight_decay"] else None
                self.momenta[name] = Momentum(**momentum_correction, parameter=decayed)
                buffer = optimizer.state[parameter].pop("momentum_buffer", None)
                if buffer is not None:
                    self._unspent[parameter] = buffer
                    ahead = (
                        momentum_correction["momentum"] if momentum_correction["nesterov"] else 1.0
                    )
                    in_order = memory_order(
                        torch.empty_like(parameter, dtype=buffer.dtype).copy_(buffer)
                    )
                    self.buffers[name] = {"momentum": in_order * (ahead / world_size)}
            group.update(_SETTINGS, **{LENT: momentum_correction})
            self._numbers.add(number)

    def check(self) -> None:
        """Refuse to update with a momentum that somebody gave the optimizer meanwhile.

        A checkpoint that the optimizer has loaded may bring along what an earlier run had lent.

        Raises:
            UsageError: names the setting.
        """
        self._unspent.clear()
        for number, group in enumerate(self._optimizer.param_groups):
            if number not in self._numbers:
                _give_back(group)
                continue
            for name, momentum_correction in _SETTINGS.items():
                if group[name] != momentum_correction:
                    raise UsageError(
                        f"the optimizer's {name} became {group[name]!r}, but gradients.codec dgc "
                        "applies it and it would count twice; use a scheduler that leaves it "
                        "alone, e.g. OneCycleLR(cycle_momentum=False), and load a state of the "
                        "optimizer that was saved without dgc before accelerate()"
                    )

    def give_back(self) -> None:
        """The optimizer's settings are its own again, and its momentum if nothing used it."""
        for group in self._optimizer.param_groups:
            _give_back(group)
        for parameter, buffer in self._unspent.items():
            self._optimizer.state[parameter].setdefault("momentum_buffer", buffer)


def _give_back(group: dict[str, Any]) -> None:
    group.update(group.pop(LENT, {}))


def _coded(trainables: Sequence[NamedParameter], codec: Codec | None) -> dict[int, str]:
    """Names of the parameters that DGC codes, by identity."""
    return {id(t.parameter): t.name for t in trainables if isinstance(codec_of(codec, t.name), Dgc)}
