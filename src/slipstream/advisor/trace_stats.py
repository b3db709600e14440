"""What the advisor's rules look at: the typical iteration of all ranks, drawn from a trace.

Never judges: ``rules`` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.advisor.exchanges import Exchanges, Step, exchanges, layout_of
from slipstream.advisor.findings import Severity
from slipstream.advisor.splits import Cost
from slipstream.analysis.breakdown import Typical, typical
from slipstream.analysis.stragglers import Straggler, stragglers
from slipstream.errors import TraceError
from slipstream.trace.event import Trace
from slipstream.trace.timeline import Iteration, timeline

WORTHWHILE = 0.01
"""The share of an iteration that advice must promise."""
GRAVE = 0.1
"""The share of an iteration at stake that makes a problem of a warning."""


@dataclass(frozen=True, slots=True)
class TraceStats:
    """What is known of a run.

    Attributes:
        typical: the parts of the iteration.
        stragglers: ranks that are slower than the others.
        exchanges: None where nothing was exchanged.
        overlap: whether exchanges may run during backward.
        accumulate: backward passes of one update.
        num_gradients: 0 where it is not known.
        clock_error: the most by which times of two ranks may be off, in seconds.
        worthwhile: the least gain that is worth an advice, in seconds: 1 % of an iteration, and no
            less than the clocks' error.
        lacking: in words, which ranks recorded fewer steps than others, or none.
    """

    typical: Typical
    stragglers: tuple[Straggler, ...]
    exchanges: Exchanges | None
    overlap: bool
    accumulate: int
    num_gradients: int
    clock_error: float
    worthwhile: float
    lacking: tuple[str, ...]

    def median(self, part: str) -> float:
        """Median over ranks of a part of the iteration, a field of ``Parts``."""
        return self.typical.spread(part).median

    @property
    def iteration(self) -> float:
        """Seconds of an iteration."""
        return self.median("iteration")

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return self.median("forward") + self.median("backward")

    def severity(self, gain: float) -> Severity:
        """How grave a finding with this gain is: a problem at a tenth of an iteration."""
        return "problem" if gain >= GRAVE * self.iteration else "warning"

    def share(self, seconds: float) -> str:
        """Seconds as a share of the iteration, in words."""
        return f"{seconds / self.iteration if self.iteration else 0:.1%} of an iteration"


def facts(trace: Trace, seconds_of: Cost | None = None) -> TraceStats:
    """Draw the facts from a trace.

    Raises:
        TraceError: there is no iteration, none that all ranks recorded, or ranks disagree about
            the segments.
    """
    meta = trace.meta
    steps, lacking = _common_steps(timeline(trace.events), meta)
    iterations = [iteration for step in steps for iteration in step.values()]
    middle = typical(iterations)
    clock_error = max(meta.get("clock_error") or [0.0])
    worthwhile = max(WORTHWHILE * middle.spread("iteration").median, clock_error)
    sizes, settings = _sizes(meta), _settings(meta)
    return TraceStats(
        typical=middle,
        stragglers=stragglers(iterations, clock_error),
        exchanges=exchanges(steps, sizes, seconds_of, worthwhile),
        overlap=settings.get("overlap", True),
        accumulate=settings.get("accumulate", 1),
        num_gradients=len(sizes),
        clock_error=clock_error,
        worthwhile=worthwhile,
        lacking=lacking,
    )


def _sizes(meta: Mapping[str, Any]) -> list[int]:
    """Bytes of each gradient in ready order."""
    try:
        return [int(gradient["bytes"]) for gradient in meta.get("gradients") or ()]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"the trace's list of gradients cannot be read ({error!r:.80}): each has a name, "
            "layer, bytes and dtype. Record it again."
        ) from error


def _settings(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """The strategy's part about gradients."""
    found: Any = meta
    for name in ("strategy", "gradients"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _common_steps(
    iterations: Iterable[Iteration], meta: Mapping[str, Any]
) -> tuple[list[Step], tuple[str, ...]]:
    """The steps that all ranks recorded, with the last one's layout; and what ranks lack."""
    by_step: dict[int, dict[int, Iteration]] = defaultdict(dict)
    for iteration in iterations:
        by_step[iteration.step][iteration.rank] = iteration
    ranks = {rank for step in by_step.values() for rank in step}
    # A prediction holds the events of some ranks only; of a recording each rank must be there.
    expected = ranks if meta.get("predicted") else ranks | set(range(meta.get("world_size", 0)))
    counts = {rank: sum(rank in step for step in by_step.values()) for rank in sorted(expected)}
    lacking = tuple(
        f"rank {rank} has {count} of {len(by_step)} steps"
        for rank, count in counts.items()
        if count < len(by_step)
    )
    common = [by_step[step] for step in sorted(by_step) if by_step[step].keys() == ranks]
    if not common:
        raise TraceError(
            f"no step was recorded by every rank ({'; '.join(lacking)}), so ranks cannot be "
            "compared. Give the trace of one run, or record it again."
        )
    layouts = [layout_of(step) for step in common]
    same: list[Step] = [s for s, own in zip(common, layouts, strict=True) if own == layouts[-1]]
    return same, lacking
