"""Adapts a stage to torch's pipeline schedules: a module from one tensor to one tensor.

The schedule decides when to run, and passes the number of a micro-batch; every rank has the inputs
of all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.parallel.pipeline.micro_batches import MicroBatch
from slipstream.parallel.pipeline.stages import Returned, Stages
from slipstream.trace.event import STAGE_BACKWARD, STAGE_FORWARD, STAGE_WEIGHT
from slipstream.trace.recorder import Recorder

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass
class RandomNumbers:
    """The seeds of a batch. Every stage begins a micro-batch with the same one, as the code of the
    model itself runs on all of them, and goes on with one of its own in its first module.

    Args:
        drawn: the same on every rank.
        micro_batches: how many there are.
        device: of the model.
    """

    drawn: int
    micro_batches: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.device.type == "cuda":  # whose seed may be of this rank alone
            with torch.cuda.device(self.device):
                self._of_device = torch.cuda.initial_seed()

    def begin(self, micro_batch: int, stage: int = 0) -> None:
        """Seed torch's generators."""
        seed = self.drawn + stage * self.micro_batches + micro_batch
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed ^ self._of_device)


class CurrentBatch:
    """The batch that the stages of one rank compute now.

    Attributes:
        returned: what modules of earlier stages return, see `Stages.run_recorded`.
        losses: of the micro-batches so far, on the rank of the last stage.
        error: what the model or the loss raised.
        error_place: stage and micro-batch of ``error``.
        numbers: the seeds; None: random numbers go on as they are, as on a single process.
    """

    numbers: RandomNumbers | None = None

    def __init__(self, returned: Returned | None = None) -> None:
        self.returned: Returned = returned or {}
        self.clear()

    def clear(self) -> None:
        """Drop the batch."""
        self.begin(lambda output, target: output, [], 1.0)

    def begin(self, loss_fn: LossFn, micro_batches: list[MicroBatch], scale: float) -> None:
        """Take a batch; losses are multiplied by ``scale`` before backward."""
        self.loss_fn, self.micro_batches, self.scale = loss_fn, micro_batches, scale
        self.losses: list[torch.Tensor] = []
        self.error: Exception | None = None
        self.error_place = ""


class StageModule(nn.Module):
    """One stage, from the tensor that it receives to the one that it sends, or to the loss.

    Args:
        stages: of the model.
        stage: number of this stage.
        parameters: those that the stage uses.
        sent: by stage, a meta tensor like the one that it sends; of the last stage, the loss.
        batch: the inputs.
    """

    def __init__(
        self,
        stages: Stages,
        stage: int,
        parameters: Sequence[nn.Parameter],
        sent: Sequence[torch.Tensor],
        batch: CurrentBatch,
    ) -> None:
        super().__init__()
        self.stage, self.num_stages = stage, stages.split_points.num_stages
        self.receives, self.sends = sent[stage - 1 : stage] if stage else [], sent[stage]
        self._stages, self._batch = stages, batch
        for number, parameter in enumerate(parameters):
            self.register_parameter(str(number), parameter)

    def forward(
        self, received: torch.Tensor | None = None, *, micro_batch: torch.Tensor
    ) -> torch.Tensor:
        number, batch = int(micro_batch), self._batch
        inputs = batch.micro_batches[number]
        if received is not None:
            # A copy, since modules may write to their input and torch keeps it for backward. The
            # gradient must be contiguous to be sent to the stage before.
            received = received.clone()
            if received.requires_grad:
                received.register_hook(torch.Tensor.contiguous)
        enter: Callable[[], None] | None = None
        if batch.numbers is not None:
            batch.numbers.begin(number)
            enter = partial(batch.numbers.begin, number, self.stage)
        try:
            output = self._stages.run(self.stage, received, inputs, batch.returned, enter=enter)
            if self.stage < self.num_stages - 1:
                hidden: torch.Tensor = output
                # torch detaches in place what it has sent, which a view does not allow.
                if output._is_view() or not output.is_contiguous():
                    hidden = output.clone(memory_format=torch.contiguous_format)
                if self.sends.requires_grad and not hidden.requires_grad:
                    hidden = hidden.detach().requires_grad_()
                return hidden
            loss = batch.loss_fn(output, inputs.target).reshape(())
        except Exception as error:
            batch.error = error
            batch.error_place = f"stage {self.stage} in the forward of micro-batch {number}"
            raise
        batch.losses.append(loss.detach())
        return loss * batch.scale


def timed_stage(
    module: StageModule,
    device: torch.device,
    group: dist.ProcessGroup,
    recorder: Recorder | None,
) -> PipelineStage:
    """torch's ``PipelineStage`` with known shapes; records a span a forward and backward.

    Args:
        module: the stage.
        device: of the model.
        group: of the pipeline.
        recorder: None: no spans are recorded.
    """
    made: PipelineStage = _timed_stage()(module, device, group, recorder)
    return made


@cache
def _timed_stage() -> type[Any]:
    """Define its class; late, as torch's pipelines import its compiler, which takes seconds."""
    from torch.distributed.pipelining import PipelineStage

    class TimedStage(PipelineStage):
        def __init__(
            self,
            module: StageModule,
            device: torch.device,
            group: dist.ProcessGroup,
            recorder: Recorder | None,
        ) -> None:
            # Without shapes torch would infer them by a run on uninitialised memory, which would
            # end up in the running statistics of batch norm.
            shapes = (tuple(module.receives), (module.sends,))
            super().__init__(module, module.stage, module.num_stages, device, *shapes, group=group)
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
            end, stage = self._recorder.stamp(self.device), self.stage_index
            self._recorder.add(name, start, end, stage=stage, micro_batch=micro_batch)

    return TimedStage
