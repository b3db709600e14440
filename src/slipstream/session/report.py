"""Rows of the report that need more than one room."""

from __future__ import annotations

from slipstream.calibration.adaptive_codec import CodecDecision
from slipstream.gradients.interface import GradientEngine
from slipstream.strategy import Row


def adaptive_rows(decision: CodecDecision, engine: GradientEngine) -> list[Row]:
    """How many segments ``codec: adaptive`` encodes, and the seconds that this saves."""
    saved = [decision.saved(segment.num_bytes) for segment in engine.segments]
    encoded = [seconds for seconds in saved if seconds > 0]
    value = f"{len(encoded)} of {len(saved)} segments"
    if not encoded:
        return [Row("adaptive", value, "coding costs more than it saves")]
    note = f"saves {sum(encoded):.3f} s of network and computing an update, as measured"
    return [Row("adaptive", value, note)]
