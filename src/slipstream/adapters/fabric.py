"""Lightning Fabric: a session in place of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.types import Optimizable
from torch import nn

from slipstream.adapters.opening import (
    GivenStrategy,
    check_backward,
    check_clips_all,
    open_session,
    several,
)
from slipstream.errors import UsageError
from slipstream.precision.float_modules import WrappedForward
from slipstream.session.session import Session
from slipstream.strategy import HalfWeightsConfig


class FabricStrategy(DDPStrategy):
    """A strategy of Fabric that trains by a session, without DistributedDataParallel.

    ``fabric.setup(model, optimizer)`` opens the session; ``fabric.backward()``,
    ``fabric.no_backward_sync()``, ``fabric.clip_gradients()`` and ``optimizer.step()`` do what they
    do under DDP. Call ``close()`` where training ends. ``fabric.save()`` takes the session, too:
    ``{"model": model, "optimizer": optimizer, "session": strategy.session}``.

    Args:
        strategy: as of ``slipstream.accelerate``; default: the file that ``SLIPSTREAM_STRATEGY``
            names, or none.
        named: ``process_group_backend``, ``timeout``, ``cluster_environment`` and the like, as of
            Fabric's ``DDPStrategy``; none of DistributedDataParallel's own.

    Attributes:
        session: of the model; None before ``setup()`` and after ``close()``.

    Raises:
        UsageError: an argument of DistributedDataParallel; an optimizer set up without its model;
            clipping by another norm than 2, or by that of some trained parameters.
        ModelError: several models that train, or optimizers.

    Exactness: that of the strategy.

    Example:
        >>> from lightning.fabric import Fabric
        >>> from slipstream.adapters.fabric import FabricStrategy
        >>> strategy = FabricStrategy({"gradients": {"transport": "sharded"}})
        >>> fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)  # doctest: +SKIP
    """

    def __init__(self, strategy: GivenStrategy = None, **named: Any) -> None:
        super().__init__(**named)
        if self._ddp_kwargs:
            raise UsageError(
                f"FabricStrategy({', '.join(self._ddp_kwargs)}=...) is for "
                "DistributedDataParallel, which a session replaces: leave it out; unused "
                "parameters need no setting"
            )
        self.session: Session[Any, Any] | None = None
        self._given = strategy
        self._set_up: list[_InPlaceOfDdp] = []
        self._opened_with: _InPlaceOfDdp | None = None
        self._backward_sync_control = _NoSync(self)

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # not DDP
        before = [one.module for one in self._set_up]
        if self.session is not None and not self.session.closed:
            before.append(self.session.model)
        trained = {id(p) for one in before for p in one.parameters() if p.requires_grad}
        own = {id(p) for p in module.parameters() if p.requires_grad}
        if trained and own - trained:  # nobody would average what is not the session's
            raise several("models", "setup()", "strategy.close()")
        self._set_up.append(_InPlaceOfDdp(module))
        return self._set_up[-1]

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self.session is not None and not self.session.closed:
            raise several("optimizers", "setup()", "strategy.close()")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = [m for m in self._set_up if held & {id(p) for p in m.parameters()}]
        if not own:
            raise UsageError(
                "setup_optimizers() before its model is set up: model, optimizer = "
                "fabric.setup(model, optimizer)"
            )
        kind = str(getattr(self.precision, "precision", "32-true"))
        self._set_up = []
        self.session = open_session(
            own[-1].module,
            optimizer,
            self._given,
            framework="Fabric",
            accumulation="fabric.no_backward_sync(model)",
            precision=None if kind == "32-true" else f"precision={kind!r}",
            scaler=getattr(self.precision, "scaler", None),
        )
        forward = vars(own[-1].module).get("forward")
        half = isinstance(self.session.strategy.precision, HalfWeightsConfig)
        if isinstance(forward, WrappedForward) and not half:  # it casts what enters forward() alone
            own[-1].wrapped = forward
        self._opened_with = own[-1]
        return optimizer

    def backward(
        self, tensor: torch.Tensor, module: nn.Module | None, *arguments: Any, **named: Any
    ) -> None:
        check_backward(arguments, named)
        session, scaler = self.opened("backward()"), getattr(self.precision, "scaler", None)
        self.precision.pre_backward(tensor, module)
        session.backward(tensor if scaler is None else scaler.scale(tensor), **named)
        self.precision.post_backward(tensor, module)

    def optimizer_step(self, optimizer: Optimizable, **named: Any) -> Any:
        """Compute gradients by the closure, if there is one, then step: a session takes none."""
        closure: Callable[[], Any] | None = named.pop("closure", None)
        if closure is None:
            return super().optimizer_step(optimizer, **named)
        with torch.enable_grad():
            loss = closure()
        super().optimizer_step(optimizer, **named)
        return loss

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the 2-norm of all gradients; returns the norm before."""
        if norm_type != 2:
            raise UsageError(
                f"clip_gradients(norm_type={norm_type}) under a session, which clips the 2-norm "
                "of all gradients: leave norm_type out"
            )
        session = self.opened("clip_gradients()")
        check_clips_all(session, self.precision.main_params(optimizer))
        self.precision.unscale_gradients(optimizer)
        norm = session.clip_grad_norm_(max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {norm.item()}")
        return norm

    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """Save the parameters that evaluate best, also where a part of the model is saved."""
        with nullcontext() if self.session is None else self.session.evaluating():
            super().save_checkpoint(*arguments, **named)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the parameters that evaluate best, in full precision; on all ranks, over which
        the masters of 16-bit weights may lie."""
        module = _bare(module)
        if self.session is None or module is not self.session.model:
            state: dict[str, Any] = super().get_module_state_dict(module)
            return state
        return dict(self.session.checkpoint("model")["model"])

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        super().load_module_state_dict(_bare(module), state_dict, strict)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Gather it on all ranks, over which it may lie."""
        if self.session is None or optimizer is not self.session.optimizer:
            state: dict[str, Any] = super().get_optimizer_state(optimizer)
            return state
        return dict(self.session.checkpoint("optimizer")["optimizer"])

    def close(self) -> None:
        """Close the session, on all ranks, before the process group ends: under ``local`` the model
        is then the mean of all ranks'. ``setup()`` may open another afterwards."""
        session, self.session = self.session, None
        self._set_up = []
        if self._opened_with is not None:
            self._opened_with.wrapped = None
            self._opened_with = None
        if session is not None:
            session.close()

    def teardown(self) -> None:
        self.close()
        super().teardown()

    def opened(self, call: str) -> Session[Any, Any]:
        """The session.

        Raises:
            UsageError: there is none yet.
        """
        if self.session is None:
            raise UsageError(
                f"{call} before a model and its optimizer are set up: model, optimizer = "
                "fabric.setup(model, optimizer)"
            )
        return self.session


class _InPlaceOfDdp(nn.Module):
    """The wrapper without which Fabric would call methods that are marked as forward outside of its
    precision and of the module's hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.wrapped: WrappedForward | None = None  # what a session has around its forward

    def forward(self, *arguments: Any, **named: Any) -> Any:
        marked = vars(self.module).get("forward")
        redirects = getattr(marked, "__name__", "") == "wrapped_forward"
        if self.wrapped is None or marked is None or not redirects:
            return self.module(*arguments, **named)
        vars(self.module)["forward"] = self.wrapped  # Fabric has put the method in place of it
        with self.wrapped.running(marked):
            return self.module(*arguments, **named)


def _bare(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _InPlaceOfDdp) else module


class _NoSync(_BackwardSyncControl):
    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Keep gradients on this rank, where they add up."""
        return self._strategy.opened("no_backward_sync()").no_sync() if enabled else nullcontext()
