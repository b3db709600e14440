"""Model parallelism: ``tensor`` splits layers over ranks, ``pipeline`` a model into stages.

``slipstream.accelerate`` applies both as a strategy says; here they are on their own, for other
training loops.
"""

from slipstream.analysis.stages import measured_bubble as measured_bubble
from slipstream.parallel.pipeline.balance import balance as balance
from slipstream.parallel.pipeline.pipeline import Pipeline as Pipeline
from slipstream.parallel.pipeline.schedules import ideal_bubble as ideal_bubble
from slipstream.parallel.tensor.loss import vocabulary_cross_entropy as vocabulary_cross_entropy
from slipstream.parallel.tensor.plans import known_plan as known_plan
from slipstream.parallel.tensor.split import (
    SplitLayers as SplitLayers,
    split_layers as split_layers,
)
