"""The engine's rows of the report: gradients, segments and their bytes. Never communicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.gradients.segments import SegmentStats
from slipstream.strategy import Row

_SHOWN = 12  # sizes of segments


def exchange_rows(
    segments: Sequence[SegmentStats], kept_bytes: Callable[[], int], next_phase: int | None = None
) -> list[Row]:
    """Report what is exchanged in an update now.

    Args:
        segments: what they carry.
        kept_bytes: of the codecs on this rank.
        next_phase: the update from which on a codec works in another way; None: it stays so.
    """
    if not segments:
        return [Row("segments", "not yet", "laid out after the first backward")]
    gradients = sum(len(s.gradients) for s in segments)
    collectives = sum(s.num_collectives for s in segments)
    num_bytes, wire_bytes = sum(s.num_bytes for s in segments), sum(s.wire_bytes for s in segments)
    sizes = ", ".join(megabytes(s.num_bytes) for s in segments[:_SHOWN])
    more = " ..." if len(segments) > _SHOWN else ""
    plural = "s" * (collectives != 1)
    rows = [
        Row("fused", f"{gradients} gradients -> {collectives} exchange{plural}", "in ready order"),
        Row("segments", f"{megabytes(num_bytes)} MB in {len(segments)}", f"MB: {sizes}{more}"),
    ]
    until = "" if next_phase is None else f" until update {next_phase}"
    if wire_bytes == num_bytes and next_phase is not None:
        rows.append(Row("codec", f"not yet: dense{until}", "early gradients change fast", "lossy"))
    elif wire_bytes != num_bytes:
        note = (  # twice: codecs keep the state before and after an update that may be skipped
            f"{num_bytes / max(wire_bytes, 1):.1f} times fewer; "
            f"keeps 2 x {megabytes(kept_bytes())} MB a rank"
        )
        value = f"{megabytes(num_bytes)} MB -> {megabytes(wire_bytes)} MB on the wire{until}"
        rows.append(Row("codec", value, note, "lossy"))
    return rows


def megabytes(num_bytes: int) -> str:
    """A size in units of 2**20 bytes, with more digits below one of them.

    Example:
        >>> megabytes(25 * 2**20), megabytes(19_482), megabytes(0)
        ('25.0', '0.019', '0.000')
    """
    size = num_bytes / 2**20
    return f"{size:.1f}" if size >= 1 else f"{size:.3f}"
