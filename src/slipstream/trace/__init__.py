"""Records what happens in an iteration on every rank, on one clock, and stores it in a file.

Does not import torch: only ``slipstream.trace.recorder`` needs it, and is not imported here.
"""

from slipstream.trace.chrome import read, write
from slipstream.trace.event import Event, Mark, Trace, marks

__all__ = ["Event", "Mark", "Trace", "marks", "read", "write"]
