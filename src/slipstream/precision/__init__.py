"""16-bit training: autocast, half weights with fp32 masters, and the loss scale.

Both wrap any module from outside and can be removed:

    from slipstream.precision import half_weights  # or autocast

    half = half_weights(model, optimizer, "bf16")
    ...                                            # the training loop stays as it is
    half.close()
"""

from slipstream.precision.autocast import Autocast as Autocast, autocast as autocast
from slipstream.precision.half_weights import (
    HalfWeights as HalfWeights,
    half_weights as half_weights,
)
