"""Momentum correction for DGC: the codec applies the optimizer's momentum, before it sends.

Never applies it itself: ``codecs.dgc`` does. Meanwhile the optimizer's own momentum is 0; the
settings stand in the parameter group under ``SETTINGS_KEY``, so that a checkpoint of the optimizer
contains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from slipstream.codecs import Momentum
from slipstream.codecs.compressor import memory_order
from slipstream.errors import ModelError, UsageError
from slipstream.gradients.segments import NamedParameter
from slipstream.strategy import CodecConfig, DgcConfig, codec_of

SETTINGS_KEY = "momentum_correction"
_OFF = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}


def check_momentum_correction(
    optimizer: torch.optim.Optimizer,
    trainables: Sequence[NamedParameter],
    codec: CodecConfig | None,
) -> None:
    """Refuse an optimizer whose momentum DGC cannot take over.

    Raises:
        ModelError: names the optimizer or the group, the reason and the fix.
    """
    coded = _dgc_names(trainables, codec)
    if not coded:
        return
    if type(optimizer) is not torch.optim.SGD:
        raise ModelError(
            f"gradients.codec dgc with {type(optimizer).__name__}: DGC applies momentum and weight "
            "decay itself, which it can do for torch.optim.SGD alone (an optimizer that divides by "
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
        unsupported = [n for n in ("dampening", "maximize") if any(inside) and group.get(n)]
        if unsupported:
            name = unsupported[0]
            raise ModelError(
                f"the optimizer's group {number} has {name} {group[name]!r}, which DGC does "
                f"not support; leave {name} at its default, or use another codec"
            )


class MomentumCorrection:
    """Takes momentum and weight decay over from an optimizer.

    ``give_back`` undoes it. Before the first update that includes the momentum buffers; later they
    are used up, and only the settings return.

    Args:
        optimizer: as ``check_momentum_correction`` accepts it.
        trainables: every parameter that requires a gradient.
        codec: of the strategy.
        world_size: each rank applies its part of a momentum that was built up before.

    Attributes:
        momenta: what DGC applies, by parameter.
        buffers: states of codecs to begin with, by parameter; none after an update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trainables: Sequence[NamedParameter],
        codec: CodecConfig | None,
        world_size: int,
    ) -> None:
        coded = _dgc_names(trainables, codec)
        self._optimizer = optimizer
        self._applied: dict[torch.Tensor, dict[str, Any]] = {}  # by parameter
        self._unused: dict[torch.Tensor, torch.Tensor] = {}  # momentum buffers before any update
        self.momenta: dict[str, Momentum] = {}
        self.buffers: dict[str, Mapping[str, torch.Tensor]] = {}
        self._used = False  # whether there was an update
        self._optimizer_loaded = self._session_loaded = False  # since the last one
        self._hook = optimizer.register_load_state_dict_post_hook(self._loaded) if coded else None
        for group in optimizer.param_groups:
            inside = [p for p in group["params"] if id(p) in coded]
            if not inside:
                _restore_settings(group)
                continue
            settings = dict(group.get(SETTINGS_KEY) or {name: group[name] for name in _OFF})
            group.update(_OFF, **{SETTINGS_KEY: dict(settings)})
            for parameter in inside:
                name = coded[id(parameter)]
                self._applied[parameter] = settings
                decayed = parameter if settings["weight_decay"] else None
                self.momenta[name] = Momentum(**settings, parameter=decayed)
                buffer = optimizer.state[parameter].pop("momentum_buffer", None)
                if buffer is not None:
                    self._unused[parameter] = buffer
                    # With Nesterov, DGC keeps the buffer multiplied by the momentum (codecs/dgc).
                    factor = settings["momentum"] if settings["nesterov"] else 1.0
                    like = torch.empty_like(parameter, dtype=buffer.dtype).copy_(buffer)
                    self.buffers[name] = {"momentum": memory_order(like) * (factor / world_size)}

    def check(self) -> None:
        """Refuse to update with a momentum that the optimizer was given meanwhile.

        A checkpoint that the optimizer has loaded may contain the settings of an earlier run.

        Raises:
            UsageError: names the setting.
        """
        self.check_loads()
        self._unused.clear()
        self.buffers = {}
        for group in self._optimizer.param_groups:
            applied = self._applied_in(group)
            if applied is None:
                _restore_settings(group)
                continue
            if any(p.requires_grad and p not in self._applied for p in group["params"]):
                raise UsageError(
                    "the optimizer's group has parameters that came after accelerate(), to which "
                    "gradients.codec dgc applies no momentum and no decay; give the optimizer all "
                    "that are to train before accelerate(), or add a group of its own for them"
                )
            for name, off in _OFF.items():
                if group[name] != off:
                    raise UsageError(
                        f"the optimizer's {name} became {group[name]!r}, but gradients.codec dgc "
                        "applies it and it would count twice; use a scheduler that leaves it "
                        "alone, e.g. OneCycleLR(cycle_momentum=False), and load a state of the "
                        "optimizer that was saved without dgc before accelerate()"
                    )
            if group.get(SETTINGS_KEY) != applied or group.get("maximize"):
                raise UsageError(
                    f"gradients.codec dgc applies {applied}, but the optimizer's group now has "
                    f"{SETTINGS_KEY} {group.get(SETTINGS_KEY)} and maximize "
                    f"{bool(group.get('maximize'))}; allowed: the settings that accelerate() "
                    "found, without maximize; change them, or load a state with others, before "
                    "accelerate()"
                )
        self._used, self._optimizer_loaded, self._session_loaded = True, False, False

    def _applied_in(self, group: dict[str, Any]) -> dict[str, Any] | None:
        if not self._applied:
            return None
        return next((self._applied[p] for p in group["params"] if p in self._applied), None)

    def check_loads(self) -> None:
        """Refuse to go on with another moment's momentum.

        Raises:
            UsageError: the optimizer has loaded a state, the session has not.
        """
        if self._optimizer_loaded and not self._session_loaded:
            raise UsageError(
                "the optimizer has loaded a state, but gradients.codec dgc keeps the momentum, "
                "which is part of session.state_dict(); load that of the same moment, too: "
                "session.load_state_dict(state)"
            )

    def restored(self) -> None:
        """The session has loaded a state, with the momentum."""
        self._session_loaded = True

    def _loaded(self, optimizer: object) -> None:
        self._optimizer_loaded = self._used

    def give_back(self) -> None:
        """Restore the optimizer's settings, and its momentum buffers if no update used them."""
        if self._hook is not None:
            self._hook.remove()
        for group in self._optimizer.param_groups:
            _restore_settings(group)
        for parameter, buffer in self._unused.items():
            self._optimizer.state[parameter].setdefault("momentum_buffer", buffer)


def _restore_settings(group: dict[str, Any]) -> None:
    group.update(group.pop(SETTINGS_KEY, {}))


def _dgc_names(trainables: Sequence[NamedParameter], codec: CodecConfig | None) -> dict[int, str]:
    """Names of the parameters that DGC compresses, by identity."""
    return {
        id(t.parameter): t.name
        for t in trainables
        if isinstance(codec_of(codec, t.name), DgcConfig)
    }


def largest_values(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value of each, by which a change is noticed that autograd is not told
    of: ``GradScaler`` divides gradients so. Of an empty one 0, as of one that is not finite.

    Example:
        >>> largest_values([torch.tensor([1.0, -3.0]), torch.empty(0)])
        tensor([3., 0.])
    """
    given = [*gradients]
    filled = [gradient for gradient in given if gradient.numel()]
    found = iter(torch._foreach_norm(filled, torch.inf) if filled else ())
    each = [next(found).float() if g.numel() else torch.zeros((), device=g.device) for g in given]
    return torch.stack(each).nan_to_num(0.0, 0.0, 0.0) if each else torch.empty(0)
