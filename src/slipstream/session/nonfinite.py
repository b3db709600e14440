"""Decides what becomes of an update whose gradients are not finite: skipped, or an error."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from slipstream.gradients.finite import all_finite, stored
from slipstream.local.training import LocalTraining
from slipstream.parallel.dims import gather_objects
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session import messages
from slipstream.session.accumulation import AccumulationWindow
from slipstream.session.exchanging import GradientExchange
from slipstream.session.given import Given
from slipstream.session.proof import Proof
from slipstream.session.zeroing import is_finite_or_none


class NonfiniteGradients:
    """Looks at the averages of an update, alike on all ranks that average.

    Args:
        given: the model, its optimizer, ranks that share them, and what the strategy asks for.
        exchange: has averaged the gradients.
        window: knows the loss scale of the script.
        precision: knows that of slipstream.
        local: says whether ranks train on their own; None: they do not.
        proof: explains an error; None: it is not asked for.
    """

    def __init__(
        self,
        given: Given,
        exchange: GradientExchange,
        window: AccumulationWindow,
        precision: ModelPrecision,
        local: LocalTraining | None,
        proof: Proof | None,
    ) -> None:
        # Not ``given`` itself: its handles would close a circle, see `StepHooks`.
        self._optimizer, self._dims = given.optimizer, given.dims
        self._parameters = tuple(given.model.parameters())
        self._raises = given.strategy.checks.nonfinite == "raise"
        self._engine, self._sharding = exchange.engine, exchange.sharding
        self._momentum = exchange.momentum
        self._window, self._precision = window, precision
        self._local, self._proof = local, proof
        self._here: tuple[bool, str] | None = None

    def pass_begins(self) -> None:
        """Forget what the last backward pass has left."""
        self._here = None

    def show(self) -> None:
        """Let each rank that shares the model see that gradients of one are not finite: a scaler of
        the script looks at those of its rank, and all must skip the update."""
        if self._dims.mesh.model_parallel == 1 or not self._engine.nonfinite:
            return
        if self._momentum.momenta:  # which refuses scalers of the script
            return
        self._here = self._engine.nonfinite_here()  # before they are replaced
        for gradient in self._engine.averages(self._parameters):  # each optimizer's scale looks
            stored(gradient).fill_(torch.nan)

    def drop(self) -> None:
        """Drop averages that are infinite or NaN where the optimizer does not hold them, so that
        its zeroing has left them: the next ones would be added to them."""
        if self._engine.nonfinite:
            for parameter in self._parameters:
                if not is_finite_or_none(parameter):
                    parameter.grad = None

    def skips(self, update: int, *, by_hand: bool = False) -> bool:
        """Whether the update must be skipped; the same on every rank. ``by_hand``: a scaler may
        step each optimizer by itself, and what this one holds may be finite alone. What a script
        has made finite since the backward pass is as it wants it.

        Raises:
            NonFiniteError: as `refuse` does.
        """
        if self._engine.overflowed or self.skips_itself(self._optimizer):
            return True
        if self._window.loss_scale == 1.0 and not self._precision.scales:
            own = (p for group in self._optimizer.param_groups for p in group["params"])
            if self.would_raise and self.are_finite(own if by_hand else self._parameters):
                return False
            return self.refuse(update)
        # Averages are the same on all data-parallel ranks, unless each has a shard of them; those
        # that share a model must agree.
        found = not all_finite(self._engine.averages(self._parameters))
        return self._sharding.any_rank(found)

    @property
    def would_raise(self) -> bool:
        """Whether `refuse` raises."""
        return self._engine.nonfinite and self._raises

    def skips_itself(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether torch's GradScaler, which calls a fused step in any case, tells it to skip."""
        found = getattr(optimizer, "found_inf", None)
        return found is not None and self._sharding.any_rank(bool(found))

    def are_finite(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether the gradients of these are finite, on all ranks."""
        found = all_finite(self._engine.averages(parameters))
        return not self._sharding.any_rank(not found)

    def refuse(self, update: int) -> bool:
        """Whether the update must be skipped because of gradients that are not finite.

        Raises:
            NonFiniteError: if that is what the strategy asks for; on all ranks that average alike.
        """
        if not self.would_raise:
            return self._engine.nonfinite
        if self._proof is not None:
            self._proof.explain_nonfinite(update)
        own = self._here or self._engine.nonfinite_here()
        control = self._dims.control
        found = {0 if control is None else dist.get_rank(control): own}
        if control is not None and (self._local is None or self._local.warms_up):
            found = dict(enumerate(gather_objects(own, "what is not finite", control)))
        raise messages.nonfinite(found, update)
