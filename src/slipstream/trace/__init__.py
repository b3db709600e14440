"""Records what happens in an iteration on every rank, on one clock, and stores it in a file.

Does not import torch: only ``slipstream.trace.recorder`` needs it, and is not imported here.
"""

from slipstream.trace.chrome import read as read, write as write
from slipstream.trace.event import Event as Event, Mark as Mark, Trace as Trace, marks as marks
