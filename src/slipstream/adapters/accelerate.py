"""Hugging Face Accelerate: a session in place of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.dataclasses import DistributedType
from torch import nn

from slipstream.adapters.opening import GivenStrategy, open_session, several
from slipstream.errors import UsageError
from slipstream.session.session import Session


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` that trains by a session, and wraps no model.

    ``prepare()`` opens the session for the model and the optimizer that it gets; ``backward()``,
    ``no_sync()``, ``accumulate()``, ``clip_grad_norm_()`` and ``optimizer.step()`` are those of
    Accelerate and do what they do there. Loaders, devices, autocast, gathering and logging stay
    Accelerate's own.

    Args:
        strategy: as of ``slipstream.accelerate``; default: the file that ``SLIPSTREAM_STRATEGY``
            names, or none.
        arguments: those of ``accelerate.Accelerator``.

    Attributes:
        session: of the model; None before ``prepare()``.

    Raises:
        UsageError: several models or optimizers, another kind of parallelism, gradients that
            Accelerate and the strategy both accumulate.

    Exactness: that of the strategy.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(2, 4)).mean())
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> accelerator.session.updates
        1
        >>> accelerator.end_training()
    """

    def __init__(
        self,
        *arguments: Any,
        strategy: GivenStrategy = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        if self.distributed_type not in _DATA_PARALLEL:
            raise UsageError(
                f"Accelerate runs {self.distributed_type.value}; a session takes the place of "
                "DistributedDataParallel alone: leave DeepSpeed, FSDP and others out of its "
                "configuration, or slipstream out of the script"
            )
        self.session: Session[Any, Any] | None = None
        self._strategy = strategy
        self._to_train: list[nn.Module] = []
        self._to_step: list[torch.optim.Optimizer] = []

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        prepared = super().prepare(*objects, device_placement=device_placement)
        if self.session is None and self._to_train and self._to_step:
            self._open()
        return prepared

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        trains = not evaluation_mode and any(p.requires_grad for p in model.parameters())
        if trains and model not in self._to_train:
            self._to_train.append(model)
            if len(self._to_train) > 1:
                raise several("models", "prepare()")
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        prepared = super().prepare_optimizer(optimizer, device_placement)
        # The framework names the class of its wrapper in no place that a subclass could change.
        prepared.__class__, prepared.opened_by = _GatheredOptimizer, self
        if prepared.optimizer not in self._to_step:
            self._to_step.append(prepared.optimizer)
            if len(self._to_step) > 1:
                raise several("optimizers", "prepare()")
        return prepared

    def backward(self, loss: torch.Tensor, **named: Any) -> None:
        """Compute gradients; with the last micro-batch of a window, average them over ranks."""
        session = self._opened("backward()")
        if unknown := sorted(set(named) - {"retain_graph"}):
            raise UsageError(
                f"backward({', '.join(unknown)}=...) under a session; allowed: retain_graph"
            )
        loss = loss / self.gradient_accumulation_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        session.backward(loss, **named)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside, gradients stay on this rank and add up."""
        with self._opened("no_sync()").no_sync():
            yield

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Scale the averages of all gradients to a norm of at most ``max_norm``; returns the norm
        before.

        Raises:
            UsageError: another norm than 2, or some of the model's parameters only.
        """
        session = self._opened("clip_grad_norm_()")
        given = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        trained = {id(p) for p in session.model.parameters() if p.requires_grad}
        if norm_type != 2 or trained - {id(p) for p in given}:
            raise UsageError(
                "clip_grad_norm_() of some parameters or with another norm than 2; a session clips "
                "the 2-norm of all: accelerator.clip_grad_norm_(model.parameters(), max_norm)"
            )
        self.unscale_gradients()
        return session.clip_grad_norm_(max_norm)

    def save_state(self, *arguments: Any, **named: Any) -> Any:
        """Save the parameters that evaluate best, and the session's state; on all ranks."""
        with nullcontext() if self.session is None else self.session.evaluating():
            return super().save_state(*arguments, **named)

    def close(self, *error: Any) -> None:
        """Close the session; all ranks call it. ``prepare()`` may open another afterwards.

        Args:
            error: type, value and traceback, as of ``__exit__``, where training has failed.
        """
        session, self.session = self.session, None
        self._to_train, self._to_step = [], []
        if session is not None:
            if session in self._custom_objects:
                self._custom_objects.remove(session)
            session.__exit__(*(error or (None, None, None)))

    def end_training(self) -> None:
        """Close the session, too."""
        self.close()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Close the session, too."""
        self.close()
        return super().free_memory(*objects)

    def _open(self) -> None:
        self.session = open_session(
            self._to_train[0],
            self._to_step[0],
            self._strategy,
            framework="Accelerate",
            accumulation="gradient_accumulation_steps",
            precision=f"mixed_precision {self.mixed_precision!r}" if self.native_amp else None,
        )
        self.register_for_checkpointing(self.session)

    def _opened(self, call: str) -> Session[Any, Any]:
        if self.session is None:
            raise UsageError(
                f"{call} before a model and its optimizer are prepared: model, optimizer = "
                "accelerator.prepare(model, optimizer)"
            )
        return self.session


class _GatheredOptimizer(AcceleratedOptimizer):
    """Whose state is gathered from all ranks, over which it may lie."""

    opened_by: Accelerator

    def state_dict(self) -> dict[str, Any]:
        session = self.opened_by.session
        if session is None or session.optimizer is not self.optimizer:
            return dict(super().state_dict())
        return dict(session.checkpoint("optimizer")["optimizer"])


_DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
