"""Time of an update under 1F1B: stages in a row, micro-batches one after the other.

Source: Narayanan et al. 2021, Efficient large-scale language model training on GPU clusters.
"""

from __future__ import annotations

from collections.abc import Sequence


def one_f_one_b(
    stages: Sequence[float], micro_batches: int, send: float = 0.0, interleaved: int = 1
) -> float:
    """Compute the seconds from the first forward to the last backward.

    The slowest stage computes all micro-batches; the others once more, as the pipeline fills and
    empties. Exact for stages of equal time, and where the last one is the slowest.

    Args:
        stages: seconds that each takes for forward and backward of a micro-batch.
        micro_batches: of an update.
        send: seconds to the next stage, or back to the one before.
        interleaved: parts of the model that each stage has; the pipeline fills as many times as
            fast.

    Example:
        >>> one_f_one_b([3.0, 3.0, 3.0, 3.0], micro_batches=8)
        33.0
        >>> one_f_one_b([3.0, 3.0, 3.0, 3.0], micro_batches=8, interleaved=3)
        27.0
    """
    longest = max(stages)
    filling = (sum(stages) - longest) / interleaved + 2 * (len(stages) - 1) * send
    return micro_batches * longest + filling
