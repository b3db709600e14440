"""Lightning's Trainer: a session in place of DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING or "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
else:  # the script's: a package of the same classes, whose Trainer takes no others
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.plugins.precision import Precision
    from pytorch_lightning.strategies import DDPStrategy
    from pytorch_lightning.trainer.states import TrainerFn

from slipstream.adapters.opening import (
    GivenStrategy,
    check_backward,
    check_clips_all,
    open_session,
    several,
    warn_inside_window,
)
from slipstream.errors import UsageError, warn
from slipstream.precision.float_modules import WrappedForward
from slipstream.session.session import Session
from slipstream.transport.broadcast import broadcast

STATE = "slipstream"
"""The session's state in a checkpoint of the Trainer, beside the model's and the optimizer's."""


class SessionStrategy(DDPStrategy):
    """A strategy of Lightning's Trainer that trains by a session, and wraps no module.

    ``fit()`` opens the session for the module and its optimizer, and closes it at its end. Inside,
    ``training_step()`` is the model's forward. Validation sees the parameters that evaluate best.

    Args:
        strategy: as of ``slipstream.accelerate``; default: the file that ``SLIPSTREAM_STRATEGY``
            names, or none.
        named: ``process_group_backend``, ``timeout``, ``cluster_environment`` and the like, as of
            Lightning's ``DDPStrategy``; none of DistributedDataParallel's own.

    Attributes:
        session: of the module; None outside ``fit()``.

    Raises:
        UsageError: an argument of DistributedDataParallel; a ``LightningModule.backward`` of the
            script's own; gradients that Lightning and the strategy both accumulate; clipping by the
            norm of some trained parameters.
        ModelError: several optimizers.

    Exactness: that of the strategy.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from slipstream.adapters.lightning import SessionStrategy
        >>> strategy = SessionStrategy({"gradients": {"transport": "sharded"}})
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2)  # doctest: +SKIP
    """

    def __init__(self, strategy: GivenStrategy = None, **named: Any) -> None:
        super().__init__(**named)
        hooked = self._ddp_comm_hook or self._ddp_comm_wrapper or self._model_averaging_period
        if self._ddp_kwargs or hooked:
            seen = [name for name in named if name in self._ddp_kwargs or name in _OF_DDP]
            raise UsageError(
                f"SessionStrategy({', '.join(seen)}=...) is for DistributedDataParallel, which a "
                "session replaces: leave it out; codecs and local training are in the strategy, "
                "and unused parameters need no setting"
            )
        self.session: Session[Any, Any] | None = None
        self._given = strategy
        self._plugin: Precision | None = None  # the Trainer's own, while a session is open
        self._evaluation = ExitStack()
        self._evaluates = _Evaluates(self.evaluate)
        self._callbacks: list[Callback] = []
        self._loses = ""  # what a checkpoint behind fit() lacks

    # Opening and closing.

    def configure_ddp(self) -> None:
        """Wrap nothing."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._open(trainer)

    def _open(self, trainer: Trainer) -> None:
        module, plugin = self._module, self.precision_plugin
        if type(module).backward is not LightningModule.backward:
            raise UsageError(
                f"{type(module).__name__}.backward() of your own is not called by a session, which "
                "computes gradients itself: leave it out"
            )
        if len(self.optimizers) != 1:
            raise several("optimizers", f"{type(module).__name__}.configure_optimizers()")
        self.session = open_session(
            module,
            self.optimizers[0],
            self._given,
            framework="Lightning",
            accumulation="Trainer(accumulate_grad_batches=...)",
            precision=None if plugin.precision == "32-true" else f"precision={plugin.precision!r}",
            scaler=getattr(plugin, "scaler", None),
        )
        self._plugin, self.precision_plugin = plugin, _clipping_by(self.session, plugin)
        made: Any = trainer  # which declares no callbacks
        self._callbacks = made.callbacks
        self._callbacks.insert(0, self._evaluates)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._close(type(exception), exception, None)

    def teardown(self) -> None:
        self._close(None, None, None)
        super().teardown()

    def _close(self, *error: Any) -> None:
        self._evaluation.close()
        session, self.session = self.session, None
        if session is not None:
            with suppress(ValueError):  # the script has taken all callbacks out
                self._callbacks.remove(self._evaluates)
            self.precision_plugin = self._plugin
            codec, local = session.strategy.gradients.codec, session.strategy.local
            self._loses = "local" if local else "" if codec is None else f"codec {codec.kind}"
            session.__exit__(*error)

    # Training.

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Call the step as the module's forward, so that hooks on the module see it."""
        assert self.session is not None
        precision = self.session.strategy.precision
        if precision is not None and precision.kind == "half_weights":
            # Its hooks cast inputs: those of forward(), not the targets of a step.
            with self._explaining_types("training_step"):
                return super().training_step(*arguments, **named)
        with self.precision_plugin.train_step_context():
            wrapped = vars(self._module).get("forward")
            if isinstance(wrapped, WrappedForward):  # Lightning would put the step in place of it
                with wrapped.running(self._module.training_step):
                    return self._module(*arguments, **named)
            return self._forward_redirection(
                self._module, self._module, "training_step", *arguments, **named
            )

    def backward(
        self,
        closure_loss: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        *arguments: Any,
        **named: Any,
    ) -> torch.Tensor:
        assert self.session is not None
        check_backward(arguments, named)
        plugin: Any = self.precision_plugin
        plugin.computed = True
        loss = plugin.pre_backward(closure_loss, self._module)
        self.session.backward(loss, **named)
        return cast(torch.Tensor, plugin.post_backward(loss, self._module))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.session is not None
        with self.session.no_sync():
            yield

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: nn.Module | None = None,
        **named: Any,
    ) -> Any:
        """Compute gradients, average and clip them, then step: a session takes no closure."""
        plugin: Any = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:  # which does so by itself
            result = super().optimizer_step(optimizer, closure, model, **named)
        else:
            result = plugin._wrap_closure(self._module, optimizer, closure)
            optimizer.step(**named)
        plugin.computed = False
        return result

    # Evaluation.

    def evaluate(self) -> None:
        """Let the module have the parameters that evaluate best, until validation ends."""
        if self.session is not None:
            self._evaluation.enter_context(self.session.evaluating())
            self._share_buffers()

    def on_train_end(self) -> None:
        super().on_train_end()
        self._share_buffers()

    def _share_buffers(self) -> None:
        """Give all ranks the first one's: the last epoch of StochasticWeightAveraging has forwards
        alone, and buffers travel with a backward. Under ``local``, meetings average them."""
        session = self.session
        if session is not None and session.world_size > 1 and session.strategy.local is None:
            group = dist.group.WORLD
            assert group is not None
            broadcast([*self._module.buffers()], group)

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        with self._explaining_types("validation_step"):
            return super().validation_step(*arguments, **named)

    def on_validation_end(self) -> None:
        self._evaluation.close()

    @contextmanager
    def _explaining_types(self, step: str) -> Iterator[None]:
        """Say what casts inputs for 16-bit weights, where torch refuses theirs."""
        try:
            yield
        except RuntimeError as error:
            precision = None if self.session is None else self.session.strategy.precision
            half = precision is not None and precision.kind == "half_weights"
            if half and "type" in str(error):
                error.add_note(
                    f"under precision: half_weights {step}() calls self(...), whose inputs are "
                    "cast, not parts of the module"
                )
            raise

    # Checkpoints, which all ranks take part in.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.session is None:
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        return dict(self.session.checkpoint("model")["model"])

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        # another one: a callback has set up optimizers anew
        bare = getattr(optimizer, "_optimizer", optimizer)
        if self.session is None or bare is not self.session.optimizer:
            state: dict[str, Any] = super().optimizer_state(optimizer)
            return state
        return dict(self.session.checkpoint("optimizer")["optimizer"])

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self.session is None and self._loses and "optimizer_states" in checkpoint:
            warn(
                f"{filepath} is saved after fit(), whose session is closed, and lacks its state: "
                f"{self._loses} would begin anew from it; ModelCheckpoint saves inside fit()",
            )
        if self.session is not None and "optimizer_states" in checkpoint:
            if self.session.between_updates:
                checkpoint[STATE] = self.session.checkpoint("session")["session"]
            else:
                warn_inside_window(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore a checkpoint of this or of another strategy, which has no state of a session."""
        if self.session is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        state = {"optimizer": checkpoint["optimizer_states"][0]}
        if STATE in checkpoint:
            state["session"] = checkpoint[STATE]
        self.session.restore(state)


_OF_DDP = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class _Evaluates(Callback):
    """The first callback: those behind it may put averages in where validation starts, and take
    them out where it ends, as Lightning tells a strategy of both last."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()


class _ClipsBySession(Precision):
    """In front of a precision plugin's class: the norm is of all gradients of the model."""

    session: Session[Any, Any]
    computed = False  # gradients, since the last step

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        if self.computed:
            check_clips_all(self.session, self.main_params(optimizer))
            self.session.clip_grad_norm_(clip_val)
        else:  # in the last epoch of StochasticWeightAveraging, which steps without a backward
            super().clip_grad_by_norm(optimizer, clip_val)


def _clipping_by(session: Session[Any, Any], plugin: Precision) -> Any:
    """Copy a precision plugin, whose class the Trainer names in checkpoints."""
    kind = type(plugin)
    names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}
    copy: Any = object.__new__(type(kind.__name__, (_ClipsBySession, kind), names))
    copy.__dict__.update(plugin.__dict__, session=session)
    return copy
