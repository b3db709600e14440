"""Hugging Face's Trainer: a session in place of DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import CONFIG_NAME

from slipstream.adapters.accelerate import Accelerator
from slipstream.adapters.opening import SESSION_FILE, GivenStrategy, warn_inside_window
from slipstream.errors import UsageError
from slipstream.session.checks import check_model
from slipstream.strategy import HalfWeightsConfig


class SessionTrainer(transformers.Trainer):
    """A ``transformers.Trainer`` that trains by a session.

    Args:
        strategy: as of ``slipstream.accelerate``; default: the file that ``SLIPSTREAM_STRATEGY``
            names, or none.
        arguments: those of ``transformers.Trainer``. For another kind of trainer, make a class of
            both: ``class Mine(SessionTrainer, OtherTrainer): ...``

    Raises:
        UsageError: as of `slipstream.adapters.accelerate.Accelerator`.

    Exactness: that of the strategy.
    """

    accelerator: Accelerator

    def __init__(
        self,
        *arguments: Any,
        strategy: GivenStrategy = None,
        **named: Any,
    ) -> None:
        self._strategy = strategy
        super().__init__(*arguments, **named)
        made: Any = self.accelerator
        if not isinstance(made, Accelerator):
            raise UsageError(
                f"{type(self).__name__} makes an accelerator of its own, by which no session would "
                "train: let it make a slipstream.adapters.accelerate.Accelerator instead"
            )

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        self._accelerator_args: dict[str, Any] = super()._build_accelerator_args(**named)
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        """Replace the accelerator, whose class Trainer names in no other place."""
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(strategy=self._strategy, **self._accelerator_args)

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Train, then close the session: under ``local`` the model is then the mean of all ranks'.

        Raises:
            UsageError: as of `slipstream.adapters.accelerate.Accelerator`.
        """
        try:
            output = super().train(*arguments, **named)
        except BaseException as error:
            self.accelerator.close(type(error), error, error.__traceback__)
            raise
        self.accelerator.close()
        return output

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """Evaluate the parameters that evaluate best: under ``local`` the outer ones."""
        with self._evaluating():
            metrics: dict[str, float] = super().evaluate(*arguments, **named)
        return metrics

    def predict(self, *arguments: Any, **named: Any) -> Any:
        """Predict by the parameters that evaluate best."""
        with self._evaluating():
            return super().predict(*arguments, **named)

    def save_model(self, *arguments: Any, **named: Any) -> None:
        """Save the parameters that evaluate best."""
        with self._best():
            super().save_model(*arguments, **named)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Collect the weights on all ranks, over which their masters may lie; save on one."""
        session = self.accelerator.session
        alone = session is not None and session.strategy.local is not None  # no masters elsewhere
        if state_dict is None and self.model is not None and (self.args.should_save or not alone):
            state_dict = self.accelerator.get_state_dict(self.model)
        masters = session is not None and isinstance(session.strategy.precision, HalfWeightsConfig)
        types = (v.dtype for v in (state_dict or {}).values() if v.is_floating_point())
        saved_type = next(types, None) if masters else None
        super()._save(output_dir, state_dict)
        bare: Any = self.model and self.accelerator.unwrap_model(self.model)
        file = Path(output_dir or self.args.output_dir or ".", CONFIG_NAME)
        written = self.args.should_save and file.is_file()
        if saved_type is not None and written and isinstance(bare, PreTrainedModel):
            # transformers has written the type of the 16-bit weights there, and would read in it
            computed_type, bare.config.dtype = bare.config.dtype, saved_type
            bare.config.save_pretrained(file.parent)
            bare.config.dtype = computed_type

    def _load_best_model(self) -> None:
        """Close the session before: its last meetings are not of the model that is loaded."""
        self.accelerator.close()
        super()._load_best_model()

    def _prepare_for_training(self, *arguments: Any, **named: Any) -> Any:
        """Train a model again that was compiled before, for which Trainer prepares the optimizer
        alone.

        Raises:
            ModelError: the model is split over ranks.
            UsageError: this process has several GPUs.
        """
        if self.model is not None:
            check_model(self.model)
        if self.args.n_gpu > 1:
            raise UsageError(
                f"{self.args.n_gpu} GPUs in one process, among which Trainer splits batches by "
                "DataParallel; a rank has one: start the script by slipstream launch --nproc gpu, "
                "or set CUDA_VISIBLE_DEVICES=0"
            )
        if self.model is not None and self.model_wrapped is not self.model:
            self.accelerator.train_prepared(self.model)
        prepare: Any = super()._prepare_for_training
        return prepare(*arguments, **named)

    def _evaluate(self, *arguments: Any, **named: Any) -> Any:
        """Let an ``evaluate()`` of a subclass put an average in, and take it out, inside."""
        with self._evaluating():
            evaluate: Any = super()._evaluate
            return evaluate(*arguments, **named)

    def _evaluating(self) -> AbstractContextManager[None]:
        session = self.accelerator.session
        if session is not None and session.strategy.local is not None:
            # Trainer would do so inside: a schedule-free optimizer then changed the outer
            # parameters, which are gone when its next train() changes this rank's back
            optimizer: Any = self.optimizer  # Accelerate's, whose eval() may do nothing
            optimizer.eval()
        return self._best()

    def _best(self) -> AbstractContextManager[None]:
        session = self.accelerator.session
        return nullcontext() if session is None else session.evaluating()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Gather on all ranks, over which state of optimizer and codecs may lie; save on one."""
        session = self.accelerator.session
        if session is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = session.checkpoint("optimizer")
        if session.between_updates:
            state |= session.checkpoint("session")
        else:
            warn_inside_window(output_dir)
        if self.args.should_save:
            folder = Path(output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state["optimizer"], folder / OPTIMIZER_NAME)
            if "session" in state:
                torch.save(state["session"], folder / SESSION_FILE)
            else:
                (folder / SESSION_FILE).unlink(missing_ok=True)  # of an earlier run
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load a checkpoint of this or of a plain Trainer, which has no state of a session."""
        session = self.accelerator.session
        if session is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder, names = Path(checkpoint), {"optimizer": OPTIMIZER_NAME, "session": SESSION_FILE}
        files = {part: folder / name for part, name in names.items()}
        state = {p: torch.load(f, map_location="cpu") for p, f in files.items() if f.is_file()}
        if state:  # none with save_only_model
            session.restore(state)
        if (folder / SCHEDULER_NAME).is_file():
            assert self.lr_scheduler is not None
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME))
