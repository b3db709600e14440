"""The pipeline schedules of torch that are on offer, and what each of them asks for.

Source: GPipe (Huang et al., 2019); 1F1B (PipeDream-Flush, Narayanan et al., 2021a); interleaved
1F1B (Narayanan et al., 2021b, https://arxiv.org/abs/2104.04473); zero bubble, of which torch has
ZB-H1 (Qi et al., 2023, https://arxiv.org/abs/2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from slipstream.errors import StrategyError

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
"""``gpipe``: all forwards, then all backwards. ``1f1b``: the same bubble, activations of as many
micro-batches as there are ranks instead of all. ``interleaved_1f1b``: several stages a rank, a
bubble shorter by that. ``zero_bubble``: a backward in two parts, of which the one for parameters
fills the bubble."""

Schedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble

_SINGLE = ("gpipe", "1f1b")


def check_schedule(schedule: str, stages: int, ranks: int, micro_batches: int) -> None:
    """Return if the schedule can run so many stages and micro-batches.

    Raises:
        StrategyError: an unknown schedule, stages that do not go evenly on the ranks, or a number
            of micro-batches that the schedule does not take.

    Example:
        >>> check_schedule("interleaved_1f1b", stages=4, ranks=2, micro_batches=4)
    """
    if schedule not in get_args(ScheduleName):
        raise StrategyError(f"schedule {schedule!r}; allowed: {', '.join(get_args(ScheduleName))}")
    if stages % ranks or stages < ranks:
        raise StrategyError(
            f"{stages - 1} cuts make {stages} stages, on {ranks} ranks; allowed: {ranks - 1} cuts, "
            f"or for several stages a rank {2 * ranks - 1}, {3 * ranks - 1}, ..."
        )
    if schedule in _SINGLE and stages > ranks:
        raise StrategyError(
            f"schedule {schedule} runs one stage a rank, not {stages // ranks}; allowed: "
            f"{ranks - 1} cuts, or interleaved_1f1b or zero_bubble"
        )
    if micro_batches < 1:
        raise StrategyError(f"{micro_batches} micro-batches; allowed: 1 or more")
    if schedule == "1f1b" and micro_batches < stages:
        raise StrategyError(
            f"{micro_batches} micro-batches on {stages} stages; allowed by 1f1b: {stages} or more"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule not in _SINGLE and micro_batches % rounds:
        raise StrategyError(
            f"{micro_batches} micro-batches on {ranks} ranks; allowed by {schedule}: a multiple of "
            f"the ranks, e.g. {micro_batches // ranks * ranks}"
        )


def make_schedule(
    schedule: ScheduleName,
    stages: Sequence[PipelineStage],
    micro_batches: int,
) -> Schedule:
    """torch's schedule over the stages of this rank, of which the last returns its loss.

    torch would divide ``parameter.grad`` by the micro-batches, and with it what had been added up
    there before: the stage divides its loss instead.
    """

    def loss_fn(loss: torch.Tensor, number: object) -> torch.Tensor:
        return loss

    if schedule == "gpipe":
        return ScheduleGPipe(stages[0], micro_batches, loss_fn, scale_grads=False)
    if schedule == "1f1b":
        return Schedule1F1B(stages[0], micro_batches, loss_fn, scale_grads=False)
    kind = (
        ScheduleInterleaved1F1B if schedule == "interleaved_1f1b" else ScheduleInterleavedZeroBubble
    )
    return kind(list(stages), micro_batches, loss_fn, scale_grads=False)
