"""The advisor's rules about data, ranks, optimizer and the trace itself.

A rule maps ``TraceStats`` to a ``Finding`` or None. Each docstring says when the rule fires and how
it computes the gain.
"""

from __future__ import annotations

from typing import Any

from slipstream.advisor.exchanges import Exchanges
from slipstream.advisor.findings import Finding
from slipstream.advisor.trace_stats import TraceStats
from slipstream.analysis.stragglers import Straggler
from slipstream.analysis.time_unit import format_seconds

DATA_WAIT = 0.1
"""Wait for data, as a share of an iteration."""
SKEW = 0.05
"""Time between the first and the last rank having all gradients, as a share of an iteration."""
WAITING = 0.1
"""Exposed exchange under FSDP2, as a share of an iteration."""
OPTIMIZER_HEAVY = 0.1
"""Optimizer, as a share of an iteration."""
OUTSIDE = 0.1
"""Time in which nothing recorded runs, as a share of an iteration."""
CLOCK_ERROR = 0.01
"""Clock error, as a share of an iteration."""


def feed_faster(stats: TraceStats) -> Finding | None:
    """Fires when the wait for data takes more than a tenth of an iteration.

    Gain: the whole wait where the training reads its batches itself; what twice as many workers or
    threads would save where they cannot keep up; both simulated, but for one rank. 0 where batches
    are there, as handing them over takes the time.
    """
    wait = stats.typical.spread("data_wait")
    if wait.mean <= DATA_WAIT * stats.iteration:
        return None
    evidence = (
        f"The model waits {format_seconds(wait.mean)} for the loader, "
        f"{stats.share(wait.mean)}; {format_seconds(wait.high)} on rank {wait.slowest}."
    )
    work = None if stats.what_if is None else stats.what_if.forecast.workload
    patch: dict[str, Any] = {}
    queue = stats.queue
    if queue is None:
        gain = wait.mean if work is None else stats.gain_of(work.fed())
        words = (
            "Load with more worker processes that stay alive (num_workers, persistent_workers), or "
            "do less work for each sample: decode and resize the data once, in advance."
        )
        if stats.prefetchable:
            patch = {"prefetch": {}}
            words = (
                "Read batches ahead, by workers that stay from epoch to epoch: data.prefetch. "
                "Where the cores cannot keep up, do less work for each sample: decode and resize "
                "the data once, in advance, or keep it (data.cache)."
            )
    elif queue.ready:
        evidence += f" {queue.ready:g} batches are there when it asks for one."
        gain = 0.0
        words = (
            "Handing batches over takes the time: read in threads (data.prefetch.threads), or hand "
            "over less: integers instead of floats, converted by the model."
        )
    else:
        readers = 2 * queue.readers
        several = f"{queue.readers} readers do" if queue.readers > 1 else "reader does"
        evidence += f" Its {several} not keep up with it."
        gain = min(wait.mean, stats.iteration / 2)
        gain = gain if work is None else stats.gain_of(work.fed(times=2))
        patch = {"prefetch": {"workers": readers}} if stats.resizable else {}
        setting = "data.prefetch.workers" if stats.resizable else "the loader's num_workers"
        words = (
            f"Read with {readers} workers or threads: set {setting}. Where the cores cannot keep "
            "up, do less work for each sample: decode and resize the data once, in advance, or "
            "keep it (data.cache)."
        )
    return Finding(
        stats.severity(gain), "data", evidence, words, gain, {"data": patch} if patch else {}
    )


def even_ranks(stats: TraceStats) -> Finding | None:
    """Fires when ranks wait more than 5 % of an iteration for the last one's gradients; where
    these are not exchanged at once, as under FSDP2 and ``local``, when a rank is slower by as much.

    Gain: what the worst straggler takes longer than the median of the others; if no rank is
    persistently slow, what the simulator saves where all ranks compute for the average time;
    unknown if ranks have the same work and wait for cores that they share. Where a rank is last
    in most steps by more than any is slower in what is recorded, by how much it is.
    """
    exchanges = stats.exchanges
    if exchanges is None:
        slow = [one for one in stats.stragglers if one.seconds > SKEW * stats.iteration]
        return _slow_rank(stats, slow[0]) if slow else None
    if exchanges.skew <= max(SKEW * stats.iteration, stats.clock_error):
        return None
    evidence = (
        f"The first rank waits {format_seconds(exchanges.skew)} for the last one's gradients, "
        f"{stats.share(exchanges.skew)}"
    )
    if (last := _unexplained(stats, exchanges)) is not None:
        return _find_out(stats, last, exchanges.late[last], evidence)
    if not stats.stragglers and stats.waiting_for_cores:
        return _share_cores(stats.waiting_for_cores[0], evidence)
    if not stats.stragglers:
        gain = exchanges.lag
        if stats.what_if is not None:
            gain = stats.gain_of(stats.what_if.forecast.workload.evened())
        words = (
            "Give all ranks equal work in each step: equal batches, samples of varying length "
            "distributed by their cost. Ranks that share a host need cores of their own."
        )
        if stats.balanceable:
            words = (
                "Deal samples by their lengths: data.balance; say there whether batches are padded "
                "and what your loss is a mean of. Ranks that share a host need cores of their own."
            )
        return Finding(
            stats.severity(gain),
            "ranks",
            f"{evidence}; which rank is last changes. If each step ended with the slowest, ranks "
            f"would wait for {stats.idle:.1%} of forward and backward.",
            words,
            gain,
            {"data": {"balance": {}}} if stats.balanceable else {},
        )
    return _slow_rank(stats, stats.stragglers[0], f"{evidence}. ")


def _slow_rank(stats: TraceStats, worst: Straggler, evidence: str = "") -> Finding:
    phase = worst.phase.replace("_", " ")
    less = " If it stays slow, give it less to do: data.balance with speeds: measured."
    # FSDP2, ``local`` and frameworks refuse it
    less = "" if stats.exchanges is None or stats.framework.name else less
    return Finding(
        stats.severity(worst.seconds),
        f"rank {worst.rank}, {phase}",
        f"{evidence}Rank {worst.rank} takes {format_seconds(worst.usual + worst.seconds)} for "
        f"{phase}, the others {format_seconds(worst.usual)}, in {worst.iterations} of {worst.of} "
        "steps.",
        "Give this rank the same batch as the others, and check its host for other processes, "
        f"fewer cores, a throttled or slower processor, a slower disk.{less}",
        worst.seconds,
    )


def _unexplained(stats: TraceStats, exchanges: Exchanges) -> int | None:
    """Find a rank that is late in most steps, by twice as much as what is recorded explains."""
    if not exchanges.late:
        return None
    last = max(exchanges.late, key=lambda rank: exchanges.late[rank])
    slower = (*stats.stragglers, *stats.waiting_for_cores)
    known = sum(one.seconds for one in slower if one.rank == last)
    least = max(SKEW * stats.iteration, stats.clock_error, 2 * known)
    return last if exchanges.late[last] > least else None


def _find_out(stats: TraceStats, rank: int, late: float, evidence: str) -> Finding:
    return Finding(
        stats.severity(late),
        f"rank {rank}",
        f"{evidence}. Rank {rank} is the last, by {format_seconds(late)}, in most "
        "steps, and its data wait, forward, backward and optimizer do not explain that.",
        "See what the script does on this rank between the loader, backward() and step(): reading "
        "or preparing batches by itself, logging, checkpoints, metrics. Check its host, too.",
        late,
    )


def _share_cores(slow: Straggler, evidence: str) -> Finding:
    return Finding(
        "warning",
        "cores",
        f"{evidence}. Rank {slow.rank} takes {format_seconds(slow.usual + slow.seconds)} for "
        f"{slow.phase.replace('_', ' ')}, the others {format_seconds(slow.usual)}, but no more CPU "
        "time than ranks of its host: their work is equal, and it waits for cores.",
        "Give each rank cores of its own, and leave some to the exchange: fewer threads or ranks "
        "on a host, no other programs there. No rank is slow, and dealing work anew helps nothing.",
    )


def look_outside(stats: TraceStats) -> Finding | None:
    """Fires when nothing recorded runs for more than a tenth of an iteration. Gain: unknown."""
    other = stats.typical.spread("other")
    if other.mean <= OUTSIDE * stats.iteration:
        return None
    batches = (
        "batches that it reads by itself (give the loader to accelerate(), and the wait for it "
    )
    batches += "is recorded)"
    if stats.fully_shard or stats.framework.name:
        batches = "the wait for batches, which is not recorded here"
    return Finding(
        "warning",
        "script",
        f"Nothing that is recorded runs for {format_seconds(other.mean)}, "
        f"{stats.share(other.mean)}; {format_seconds(other.high)} on rank {other.slowest}.",
        f"See what the script does between the loader, backward() and step(): {batches}, copies, "
        "clipping, metrics, logging, evaluation. Coding by a codec counts, too, and in short "
        "iterations what slipstream does for itself.",
    )


def gather_less(stats: TraceStats) -> Finding | None:
    """Fires where FSDP2 waits for its collectives for a tenth of an iteration. Gain: unknown."""
    exposed = stats.typical_seconds("exposed")
    if not stats.fully_shard or exposed < WAITING * stats.iteration:
        return None
    return Finding(
        "warning",
        "fully_shard",
        f"FSDP2 waits for its collectives for {format_seconds(exposed)}, {stats.share(exposed)}.",
        "Gather once an update, where memory allows: reshard_after_forward=False. Send less: "
        "gradients.codec half or int8 for gradients, MixedPrecisionPolicy(param_dtype="
        "torch.bfloat16) for parameters; both change the training: compare the loss. Where a rank "
        "has room for the whole model, accelerate() gathers nothing.",
    )


def lighten_optimizer(stats: TraceStats) -> Finding | None:
    """Fires when the optimizer takes more than a tenth of an iteration. Gain: unknown."""
    seconds = stats.typical_seconds("optimizer")
    if seconds <= OPTIMIZER_HEAVY * stats.iteration:
        return None
    parameters = f" for {stats.num_gradients} parameters" if stats.num_gradients else ""
    return Finding(
        "warning",
        "optimizer",
        f"The optimizer takes {format_seconds(seconds)}{parameters}, {stats.share(seconds)}.",
        "Update all parameters in one call: fused=True (or foreach=True), where the optimizer "
        "supports it.",
    )


def distrust_clocks(stats: TraceStats) -> Finding | None:
    """Fires when the clocks of two ranks may be off by more than 1 % of an iteration."""
    if stats.clock_error <= CLOCK_ERROR * stats.iteration:
        return None
    return Finding(
        "warning",
        "clocks",
        f"Times of two ranks may be off by {format_seconds(stats.clock_error)}, "
        f"{stats.share(stats.clock_error)}.",
        "Do not trust comparisons of ranks: skew, stragglers, and when the last rank is ready. "
        "Record again while the network is otherwise idle.",
    )


def miss_steps(stats: TraceStats) -> Finding | None:
    """Fires when ranks recorded fewer steps than others, or none."""
    missing = stats.missing_steps
    if not missing:
        return None
    more = f", and {len(missing) - 3} more ranks" if len(missing) > 3 else ""
    return Finding(
        "problem",
        "trace",
        f"Ranks are missing: {', '.join(missing[:3])}{more}.",
        "All other findings use the steps that every rank recorded. See the logs of these ranks "
        "for why they stopped, and record again.",
    )


def miss_sizes(stats: TraceStats) -> Finding | None:
    """Fires when nothing can be predicted from the trace, so that no exchange can be advised."""
    if not stats.unpredicted:
        return None
    return Finding(
        "note",
        "trace",
        f"Nothing is predicted from this trace: {stats.unpredicted}.",
        "Record again to get advice about the exchange.",
    )
