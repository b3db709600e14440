"""What a strategy has come to in a session: for people as rows of a table, for traces as values.

Never changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from slipstream.calibration.adaptive_codec import CodecDecision
from slipstream.gradients.engine import Engine
from slipstream.gradients.layout import Gradient
from slipstream.gradients.segments import SegmentStats, gradients_of, parameters_of
from slipstream.strategy import Row, Strategy
from slipstream.tuner.online_split import OnlineSplit

_SHOWN = 12  # sizes of segments


def rows(
    engine: Engine | None,
    segments: Sequence[SegmentStats],
    online_split: OnlineSplit | None,
    verdict: CodecDecision | None = None,
    skipped: int = 0,
) -> list[Row]:
    """What became of the gradients; no engine and no segments: there was one process."""
    if engine is None and not segments:
        return [Row("exchange", "none", "one process: there is nobody to exchange with")]
    if not segments:
        return [Row("segments", "not yet", "laid out after the first backward")]
    gradients = sum(len(s.gradients) for s in segments)
    collectives = sum(s.num_collectives for s in segments)
    megabytes = sum(s.num_bytes for s in segments) / 2**20
    sizes = ", ".join(f"{s.num_bytes / 2**20:.1f}" for s in segments[:_SHOWN])
    more = " ..." if len(segments) > _SHOWN else ""
    found = [
        Row("fused", f"{gradients} gradients -> {collectives} all-reduces", "in ready order"),
        Row("segments", f"{megabytes:.1f} MB in {len(segments)}", f"MB: {sizes}{more}"),
    ]
    if online_split is not None:
        found.insert(0, Row("optimal", online_split.outcome, "split computed and measured"))
    wire = sum(s.wire_bytes for s in segments)
    if wire * 2**-20 != megabytes or verdict is not None:
        found.append(_codec_row(segments, engine))
    if verdict is not None:
        found.append(_adaptive_row(segments, verdict))
    if skipped:
        found.append(Row("skipped", f"{skipped} updates", "gradients were infinite or NaN"))
    return found


def _codec_row(segments: Sequence[SegmentStats], engine: Engine | None) -> Row:
    """Bytes before and after, and what is kept for it: before and after an update that may fail."""
    before, after = sum(s.num_bytes for s in segments), sum(s.wire_bytes for s in segments)
    kept = engine.codec_state() if engine else {}
    memory = sum(t.nbytes for state in kept.values() for t in state.values())
    return Row(
        "codec",
        f"{before / 2**20:.1f} MB -> {after / 2**20:.2f} MB on the wire",
        f"{before / max(after, 1):.1f} times fewer; keeps 2 x {memory / 2**20:.1f} MB a rank",
        "lossy",
    )


def _adaptive_row(segments: Sequence[SegmentStats], verdict: CodecDecision) -> Row:
    """How many segments are coded, and what that is expected to save."""
    saved = [verdict.saved(s.num_bytes) for s in segments]
    coded = [seconds for seconds in saved if seconds > 0]
    if not coded:
        return Row("adaptive", f"0 of {len(segments)} segments", "coding costs more than it saves")
    note = f"saves {sum(coded):.3f} s of network and computing an update, as measured"
    return Row("adaptive", f"{len(coded)} of {len(segments)} segments", note)


def trace_meta(
    model: nn.Module, strategy: Strategy, engine: Engine | None, segments: Sequence[SegmentStats]
) -> dict[str, Any]:
    """What a trace says of the session: model, strategy, segments and gradients."""
    trainables = parameters_of(model, trainable=True)[::-1]
    gradients: Sequence[Gradient] = gradients_of(trainables, [0] * len(trainables))
    document = strategy.document(full=True)
    if engine is not None and engine.order is not None:
        gradients = engine.gradients
        document["gradients"]["split"] = engine.split.document(full=True)
    return {
        "model": type(model).__name__,
        "strategy": document,
        "segments": [{"bytes": s.num_bytes, "gradients": list(s.gradients)} for s in segments],
        "gradients": [
            {"name": g.name, "layer": g.layer, "bytes": g.num_bytes, "dtype": g.dtype}
            for g in gradients
        ],
    }
