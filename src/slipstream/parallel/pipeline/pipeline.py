"""Trains one model on several ranks, each of which computes some of its layers (stages).

    pipeline = Pipeline(model, cut=["transformer.h.6"], micro_batches=8)
    for words, labels in loader:                       # every rank reads the same batch
        loss = pipeline.forward_backward(loss_fn, (words,), target=labels)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.close()

The model's code stays as it is: see ``stages`` for how one stage of it runs, and ``schedules`` for
the order in which stages run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.comm.groups import group_of
from slipstream.errors import ExchangeError, ModelError, SlipstreamError, UsageError
from slipstream.parallel.dims import gather_objects
from slipstream.parallel.pipeline import schedules
from slipstream.parallel.pipeline.micro_batches import MicroBatch, micro_batches
from slipstream.parallel.pipeline.schedules import ScheduleName
from slipstream.parallel.pipeline.shape_inference import device_of, sequential_forward
from slipstream.parallel.pipeline.split_points import SplitPoints
from slipstream.parallel.pipeline.stage_module import (
    CurrentBatch,
    LossFn,
    RandomNumbers,
    StageModule,
    timed_stage,
)
from slipstream.parallel.pipeline.stage_parameters import StageParameters
from slipstream.parallel.pipeline.stages import Stages
from slipstream.trace.recorder import Recorder
from slipstream.transport.consistency import agree, collective_errors

if TYPE_CHECKING:
    from slipstream.parallel.pipeline.schedules import Schedule


class Pipeline:
    """A model split into stages; stage s runs on rank s % ranks.

    Module paths, names and ``model.parameters()`` stay, so an optimizer may be made before or
    after. Parameters of other ranks' stages take no memory and get no gradient. A single process
    runs one stage, whatever ``cut`` says.

    Args:
        model: whole and equal on every rank, on one device. Its forward calls each module of
            ``cut`` once.
        process_group: None: all ranks.
        cut: paths of the modules at which stages 1, 2, ... begin; see `balance`.
        schedule: see `ScheduleName`.
        micro_batches: into how many equal parts each batch is split.
        recorder: gets a span for each forward and backward of a stage.

    Raises:
        ModelError: the model does not have the modules of ``cut``.
        StrategyError: the schedule does not support this ``cut`` or number of micro-batches.
        MismatchError: models or settings differ between ranks.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> pipeline = Pipeline(model, cut=["1"], micro_batches=2)
        >>> x, y = torch.ones(4, 3), torch.zeros(4, 1)
        >>> loss = pipeline.forward_backward(nn.functional.mse_loss, (x,), target=y)
        >>> torch.allclose(loss, nn.functional.mse_loss(model(x), y))
        True
        >>> pipeline.close()

    Source: GPipe, https://arxiv.org/abs/1811.06965; the schedules are torch's.
    """

    def __init__(
        self,
        model: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        cut: Sequence[str],
        schedule: ScheduleName = "1f1b",
        micro_batches: int = 4,
        recorder: Recorder | None = None,
    ) -> None:
        self.model, self.schedule, self.micro_batches = model, schedule, micro_batches
        self._group = group_of(process_group)
        ranks = self._group.size
        error: SlipstreamError | None = None
        try:
            split_points = SplitPoints.of(model, cut)
            stages = split_points.num_stages if ranks > 1 else 1
            schedules.check_schedule(schedule, stages, ranks, micro_batches)
        except SlipstreamError as raised:
            error = raised
        self._agree(
            {"cut": str(list(cut)), "schedule": f"{schedule} of {micro_batches} micro-batches"}
            | {f"parameter {n}": f"{p.dtype} {list(p.shape)}" for n, p in model.named_parameters()},
            error,
        )
        self.split_points = split_points if ranks > 1 else SplitPoints.of(model, [])
        self.stage_parameters = StageParameters(model, self.split_points, self._group)
        self._device = device_of(model)
        self._stages = Stages(model, self.split_points)
        self._recorder = recorder
        self._signature = ""
        self._batch = CurrentBatch()
        self._schedule: Schedule | StageModule | None = None
        self._closed = False
        self.failure: str | None = None
        stages_ = self._stages  # not the pipeline: its group must not live as long as the model
        self.stage_parameters.release(lambda: stages_.running)
        self._hook = model.register_forward_pre_hook(partial(_refuse_call, stages_, ranks))

    def forward_backward(
        self,
        loss_fn: LossFn,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        target: Any = None,
        *,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Run one batch forward and backward; gradients are added to ``parameter.grad``.

        For a loss that is a mean over samples, gradients are those of one backward of
        ``scale * loss_fn(model(*args, **kwargs), target)``; gradients of parameters on several
        stages are summed over them. Exactness: reordered; batch norm and other layers that depend
        on the whole batch see a micro-batch, and on several ranks dropout draws other numbers;
        ranks that drew the same numbers of torch before do so afterwards.
        Collective; every rank passes the same batch.

        Args:
            loss_fn: of the model's output and the target; called on the last stage.
            args: of the model; see `micro_batches` for how they are split.
            kwargs: as ``args``.
            target: a tensor, or tensors in tuples, lists or mappings.
            scale: factor on gradients, not on the loss that is returned.

        Returns:
            The mean of the micro-batches' losses, on every rank, detached.

        Raises:
            StrategyError: a batch that does not split into equal micro-batches.
            ModelError: on every rank, in the first call or one with new shapes or other autocast: a
                split point where more than one tensor flows, modules that run out of order, a loss
                that is not a scalar, a hook that the schedule does not call, or an error of the
                model itself.
            Exception: in later calls, what a stage of this rank raised, with a note of the place.
            ExchangeError: another rank's stage has failed; at the latest after the group's timeout.
            UsageError: the pipeline is closed or has failed, or gradients are disabled.
        """
        self._must_be_open("forward_backward")
        if not torch.is_grad_enabled():
            raise UsageError("forward_backward() under torch.no_grad(); call evaluate() there")
        parts = micro_batches(args, kwargs or {}, target, self.micro_batches)
        self._set_up(loss_fn, parts[0])
        self._batch.begin(loss_fn, parts, scale / self.micro_batches)
        # Gradients accumulated before are sums over stages already: set aside, or they would be
        # summed again.
        accumulated = [(p, p.grad) for p, _ in self.stage_parameters.replicated]
        for parameter, _ in accumulated:
            parameter.grad = None
        try:
            self._run_schedule()
            self.stage_parameters.sum_gradients()
        except BaseException as error:
            if self._group.size == 1:
                raise
            own = self._own_error(error)
            self.failure = f"{type(own or error).__name__}: {own or error}"
            if own is not None:
                raise own from own.__cause__
            raise self._exchange_error(error) from error
        for parameter, gradient in accumulated:
            if parameter.grad is None:  # no stage has used it in this pass
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad += gradient
        return self._mean_loss()

    def evaluate(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Compute what the model returns, on every rank; buffers do not change. Collective.

        The stages run one after another on the whole batch, so ranks do not work in parallel.

        Raises:
            ModelError: as `forward_backward`.
            UsageError: the pipeline is closed or has failed.
        """
        self._must_be_open("evaluate")
        with torch.no_grad():
            batch = MicroBatch(args, kwargs or {}, None)
            return sequential_forward(self._stages, batch, None, self._group).result

    def full_state_dict(self) -> dict[str, object]:
        """``model.state_dict()`` of the whole model, copied, on every rank. Collective."""
        return self.stage_parameters.full_state_dict()

    def load_full_state_dict(self, state: dict[str, object]) -> None:
        """Load this rank's part of a state from `full_state_dict`."""
        self.stage_parameters.load_full_state_dict(state)

    def close(self) -> None:
        """Restore the whole model on every rank; idempotent. Collective.

        After an ExchangeError it does nothing, since other ranks may have ended; build the model
        anew and load a checkpoint.
        """
        if not self._closed and self.failure is None:
            self._hook.remove()
            self.stage_parameters.restore()
            self._schedule, self._closed = None, True

    def abandon(self) -> None:
        """Leave the model as it is after an error, and the group to the other ranks."""
        self._schedule = None
        gc.collect()  # torch's schedules and stages hold the group, and each other

    def _agree(self, fingerprint: dict[str, str], error: SlipstreamError | None) -> None:
        """Raise on all ranks if one has an error or another fingerprint."""
        if self._group.size > 1 and self._group.device.type == "cpu":
            agree(fingerprint, self._group.members, error)
        elif self._group.size > 1:  # of NCCL alone, which does not move the CPU tensors of agree()
            said = None if error is None else str(error)
            texts = gather_objects(said, "the errors of all stages", self._group.members)
            if error is None and any(texts):
                raise ModelError(next(filter(None, texts)))
        if error is not None:
            raise error

    def _must_be_open(self, verb: str) -> None:
        if self._closed:
            raise UsageError(f"{verb}() of a pipeline that is closed; make a new one")
        if self.failure is not None:
            raise UsageError(
                f"{verb}() after the schedule of the stages was left by {self.failure}: the stages "
                "are out of step since; end this run, and resume from a checkpoint"
            )

    def _set_up(self, loss_fn: LossFn, batch: MicroBatch) -> None:
        """If shapes or autocast are new, infer what stages send, and build torch's stages and
        schedule."""
        flags = "".join(str(int(p.requires_grad)) for p in self.model.parameters())
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        signature = f"{batch.signature()}, requires_grad {flags}, autocast {autocast or 'off'}"
        if signature == self._signature:
            return
        self._agree({"the first micro-batch": signature}, self._uncalled_hook())
        sent = self._infer_sent(loss_fn, batch)
        parameters = self.stage_parameters
        modules = [
            StageModule(self._stages, stage, parameters.of_stage(stage), sent, self._batch)
            for stage in parameters.local_stages
        ]
        self._schedule = modules[0]
        if self._group.size > 1:
            given = (self._device, self._group.members, self._recorder)
            stages = [timed_stage(module, *given) for module in modules]
            self._schedule = schedules.make_schedule(self.schedule, stages, self.micro_batches)
        self._signature = signature

    def _uncalled_hook(self) -> ModelError | None:
        """The refusal of a hook of the script that torch's zero bubble would not call, as it sets
        gradients of weights itself; those of slipstream do not count on it."""
        if self.schedule != "zero_bubble" or self._group.size == 1:
            return None
        for name, parameter in self.model.named_parameters():
            if not self.stage_parameters.is_local(name):
                continue
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                made = getattr(getattr(hook, "func", hook), "__module__", None) or ""
                if made.partition(".")[0] != "slipstream":
                    return ModelError(
                        f"{name} has a hook of register_post_accumulate_grad_hook(), which torch "
                        "does not call in zero_bubble; use register_hook(), which it calls, or "
                        "another schedule, e.g. interleaved_1f1b"
                    )
        return None

    def _infer_sent(self, loss_fn: LossFn, batch: MicroBatch) -> list[torch.Tensor]:
        """Infer a meta tensor like what each stage sends; of the last one, like the loss."""
        outputs = sequential_forward(self._stages, batch, loss_fn, self._group)
        self._batch = CurrentBatch(outputs.returned)
        self._loss_dtype = outputs.sent[-1].dtype
        # torch's zero bubble finds no parameters of a stage whose input requires no gradient.
        needs_grad = self.schedule == "zero_bubble"
        for path, spec in zip(self.split_points.paths, outputs.sent, strict=False):
            if needs_grad and not spec.dtype.is_floating_point:
                raise ModelError(
                    f"{path!r} receives {spec.dtype}; allowed by zero_bubble: a floating-point "
                    "tensor; choose another cut or schedule"
                )
        meta = torch.device("meta")
        return [
            replace(spec, device=meta).empty().requires_grad_(needs_grad or spec.requires_grad)
            for spec in outputs.sent
        ]

    def _run_schedule(self) -> None:
        """Run all micro-batches forward and backward."""
        if isinstance(self._schedule, StageModule):
            for number in range(self.micro_batches):
                self._schedule(micro_batch=torch.tensor([number])).backward()
        elif self._schedule is not None:
            numbers = torch.arange(self.micro_batches)
            with self._random_numbers_in_step():
                self._schedule.step(target=numbers, return_outputs=False, micro_batch=numbers)

    @contextmanager
    def _random_numbers_in_step(self) -> Iterator[None]:
        """Let ranks that drew the same random numbers before do so again in the code of the model
        itself, and afterwards, however many the dropout of a stage takes: else their loaders would
        come to shuffle differently."""
        drawn = int(torch.randint(2**31 - 1, (), device="cpu"))
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            self._batch.numbers = RandomNumbers(drawn, self.micro_batches, self._device)
            yield

    def _mean_loss(self) -> torch.Tensor:
        """The mean loss, from the rank of the last stage."""
        last = self.split_points.num_stages - 1
        if last in self.stage_parameters.local_stages:
            mean = torch.stack(self._batch.losses).mean()
        else:
            mean = torch.empty((), dtype=self._loss_dtype, device=self._device)
        self._batch.clear()
        if self._group.size > 1:
            owner = last % self._group.size
            with collective_errors("the broadcast of the loss"):
                dist.broadcast(mean, group=self._group.members, group_src=owner)
        return mean

    def _own_error(self, error: BaseException) -> BaseException | None:
        """The error of this rank's stages, or an interrupt; None: another rank is gone."""
        batch = self._batch
        if batch.error is not None:
            batch.error.add_note(f"(rank {dist.get_rank()}: {batch.error_place})")
            return batch.error
        if not isinstance(error, Exception):
            return error
        # torch's schedules wrap an error of backward, and no error of an exchange.
        return None if isinstance(error, SlipstreamError) else error.__cause__

    def _exchange_error(self, error: BaseException) -> ExchangeError:
        return ExchangeError(
            f"rank {dist.get_rank()}, which runs stages "
            f"{list(self.stage_parameters.local_stages)}, cannot continue, most often because the "
            f"stage before or after failed: look at the first error of all ranks ({error})"
        )


def _refuse_call(stages: Stages, ranks: int, *_: object) -> None:
    """A direct call of the model would compute with placeholders."""
    if not stages.running and ranks > 1:
        raise UsageError(
            "a direct call of a model that is split into stages; allowed: forward_backward(), and "
            "evaluate() for the model's outputs"
        )
