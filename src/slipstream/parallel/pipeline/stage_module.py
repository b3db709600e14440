"""A stage as torch's pipeline schedules want it: a module from one tensor to one tensor.

Never splits a batch and never decides when to run: the schedule hands over the number of a
micro-batch, whose inputs are at hand on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from slipstream.parallel.pipeline.micro_batches import MicroBatch
from slipstream.parallel.pipeline.stages import Seen, Stages
from slipstream.trace.event import STAGE_BACKWARD, STAGE_FORWARD, STAGE_WEIGHT
from slipstream.trace.recorder import Recorder

_DENSE = torch.contiguous_format


class Work:
    """What the stages of one rank compute now.

    Attributes:
        seen: what modules of earlier stages return, see `Stages.watch`.
        losses: of the micro-batches so far, where the last stage is.
        error: what the model or the loss raised, and ``place`` where.
    """

    def __init__(self, seen: Seen | None = None) -> None:
        self.seen: Seen = seen or {}
        self.begin(lambda output, target: output, [], 1.0)

    def begin(
        self, loss_fn: Callable[[Any, Any], torch.Tensor], batches: list[MicroBatch], scale: float
    ) -> None:
        """The micro-batches of one batch; their losses are scaled before backward."""
        self.loss_fn, self.batches, self.scale = loss_fn, batches, scale
        self.losses: list[torch.Tensor] = []
        self.error: Exception | None = None
        self.place = ""


class StageModule(nn.Module):
    """One stage, from the tensor that it receives to the one that it sends, or to its loss.

    Args:
        stages: of the model.
        stage: the number of this one.
        parameters: that it uses.
        travels: by stage, a tensor like the one that it sends; of the last, its loss.
        work: what to compute.
    """

    def __init__(
        self,
        stages: Stages,
        stage: int,
        parameters: Sequence[nn.Parameter],
        travels: Sequence[torch.Tensor],
        work: Work,
    ) -> None:
        super().__init__()
        self.stage, self.count = stage, stages.cuts.stages
        self.receives, self.sends = travels[stage - 1 : stage] if stage else [], travels[stage]
        self._stages, self._work = stages, work
        for number, parameter in enumerate(parameters):
            self.register_parameter(str(number), parameter)

    def forward(
        self, received: torch.Tensor | None = None, *, micro_batch: torch.Tensor
    ) -> torch.Tensor:
        number = int(micro_batch)
        batch, work = self._work.batches[number], self._work
        if received is not None:
            # A copy: modules may write to their input, and torch keeps it for backward. What goes
            # back to the stage before has to be contiguous.
            received = received.clone()
            if received.requires_grad:
                received.register_hook(torch.Tensor.contiguous)
        try:
            output = self._stages.run(self.stage, received, batch.args, batch.kwargs, work.seen)
            if self.stage < self.count - 1:
                # torch detaches what it has sent in place, which a view does not allow.
                view = output._is_view() or not output.is_contiguous()
                hidden: torch.Tensor = output.clone(memory_format=_DENSE) if view else output
                if self.sends.requires_grad and not hidden.requires_grad:
                    hidden = hidden.detach().requires_grad_()
                return hidden
            loss = work.loss_fn(output, batch.target).reshape(())
        except Exception as error:
            work.error = error
            work.place = f"stage {self.stage} in the forward of micro-batch {number}"
            raise
        work.losses.append(loss.detach())
        return loss * work.scale


class TimedStage(PipelineStage):
    """torch's stage, which knows its shapes beforehand and records its spans.

    Args:
        module: the stage.
        device: of the model.
        group: of the pipeline.
        recorder: None: nothing is recorded.
    """

    def __init__(
        self,
        module: StageModule,
        device: torch.device,
        group: dist.ProcessGroup,
        recorder: Recorder | None,
    ) -> None:
        # Without shapes, torch would run each stage on uninitialised memory to find them out, and
        # leave that in the statistics of batch norm.
        super().__init__(
            module,
            module.stage,
            module.count,
            device,
            input_args=tuple(module.receives),
            output_args=(module.sends,),
            group=group,
        )
        self._recorder = recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._span(STAGE_FORWARD, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._span(STAGE_BACKWARD, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._span(STAGE_WEIGHT, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    @contextmanager
    def _span(self, name: str, micro_batch: int) -> Iterator[None]:
        if self._recorder is None or not self._recorder.active:
            yield
            return
        start = self._recorder.stamp(self.device)
        yield
        self._recorder.add(
            name,
            start,
            self._recorder.stamp(self.device),
            stage=self.stage_index,
            micro_batch=micro_batch,
        )
