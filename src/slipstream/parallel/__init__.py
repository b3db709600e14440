"""A model over several ranks: layers split over tensor ranks, a chain of layers cut into stages."""

from slipstream.parallel.balance import balance
from slipstream.parallel.bubble import ideal_bubble, measured_bubble
from slipstream.parallel.pipeline import Pipeline

__all__ = ["Pipeline", "balance", "ideal_bubble", "measured_bubble"]
