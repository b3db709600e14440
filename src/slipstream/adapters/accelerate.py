"""Hugging Face Accelerate: a session in place of DistributedDataParallel."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from math import isinf
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import extract_model_from_parallel
from accelerate.utils.dataclasses import (
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
)
from torch import nn

from slipstream.adapters.opening import SESSION_FILE, GivenStrategy, open_session, several
from slipstream.errors import ModelError, UsageError
from slipstream.pytree import mapped
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
        session: of the model, or of a ``ModuleList`` of all that the optimizer steps; None before
            ``prepare()``.

    Raises:
        UsageError: another kind of parallelism, a communication hook of
            DistributedDataParallel, gradients that Accelerate and the strategy both accumulate;
            Accelerate counts other processes than there are ranks.
        ModelError: several optimizers, or a model that the optimizer does not step.

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
        hook = (
            DDPCommunicationHookType.NO if self.ddp_handler is None else self.ddp_handler.comm_hook
        )
        if hook != DDPCommunicationHookType.NO:
            raise UsageError(
                f"DistributedDataParallelKwargs(comm_hook={hook.value!r}) is for "
                "DistributedDataParallel, which a session replaces: leave it out; codecs are in "
                "the strategy: gradients: {codec: half}"
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
            if self.session is not None:
                raise several("models", "prepare()", "accelerator.free_memory()")
            self._to_train.append(model)
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
                raise several("optimizers", "prepare()", "accelerator.free_memory()")
        return prepared

    def train_prepared(self, model: nn.Module) -> None:
        """Train a model that was prepared before the last `close`, with the optimizer to come."""
        self._to_train.append(model)

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
        # Trainer ends a pass over a stream without a length so: gradients that no step follows are
        # averaged, and add up to the next ones; with a codec they stay here until then
        stay = not self.sync_gradients and session.strategy.gradients.codec is not None
        with session.no_sync() if stay else nullcontext():
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
        codec = session.strategy.gradients.codec
        if isinf(max_norm) and codec is not None and codec.takes_momentum:
            # Trainer asks for the norm so, and a session refuses to clip what has momentum in it
            return torch.nn.utils.get_total_norm([p.grad for p in given if p.grad is not None])
        return session.clip_grad_norm_(max_norm)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """Change nothing: all ranks get as many batches.

        Raises:
            UsageError: they do not, as ``even_batches`` is off.
        """
        if not self.even_batches or even_batches is False:
            raise UsageError(
                "join_uneven_inputs() with even_batches=False: a session has no wrapper that could "
                "join ranks whose batches are over; allowed: even_batches=True of the Accelerator "
                "itself, its default, which gives every rank as many"
            )
        yield

    def save_state(self, *arguments: Any, **named: Any) -> Any:
        """Save the parameters that evaluate best, and the session's state; on all ranks.

        Raises:
            UsageError: inside an accumulation window, whose gradients no checkpoint holds.
        """
        if self.session is None:
            return super().save_state(*arguments, **named)
        if not self.session.between_updates:
            raise UsageError(
                "save_state() inside an accumulation window, whose gradients no checkpoint holds: "
                "call it only where accelerator.sync_gradients is True, behind optimizer.step()"
            )
        with self.session.evaluating():
            state = self.session.state_dict()
            folder = super().save_state(*arguments, **named)
        self.save(state, Path(folder, SESSION_FILE))
        return folder

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the parameters that evaluate best, in full precision; on all ranks, over which
        the masters of 16-bit weights may lie."""
        session = self.session
        if session is None:
            return super().get_state_dict(model, unwrap=unwrap)
        with session.evaluating():
            state = super().get_state_dict(model, unwrap=unwrap)
            if _bare(model) is not _bare(session.model):  # a part of it, maybe
                outer = session.strategy.local is not None  # there for the moment
                return mapped(state, torch.Tensor.clone) if outer else state
        whole = session.checkpoint("model")["model"]
        # names are those of what was compiled; only in this type does Accelerate look for tied ones
        return OrderedDict(zip(state, whole.values(), strict=True))

    def load_state(self, *arguments: Any, **named: Any) -> None:
        """Load a checkpoint of this or of a plain Accelerator, which has no state of a session."""
        folders: list[str] = []
        hook = self.register_load_state_pre_hook(lambda _, folder: folders.append(folder))
        try:
            super().load_state(*arguments, **named)
        finally:
            hook.remove()
        file = Path(folders[0], SESSION_FILE)
        if self.session is not None and file.is_file():
            self.session.load_state_dict(torch.load(file, map_location="cpu"))

    def close(self, *error: Any) -> None:
        """Close the session; all ranks call it. ``prepare()`` may open another afterwards.

        Args:
            error: type, value and traceback, as of ``__exit__``, where training has failed.
        """
        session, self.session = self.session, None
        for model in self._to_train:  # else another prepare() would return it as it is
            vars(_bare(model)).pop("_is_accelerate_prepared", None)
        self._to_train, self._to_step = [], []
        if session is not None:
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
        model = self._model_to_train()
        if self.ddp_handler is not None and not self.ddp_handler.broadcast_buffers:
            _check_buffers(model)
        plugin = self.state.dynamo_plugin
        regional = plugin.backend != DynamoBackend.NO and plugin.use_regional_compilation
        session = self.session = open_session(
            model,
            self._to_step[0],
            self._strategy,
            framework="Accelerate",
            accumulation="gradient_accumulation_steps",
            precision=f"mixed_precision {self.mixed_precision!r}" if self.native_amp else None,
            scaler=self.scaler,
            compiled_copy="use_regional_compilation" if regional else None,
        )
        if session.world_size != self.num_processes:
            self.close()
            raise UsageError(
                f"Accelerate counts {self.num_processes} process, and there are "
                f"{session.world_size} ranks: all would train on the same data, and each would "
                "save. On CPUs say so, Accelerator(cpu=True) or TrainingArguments(use_cpu=True); "
                "under srun or mpirun set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )

    def _model_to_train(self) -> nn.Module:
        """Return the model, or a list of all, as one optimizer may step several, which the script
        calls one by one: a UNet and its text encoder.

        Raises:
            ModelError: the optimizer does not step one of several.
        """
        if len(self._to_train) == 1:
            return self._to_train[0]
        stepped = {id(p) for group in self._to_step[0].param_groups for p in group["params"]}
        for model in self._to_train:
            if stepped.isdisjoint(map(id, model.parameters())):
                raise ModelError(
                    f"prepare() got several models, of which the optimizer does not step the "
                    f"{type(model).__name__}: freeze one that is not trained, "
                    "teacher.requires_grad_(False), then accelerator.free_memory() and "
                    "prepare() again; for one with an optimizer of its own call "
                    "slipstream.accelerate() in a loop of your own"
                )
        return nn.ModuleList(self._to_train)

    def _opened(self, call: str) -> Session[Any, Any]:
        if self.session is None:
            raise UsageError(
                f"{call} before a model and its optimizer are prepared: model, optimizer = "
                "accelerator.prepare(model, optimizer)"
            )
        return self.session


class _GatheredOptimizer(AcceleratedOptimizer):
    """An optimizer whose state is gathered from all ranks, over which it may lie."""

    opened_by: Accelerator

    def step(self, closure: Any = None) -> None:
        """Update, and know an update that the session has skipped as one of Accelerate's own."""
        session = self.opened_by.session
        before = 0 if session is None else session.skipped
        super().step(closure)
        if session is not None and self.scaler is None and self.gradient_state.sync_gradients:
            self._is_overflow = session.skipped > before

    def state_dict(self) -> dict[str, Any]:
        session = self.opened_by.session
        if session is None or session.optimizer is not self.optimizer:
            return dict(super().state_dict())
        return dict(session.checkpoint("optimizer")["optimizer"])


def _bare(model: nn.Module) -> nn.Module:
    """Return the module that was compiled, if one was."""
    bare: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return bare


def _check_buffers(model: nn.Module) -> None:
    """Refuse buffers that are to differ between ranks.

    Raises:
        UsageError: there are some with values that training changes.
    """
    kept = model.state_dict()
    changing = [name for name, b in model.named_buffers() if b.is_floating_point() and name in kept]
    if changing:
        raise UsageError(
            f"broadcast_buffers=False with {changing[0]}: a session gives all ranks the buffers of "
            "the first rank, as DistributedDataParallel does by default: leave it out"
        )


_DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
