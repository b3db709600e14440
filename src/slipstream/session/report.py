"""Rows of the report that need more than one room."""

from __future__ import annotations

from slipstream.calibration.adaptive_codec import CodecDecision
from slipstream.gradients.interface import GradientEngine
from slipstream.strategy import CodecConfig, Row
from slipstream.transport.hosts import Rails


def adaptive_rows(decision: CodecDecision, engine: GradientEngine) -> list[Row]:
    """Report how many segments ``codec: adaptive`` encodes, and the seconds that this saves."""
    saved = [decision.saved(segment.num_bytes) for segment in engine.segments]
    encoded = [seconds for seconds in saved if seconds > 0]
    value = f"{len(encoded)} of {len(saved)} segments"
    if not encoded:
        return [Row("adaptive", value, "coding costs more than it saves")]
    note = f"saves {sum(encoded):.3f} s of network and computing an update, as measured"
    return [Row("adaptive", value, note)]


def hosts_rows(rails: Rails | None, codec: CodecConfig | None) -> list[Row]:
    """The hosts that a hierarchical transport found, and what a codec has to do between them."""
    if rails is None:
        return []
    num_ranks = len({rank for members in rails.members for rank in members})
    value = f"{num_ranks} ranks on {rails.num_hosts} host{'s' * (rails.num_hosts > 1)}"
    note = ""
    if codec is not None:
        note = f"codec {codec.kind} compresses what travels between them alone"
        if rails.num_hosts == 1:
            note = f"nothing travels between hosts: codec {codec.kind} is off"
    return [Row("hosts", value, note)]
