"""What happened in an iteration, on every rank, on one clock: events, their file, their numbers.

Never imports torch; only ``slipstream.trace.recorder``, which is not imported here, does.
"""

from slipstream.trace.chrome import read, write
from slipstream.trace.event import Event, Mark, Trace, marks

__all__ = ["Event", "Mark", "Trace", "marks", "read", "write"]
