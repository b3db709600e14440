"""A warning where ranks have other values after the first update, which nothing brings together.

Parameters are broadcast in ``accelerate()``, and gradients averaged from then on. What one rank
alone writes stays: a forward that sets parameters by its first batch, weights that the first rank
alone loads, noise that an optimizer draws. ``checks.every`` compares bits, all of them, and ends
the run; here a few values of each parameter are compared once, beyond what rounding does.

[Note: When ranks compare]
Each looks at its values where its first update ends, when a script has put back what it had moved
for a pass (SAM), and shows them beside the next exchange of gradients, which all ranks have in
common, though some may be in ``backward()`` and others in ``step()`` or ``flush()``. One that has
made no update by then shows none. They leave before the gradients do and are waited for behind
them: where a rank is interrupted while it waits for gradients, others do not wait for these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from slipstream.errors import warn
from slipstream.session.checks import ACCELERATED
from slipstream.transport.consistency import collective_errors, maximum_later

_VALUES = 64
"""Values of a parameter that are compared, at most."""
_EXCHANGES = 8
"""Exchanges of gradients within which that must have happened."""
_ROUNDING = 1e-5
"""Differences that count as rounding, of hosts that are not alike, in parts of the values; those of
16 bits may differ by their last bit."""
_NONE = -math.inf
_Sum = tuple[float, float]
"""Of a few values, and of what they may differ by."""


class FirstDrift:
    """Compares parameters of all ranks once.

    Args:
        parameters: what all ranks update alike, by name.
        group: these ranks, for CPU tensors.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = parameters, group
        self._exchanges = 0
        self._shown: list[_Sum] = []
        self._largest = torch.empty(0)
        self._work: dist.Work | None = None
        self._sums: list[_Sum] | None = None  # of each parameter
        # weak: those of an inner loop go with it, and with what they step
        self._others: WeakKeyDictionary[torch.optim.Optimizer, _Sum] = WeakKeyDictionary()

    def updated(self, *, sharded: bool) -> None:
        """Look at the values of the first update; ``sharded``: all ranks get those of owners."""
        if self._sums is None:
            alike = [(0.0, 0.0)] * len(self._parameters)
            self._sums = alike if sharded else _sums(self._parameters.values())

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what another optimizer has stepped, if that is no part of any model that a
        session trains: a temperature, the classes of a loss."""
        if not self._exchanges or optimizer in self._others:
            return
        if held := in_no_model(optimizer):
            one_each = _sums(held)
            within = {*held}
            for inner in self._others:  # of one around it, which may give each rank a part
                if within.issuperset(_held(inner)):
                    self._others[inner] = (0.0, 0.0)
            self._others[optimizer] = sum(s for s, _ in one_each), sum(a for _, a in one_each)

    @property
    def in_flight(self) -> bool:
        """Whether what `show` has sent may still be on its way."""
        return self._work is not None and not self._work.is_completed()

    def show(self) -> None:
        """Send what was looked at, where an exchange begins."""
        self._exchanges += 1
        if self._exchanges == 1:
            return
        others = [*self._others.values()]
        other = (sum(s for s, _ in others), sum(a for _, a in others)) if others else (_NONE, 0.0)
        self._shown = [*(self._sums or [(_NONE, 0.0)] * len(self._parameters)), other]
        sums = torch.tensor([s for s, _ in self._shown], dtype=torch.float64)
        self._largest = torch.stack([sums, torch.where(sums > _NONE, -sums, sums)])
        with collective_errors("the comparison of the parameters"):
            self._work = maximum_later(self._largest, self._group)

    def compare(self) -> bool:
        """Warn of what ranks have apart, where that exchange ends; whether that was all.

        Raises:
            ExchangeError: another rank is gone.
        """
        if self._work is None:
            return False
        with collective_errors("the comparison of the parameters"):
            self._work.wait()
        self._work = None
        most, least = self._largest
        if not (most[:-1] > _NONE).any() and self._exchanges < _EXCHANGES:
            return False
        if dist.get_rank(self._group) == 0:
            sums, rounding = torch.tensor(self._shown, dtype=torch.float64).T
            self._warn(((sums > _NONE) & (most + least > rounding)).tolist())
        return True

    def _warn(self, apart: list[bool]) -> None:
        *inside, outside = apart
        names = [name for name, one in zip(self._parameters, inside, strict=True) if one]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warn(
                f"after the first update ranks have different values of {names[0]}{more}, and "
                "train apart from there on, as under DistributedDataParallel: accelerate() "
                "broadcasts parameters, later only gradients are averaged. What forward sets by "
                "the first batch (data-dependent initialisation): run one forward before "
                "accelerate(); load weights before it, too, or on all ranks; noise that an "
                "optimizer draws, and gradients that the script computes by itself, must be the "
                "same on all ranks",
            )
        if outside:
            steps = ", ".join(sorted({type(optimizer).__name__ for optimizer in self._others}))
            warn(
                f"after the first update ranks have different values of what {steps} steps, which "
                "is in no model of a session: its gradients are never averaged. Unless each rank "
                "is to have its own, put it into the model (model.temperature = nn.Parameter(...), "
                "nn.ModuleList([model, loss])), whose gradients session.backward() averages; its "
                "optimizer may stay, and steps before session.step()",
            )


def in_no_model(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Find what an optimizer trains that is in no model of an open session; not the outer
    parameters of ``local``, which have no graph."""
    ours = {p for module in ACCELERATED for p in module.parameters(recurse=False)}
    held = (p for p in _held(optimizer) if p.requires_grad and p not in ours)
    return [p for p in held if _has_values(p)]


def warn_of_none_that_meet(optimizer: torch.optim.Optimizer) -> None:
    """Say under ``local`` that an optimizer steps what no meeting averages, as the classes of a
    loss; ranks have other values at most times, so that none are compared."""
    if in_no_model(optimizer):
        warn(
            f"{type(optimizer).__name__} steps parameters that are in no model of a session: under "
            "local no meeting averages them. Unless each rank is to have its own, put them into "
            "the model (model.temperature = nn.Parameter(...), nn.ModuleList([model, loss])); "
            "their optimizer may stay"
        )


def _held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_values(parameter: torch.Tensor) -> bool:
    """Whether it has plain values here: no part of a ``DTensor``, which each rank has apart."""
    plain = type(parameter.data) is torch.Tensor and parameter.layout is torch.strided
    return plain and not parameter.is_meta


def _sums(parameters: Iterable[torch.Tensor]) -> list[_Sum]:
    """Add up a few values of each, weighted by place, and what these may differ by."""
    found = []
    for parameter in parameters:
        values = parameter.detach().resolve_conj()
        values = torch.view_as_real(values) if values.is_complex() else values
        flat = values.reshape(-1)
        some = flat[:: max(1, len(flat) // _VALUES)][:_VALUES].double()
        places = torch.arange(1, len(some) + 1, dtype=some.dtype, device=some.device)
        weighted = some * places
        eps = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
        rounding = max(eps, _ROUNDING) * weighted.abs().sum()
        found.append(torch.stack([weighted.sum(), rounding]))
    if not found:
        return []
    on = found[0].device  # one wait for it, not one for each
    return [(one, by) for one, by in torch.stack([f.to(on) for f in found]).tolist()]
