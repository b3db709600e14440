"""One model on several ranks: ``tensor`` splits its layers, ``pipeline`` cuts its chain of layers.

``slipstream.accelerate`` does both as a strategy says; here they are alone, for other loops.
"""

from slipstream.analysis.stages import measured_bubble
from slipstream.parallel.pipeline.balance import balance
from slipstream.parallel.pipeline.bubble import ideal_bubble
from slipstream.parallel.pipeline.pipeline import Pipeline
from slipstream.parallel.tensor.loss import vocabulary_cross_entropy
from slipstream.parallel.tensor.plans import known_plan
from slipstream.parallel.tensor.split import SplitLayers, split_layers

__all__ = [
    "Pipeline",
    "SplitLayers",
    "balance",
    "ideal_bubble",
    "known_plan",
    "measured_bubble",
    "split_layers",
    "vocabulary_cross_entropy",
]
