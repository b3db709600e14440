"""Trains one model on several ranks, each of which computes some of its layers.

    pipeline = Pipeline(model, cut=["transformer.h.6"], micro_batches=8)
    for words, labels in loader:                       # every rank reads the same batch
        loss = pipeline.forward_backward(loss_fn, (words,), target=labels)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.close()

Never changes the model: see ``stages`` for how its layers run on different ranks, and
``schedules`` for the order in which they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.comm.groups import group_of
from slipstream.errors import ExchangeError, ModelError, SlipstreamError, UsageError
from slipstream.parallel.pipeline.micro_batches import MicroBatch, micro_batches
from slipstream.parallel.pipeline.schedules import (
    Schedule,
    ScheduleName,
    check_schedule,
    make_schedule,
)
from slipstream.parallel.pipeline.shape_inference import Walk, walk
from slipstream.parallel.pipeline.split_points import cut_model
from slipstream.parallel.pipeline.stage_module import StageModule, TimedStage, Work
from slipstream.parallel.pipeline.stage_parameters import StageParameters
from slipstream.parallel.pipeline.stages import Stages
from slipstream.trace.recorder import Recorder
from slipstream.transport.consistency import agree, collective_errors

LossFn = Callable[[Any, Any], torch.Tensor]


class Pipeline:
    """A model cut into stages, of which stage s runs on rank s % ranks.

    Applied from outside: module paths, names and ``model.parameters()`` stay, so an optimizer may
    be made before or after. Parameters of other ranks' stages keep no memory and get no gradient.
    Where one process trains alone there is one stage, whatever ``cut`` says.

    Args:
        model: whole and equal on every rank. Its forward calls the modules at the cuts once each.
        process_group: None: all ranks. All are on one device each, that of the model.
        cut: paths of the modules at which stages 1, 2, ... begin; see `balance`.
        schedule: see `ScheduleName`.
        micro_batches: into how many equal parts each batch is split.
        recorder: gets a span for each forward and backward of a stage.

    Raises:
        ModelError: cuts that the model does not have.
        StrategyError: cuts or micro-batches that the schedule does not take.
        MismatchError: the ranks give different models or settings.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> pipeline = Pipeline(model, cut=["1"], micro_batches=2)
        >>> x, y = torch.ones(4, 3), torch.zeros(4, 1)
        >>> loss = pipeline.forward_backward(nn.functional.mse_loss, (x,), target=y)
        >>> torch.equal(loss, nn.functional.mse_loss(model(x), y).detach())
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
        self._group = _members(process_group)
        ranks = dist.get_world_size(self._group) if self._group is not None else 1
        error: SlipstreamError | None = None
        try:
            cuts = cut_model(model, cut)
            check_schedule(schedule, cuts.stages if ranks > 1 else 1, ranks, micro_batches)
        except SlipstreamError as found:
            error = found
        self._agree(
            {"cut": str(list(cut)), "schedule": f"{schedule} of {micro_batches} micro-batches"}
            | {f"parameter {n}": f"{p.dtype} {list(p.shape)}" for n, p in model.named_parameters()},
            error,
        )
        self.cuts = cuts if ranks > 1 else cut_model(model, [])
        self.stage_parameters = StageParameters(model, self.cuts, self._group)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._stages = Stages(model, self.cuts)
        self._recorder = recorder
        self._signature = ""
        self._work = Work()
        self._schedule: Schedule | StageModule | None = None
        self._state = "open"
        self.stage_parameters.release()
        self._hook = model.register_forward_pre_hook(self._refuse)

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

        For a loss that is a mean over samples they are those of one backward of
        ``scale * loss_fn(model(*args, **kwargs), target)``, and those of parameters that stages
        share are summed over these. Exactness: reordered; what depends on the whole batch, as batch
        norm does, sees a micro-batch. Collective; on every rank with the same batch.

        Args:
            loss_fn: of the model's output and the target; called on the last stage.
            args: of the model; see `micro_batches` for how they are split.
            kwargs: as ``args``.
            target: tensors, in tuples, lists or mappings if several.
            scale: of gradients, not of the loss that is returned.

        Returns:
            The mean of the micro-batches' losses, on every rank, without a graph.

        Raises:
            StrategyError: a batch that does not split into equal micro-batches.
            ModelError: in the first call, or one with other shapes: a cut where more than one
                tensor flows, modules that run out of order, a loss that is no scalar, or an error
                of the model's own; on every rank.
            ExchangeError: later, an error in a stage, on its rank; on the others what follows of
                it, at the latest when the group's timeout is over.
            UsageError: the pipeline is closed, has failed, or gradients are off.
        """
        self._must_be_open("forward_backward")
        if not torch.is_grad_enabled():
            raise UsageError("forward_backward() under torch.no_grad(); call evaluate() there")
        batches = micro_batches(args, kwargs or {}, target, self.micro_batches)
        self._set_up(loss_fn, batches[0])
        self._work.begin(loss_fn, batches, scale / self.micro_batches)
        before = [(parameter, parameter.grad) for parameter, _ in self.stage_parameters.shared]
        for parameter, _ in before:
            parameter.grad = None
        try:
            self._run()
            self.stage_parameters.sum_gradients()
        except Exception as error:
            if self._group is None:
                raise
            self._state = "broken by an error"
            raise self._explained(error) from (self._work.error or error)
        for parameter, gradient in before:
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
        return self._loss()

    def evaluate(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """What the model returns, on every rank; buffers stay as they are. Collective.

        The stages run one after the other on the whole batch: right, not fast.

        Raises:
            ModelError: as `forward_backward`.
            UsageError: the pipeline is closed or has failed.
        """
        self._must_be_open("evaluate")
        with torch.no_grad():
            return self._walk(MicroBatch(args, kwargs or {}, None), None).result

    def full_state_dict(self) -> dict[str, object]:
        """``model.state_dict()`` of the whole model, copied, on every rank. Collective."""
        return self.stage_parameters.full_state_dict()

    def load_full_state_dict(self, state: dict[str, object]) -> None:
        """Take over this rank's part of what `full_state_dict` returned."""
        self.stage_parameters.load_full_state_dict(state)

    def close(self) -> None:
        """Every rank has the whole model again, as it is now. Collective; once is enough.

        After an ExchangeError it does nothing: other ranks may be gone; load a checkpoint instead.
        """
        if self._state == "open":
            self._hook.remove()
            self.stage_parameters.restore()
            self._schedule, self._state = None, "closed"

    def _agree(self, facts: dict[str, str], error: SlipstreamError | None) -> None:
        """All ranks go on, or all raise."""
        if self._group is not None and group_of(self._group).device.type == "cpu":
            agree(facts, self._group, error)
        if error is not None:
            raise error

    def _refuse(self, *_: object) -> None:
        """A call of the model from outside would compute with what other ranks hold."""
        if not self._stages.running and self._group is not None:
            raise UsageError(
                "a call of a model that is cut into stages; allowed: forward_backward(), and "
                "evaluate() for what it returns"
            )

    def _must_be_open(self, verb: str) -> None:
        if self._state != "open":
            raise UsageError(f"{verb}() of a pipeline that is {self._state}; make a new one")

    def _walk(self, batch: MicroBatch, loss_fn: LossFn | None) -> Walk:
        return walk(self._stages, batch, loss_fn, self._group, self._device)

    def _set_up(self, loss_fn: LossFn, batch: MicroBatch) -> None:
        """If the shapes are new, find out what travels, and build torch's stages for it."""
        flags = "".join(str(int(p.requires_grad)) for p in self.model.parameters())
        signature = f"{batch.signature()}, requires_grad {flags}"
        if signature == self._signature:
            return
        self._agree({"the first micro-batch": signature}, None)
        travels = self._watched(loss_fn, batch)
        modules = [
            StageModule(
                self._stages, stage, self.stage_parameters.parameters(stage), travels, self._work
            )
            for stage in range(
                self.stage_parameters.rank, self.cuts.stages, self.stage_parameters.size
            )
        ]
        if self._group is None:
            self._schedule = modules[0]
        else:
            built = [
                TimedStage(module, self._device, self._group, self._recorder) for module in modules
            ]
            self._schedule = make_schedule(self.schedule, built, self.micro_batches)
        self._signature = signature

    def _watched(self, loss_fn: LossFn, batch: MicroBatch) -> list[torch.Tensor]:
        """What travels, as tensors without data."""
        found = self._walk(batch, loss_fn)
        self._work = Work(found.seen)
        self._loss_dtype = found.travels[-1].dtype
        always = self.schedule == "zero_bubble"  # misses parameters behind a constant input
        for path, spec in zip(self.cuts.paths, found.travels, strict=False):
            if always and not spec.dtype.is_floating_point:
                raise ModelError(
                    f"{path!r} receives {spec.dtype}; allowed by zero_bubble: a floating-point "
                    "tensor; choose another cut or schedule"
                )
        return [spec.on_meta(always or spec.requires_grad) for spec in found.travels]

    def _run(self) -> None:
        """All micro-batches, forward and backward."""
        if isinstance(self._schedule, StageModule):
            for number in range(self.micro_batches):
                self._schedule(micro_batch=torch.tensor([number])).backward()
        elif self._schedule is not None:
            numbers = torch.arange(self.micro_batches)
            self._schedule.step(target=numbers, return_outputs=False, micro_batch=numbers)

    def _loss(self) -> torch.Tensor:
        """The mean loss, from the rank that has the last stage."""
        owner = (self.cuts.stages - 1) % self.stage_parameters.size
        if owner == self.stage_parameters.rank:
            mean = torch.stack(self._work.losses).mean()
        else:
            mean = torch.empty((), dtype=self._loss_dtype, device=self._device)
        self._work.begin(lambda output, target: output, [], 1.0)
        if self._group is not None:
            with collective_errors("the broadcast of the loss"):
                dist.broadcast(mean, group=self._group, group_src=owner)
        return mean

    def _explained(self, error: Exception) -> ExchangeError:
        rank = dist.get_rank() if self._group is not None else 0
        if (own := self._work.error) is not None:
            return ExchangeError(f"rank {rank}: {self._work.place}: {type(own).__name__}: {own}")
        stages = list(
            range(self.stage_parameters.rank, self.cuts.stages, self.stage_parameters.size)
        )
        return ExchangeError(
            f"rank {rank}, which runs stages {stages}, cannot go on, most often because the stage "
            f"before or after failed: look at the first error of all ranks ({error})"
        )


def _members(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks of the pipeline; None where there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = process_group if process_group is not None else dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None
