"""torch's pipeline schedules: what each requires, how it is built, and its ideal bubble.

Sources: GPipe (Huang et al., 2019); 1F1B (PipeDream-Flush, Narayanan et al., 2021a); interleaved
1F1B (Narayanan et al., 2021b, https://arxiv.org/abs/2104.04473); zero bubble, of which torch has
ZB-H1 (Qi et al., 2023, https://arxiv.org/abs/2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from slipstream.errors import StrategyError

if TYPE_CHECKING:  # torch's pipelines import its compiler, for seconds: `make_schedule` does
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
    )

    Schedule = (
        ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble
    )

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
"""``gpipe``: all forwards, then all backwards. ``1f1b``: the same bubble, but a rank keeps
activations of at most as many micro-batches as there are ranks. ``interleaved_1f1b``: v stages a
rank, a v-th of the bubble. ``zero_bubble``: backward is split in two, and the part for parameters
fills the bubble."""

_CLASSES: dict[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}
_ONE_STAGE_A_RANK = ("gpipe", "1f1b")


def check_schedule(schedule: str, stages: int, ranks: int, micro_batches: int) -> None:
    """Check that the schedule can run these stages and micro-batches.

    Raises:
        StrategyError: an unknown schedule, a number of stages that the ranks do not divide, or a
            number of micro-batches that the schedule does not support.

    Example:
        >>> check_schedule("interleaved_1f1b", stages=4, ranks=2, micro_batches=4)
    """
    if schedule not in _CLASSES:
        raise StrategyError(f"schedule {schedule!r}; allowed: {', '.join(_CLASSES)}")
    if stages % ranks or stages < ranks:
        raise StrategyError(
            f"cut at {stages - 1} modules makes {stages} stages, on {ranks} ranks; allowed: "
            f"{ranks - 1} modules, or for several stages a rank {2 * ranks - 1}, "
            f"{3 * ranks - 1}, ..."
        )
    if schedule in _ONE_STAGE_A_RANK and stages > ranks:
        raise StrategyError(
            f"schedule {schedule} runs one stage a rank, not {stages // ranks}; allowed: "
            f"a cut at {ranks - 1} modules, or interleaved_1f1b or zero_bubble"
        )
    if micro_batches < 1:
        raise StrategyError(f"{micro_batches} micro-batches; allowed: 1 or more")
    if schedule == "1f1b" and micro_batches < stages:
        raise StrategyError(
            f"{micro_batches} micro-batches on {stages} stages; allowed by 1f1b: {stages} or more"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule not in _ONE_STAGE_A_RANK and micro_batches % rounds:
        raise StrategyError(
            f"{micro_batches} micro-batches on {ranks} ranks; allowed by {schedule}: a multiple of "
            f"the ranks, e.g. {micro_batches // ranks * ranks}"
        )


def make_schedule(
    schedule: ScheduleName, stages: Sequence[PipelineStage], micro_batches: int
) -> Schedule:
    """torch's schedule over the stages of this rank; the last stage returns its loss."""
    from torch.distributed import pipelining

    # scale_grads=False: torch would divide parameter.grad by the number of micro-batches, including
    # gradients that were accumulated there before. The last stage scales its loss instead.

    def loss_fn(loss: torch.Tensor, number: object) -> torch.Tensor:
        return loss

    local: Any = stages[0] if schedule in _ONE_STAGE_A_RANK else list(stages)
    made: Schedule = getattr(pipelining, _CLASSES[schedule])(
        local, micro_batches, loss_fn, scale_grads=False
    )
    return made


def ideal_bubble(
    schedule: ScheduleName,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int = 1,
    *,
    forward: float = 1.0,
    inputs: float = 1.0,
    weights: float = 1.0,
) -> float:
    """The bubble, the share of time in which a rank waits, if all stages take equally long and
    sends take no time. `measured_bubble` reads it off a trace.

    With p ranks, m micro-batches and v stages a rank, each rank computes m (f + b + w) in all. It
    waits (p - 1)(f + b + w) under GPipe and 1F1B, a v-th of that under interleaved 1F1B, and
    (p - 1)(f + b - w) / v under zero bubble (ZB-H1).

    Args:
        schedule: its name.
        ranks: p.
        micro_batches: m.
        stages_per_rank: v.
        forward: f, the time of a forward of all stages of a rank.
        inputs: b, of the part of backward for the inputs.
        weights: w, of the part of backward for the parameters.

    Raises:
        StrategyError: a number below 1.

    Example:
        >>> ideal_bubble("1f1b", ranks=2, micro_batches=3)
        0.25
        >>> ideal_bubble("interleaved_1f1b", ranks=2, micro_batches=3, stages_per_rank=2)
        0.14285714285714285
        >>> ideal_bubble("zero_bubble", ranks=2, micro_batches=3)
        0.1
    """
    if min(ranks, micro_batches, stages_per_rank) < 1:
        raise StrategyError(
            f"{ranks} ranks, {micro_batches} micro-batches and {stages_per_rank} stages a rank; "
            "allowed: 1 or more of each"
        )
    busy = forward + inputs + weights
    idle = (forward + inputs - weights) if schedule == "zero_bubble" else busy
    idle *= (ranks - 1) / (1 if schedule in _ONE_STAGE_A_RANK else stages_per_rank)
    return idle / (idle + micro_batches * busy)
