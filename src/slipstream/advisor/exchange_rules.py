"""The advisor's rules about the exchange of gradients.

What another strategy would bring is what the planner predicts for it (``WhatIf``), and the strategy
that is advised is the one that the planner recommends. Each docstring says when the rule fires.
Source of the scenarios: Huawei, CANN TensorFlow tuning guide, gradient segmentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.advisor.exchanges import Exchanges
from slipstream.advisor.findings import Finding
from slipstream.advisor.trace_stats import TraceStats
from slipstream.advisor.what_if import WhatIf
from slipstream.analysis.time_unit import format_seconds
from slipstream.gradients.layout import plan_segments
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.search.ranking import Prediction
from slipstream.strategy import FlatConfig, Strategy, late_by

LATE = 0.25
"""Time in which gradients wait and no exchange runs, as a share of backward."""
EXPOSED = 0.5
"""Exposed exchange, as a share of compute."""
MAX_PASSES = 8
"""Backward passes an update that ``accumulate`` proposes at most."""
UNMEASURED: Mapping[str, CodecCost] = {"half": CodecCost(ratio=0.5)}
"""A codec that costs next to nothing, for networks on which none was measured."""


def exchange_otherwise(stats: TraceStats) -> Finding | None:
    """Another split, overlap or transport: all that keeps the mathematics.

    Fires when the strategy that the planner recommends gains enough. Gain: the predicted seconds of
    the strategy of the trace minus those of that one, and no more than the exposed exchange.
    """
    what_if, exchanges = stats.what_if, stats.exchanges
    if what_if is None or exchanges is None:
        return None
    base, best = what_if.base.strategy, what_if.best.strategy
    gain = min(what_if.saved(what_if.best), stats.exposed_exchange)
    if best == base or gain < stats.predictable:
        return None
    patch = _difference(base, best)
    first = next(name for name in ("transport", "overlap", "split") if name in patch)
    return Finding(
        stats.severity(gain),
        f"gradients.{first}",
        " ".join(_scenario(stats, exchanges, what_if.best)),
        f"{_in_words(what_if)}.",
        gain,
        {"gradients": patch},
    )


def send_less(stats: TraceStats) -> Finding | None:
    """A codec, where exchanges take longer than compute, so that nothing exact can hide them.

    Fires when the codec that is predicted fastest, of those measured, gains enough. Gain: as
    predicted, once the codec is at work. Only a note: a codec is another training recipe.
    """
    what_if, exchanges = stats.what_if, stats.exchanges
    if what_if is None or exchanges is None or exchanges.busy <= stats.compute:
        return None
    base, forecast = what_if.base.strategy, what_if.forecast
    if base.gradients.codec is not None:
        return None
    costs = forecast.network.codecs or UNMEASURED
    ranked = forecast.with_codecs(costs).coded()
    if not ranked or not ranked[0].is_faster:
        return None
    gain = min(what_if.saved(ranked[0]), stats.exposed_exchange)
    if gain < stats.predictable:
        return None
    codec = ranked[0].strategy.gradients.codec
    assert codec is not None
    late = late_by(codec)
    words = [f"Send {costs[codec.kind].ratio:.1%} of the bytes: codec {codec.kind}"]
    words += [f", which begins with update {late}"] if late else []
    words += [", whose cost was not measured here"] if costs is UNMEASURED else []
    saved = {one.strategy.gradients.codec: what_if.saved(one) for one in ranked}
    each = ", ".join(f"{c.kind} {format_seconds(s)}" for c, s in saved.items() if c and s > 0)
    return Finding(
        "note",
        "gradients.codec",
        f"The network is busy for {format_seconds(exchanges.busy)}, compute takes "
        f"{format_seconds(stats.compute)}: nothing exact can hide all of it. Codecs would save: "
        f"{each}.",
        f"{''.join(words)}. This changes the gradients: compare the loss.",
        gain,
        {"gradients": {"codec": codec.kind}},
    )


def accumulate(stats: TraceStats) -> Finding | None:
    """Fires when exposed exchanges take more than half of compute, even at the best strategy.

    Proposes the fewest of 2, 4, 8 passes after which they take no more than half of the compute of
    a window, else 8. Gain: as predicted, for as many batches as an iteration has now, and no more
    than the exposed exchange. Only a note: a larger batch is another training recipe.
    """
    what_if = stats.what_if
    if what_if is None or not stats.compute:
        return None
    exposed = min(what_if.exposed, stats.exposed_exchange)
    if exposed <= EXPOSED * stats.compute:
        return None
    enough = (n for n in (2, 4) if exposed <= EXPOSED * n * stats.compute)
    passes, base = next(enough, MAX_PASSES), what_if.base.strategy
    total = passes * base.gradients.accumulate
    own = stats.framework.own_settings.get("gradients.accumulate")
    rarely = f"once in {total} backward passes"
    if own is not None:  # of which the trace does not tell how many there are now
        rarely = f"{passes} times as rarely, by {own} of {stats.framework.name}"
    return Finding(
        "note",
        "gradients.accumulate",
        f"Exposed exchanges take {format_seconds(exposed)} at the best strategy, compute "
        f"{format_seconds(stats.compute)}.",
        f"Exchange {rarely}, if the training allows it. This changes the recipe: the batch of an "
        f"update is {passes} times as large, there are {passes} times fewer updates, and learning "
        "rate and warm-up need new values.",
        min(max(what_if.gain(base.with_gradients(accumulate=total)), 0.0), exposed),
        {"gradients": {"accumulate": total}} if own is None else {},
    )


def _difference(base: Strategy, best: Strategy) -> dict[str, Any]:
    """The settings under ``gradients`` in which two strategies differ."""
    ours, theirs = (one.document(full=True)["gradients"] for one in (base, best))
    return {name: value for name, value in theirs.items() if value != ours[name]}


def _scenario(stats: TraceStats, exchanges: Exchanges, best: Prediction) -> Iterator[str]:
    """Name the fault of the exchange that the best one avoids."""
    tail, count = format_seconds(exchanges.tail), len(exchanges.cuts)
    first = _first_exposed(stats, exchanges)
    if not stats.overlap:
        yield f"Overlap is off: exchanges take {tail} after backward."
    elif best.segments > count:
        more = f"No split makes {_segments(count)} as good as {best.segments}."
        yield f"Exchanges continue for {tail} after backward. {more}"
    elif best.segments < count:
        busy = format_seconds(exchanges.busy)
        yield f"{_segments(count)} keep the network busy for {busy}; each pays its startup."
    elif first is not None:
        late = format_seconds(exchanges.spans[first][1] - exchanges.backward)
        yield f"Exchange {first + 1} of {count} ends {late} after backward, the last one {tail}."
    else:
        size = f"{exchanges.num_bytes[-1] / 1e6:.2f} MB"
        yield f"The last exchange, of {size}, continues for {tail} after backward."
    if stats.overlap and exchanges.idle > LATE * exchanges.backward:
        yield (
            f"In {format_seconds(exchanges.idle)} of the {format_seconds(exchanges.backward)} of "
            "backward, gradients wait for their segment to fill while no exchange runs."
        )


def _first_exposed(stats: TraceStats, exchanges: Exchanges) -> int | None:
    """The first exchange before the last that ends after backward, beyond the clocks' error."""
    ends = [end - exchanges.backward for _, end in exchanges.spans[:-1]]
    late = [index for index, end in enumerate(ends) if end > 0]
    return late[0] if late and max(ends) > stats.clock_error else None


def _in_words(what_if: WhatIf) -> str:
    """The best strategy, with the sizes of its segments."""
    gradients, settings = what_if.forecast.workload.gradients, what_if.best.strategy.gradients
    segments = plan_segments(gradients, settings.split)
    sizes = [sum(g.num_bytes for g in gradients[one.start : one.stop]) / 1e6 for one in segments]
    shown = ", ".join(f"{size:.2f}" for size in sizes[:8]) + (" ..." if len(sizes) > 8 else "")
    when = "during" if settings.overlap else "after"
    words = f"Exchange {when} backward, in {_segments(len(sizes))} of {shown} MB"
    if settings.transport != FlatConfig():
        words += f", by transport {settings.transport.kind}"
    return words


def _segments(count: int) -> str:
    return "1 segment" if count == 1 else f"{count} segments"
