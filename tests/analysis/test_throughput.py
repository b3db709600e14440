"""Speed and efficiency: known by hand, and refused if a trace lacks its samples."""

from __future__ import annotations

import pytest

from slipstream.analysis.breakdown import typical_iteration
from slipstream.analysis.throughput import (
    compute_share,
    iterations_per_second,
    samples_per_second,
    scaling_efficiency,
)
from slipstream.errors import TraceError
from slipstream.trace.event import Event
from slipstream.trace.timeline import Iteration, timeline
from tests.harness.training import Training


def _steps(ranks: int, seconds: tuple[float, ...], samples: int | None = 8) -> list[Iteration]:
    args = {} if samples is None else {"samples": samples}
    return timeline(
        Event("iteration", rank, step, 0.0, took, args)
        for rank in range(ranks)
        for step, took in enumerate(seconds)
    )


def test_rates_are_medians_of_iterations_summed_over_ranks():
    assert samples_per_second(_steps(3, (0.5, 0.5, 9.0))) == pytest.approx(48)
    assert iterations_per_second(_steps(3, (0.5, 0.5, 9.0))) == pytest.approx(6)


def test_one_step_without_its_samples_makes_the_rate_unknown():
    known, unknown = _steps(2, (0.5, 0.5)), _steps(2, (0.5, 0.5, 0.5), samples=None)[-2:]
    assert samples_per_second([*known, *unknown]) is None


def test_a_rank_without_a_batch_trains_on_no_samples():
    """The ranks of a loader that is uneven compute dummy batches at its end."""
    steps = _steps(2, (0.5, 0.5, 0.5))
    ended = [one._replace(samples=0) if (one.rank, one.step) == (1, 2) else one for one in steps]
    assert samples_per_second(ended) == pytest.approx(32)


def test_the_efficiency_of_a_linear_speed_up_is_one():
    assert scaling_efficiency(_steps(4, (0.5,)), _steps(1, (0.5,))) == pytest.approx(1)
    assert scaling_efficiency(_steps(4, (1.0,)), _steps(1, (0.5,))) == pytest.approx(0.5)
    # The same batch dealt out to 4 ranks: a quarter of the time is linear.
    assert scaling_efficiency(_steps(4, (0.25,), 2), _steps(1, (1.0,))) == pytest.approx(1)


@pytest.mark.parametrize(
    ("many", "one", "reason"),
    [
        (_steps(4, (0.5,)), _steps(2, (0.5,)), "the baseline has 2 ranks; allowed: 1"),
        (_steps(4, (0.5,), None), _steps(1, (0.5,)), "the trace does not hold"),
        (_steps(4, (0.5,)), _steps(1, (0.5,), 0), "the baseline does not hold"),
    ],
)
def test_no_efficiency_without_a_base(many, one, reason):
    with pytest.raises(TraceError, match=reason):
        scaling_efficiency(many, one)


def test_compute_is_forward_backward_and_optimizer():
    middle = typical_iteration(timeline(Training().trace.events))
    assert compute_share(middle) == pytest.approx((50 + 100 + 10) / 210)
    assert compute_share(typical_iteration(_steps(1, (0.0,)))) == 0
