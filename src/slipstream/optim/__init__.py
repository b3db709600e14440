"""Optimizers for large batches: each layer's step is measured by the length of its weights.

Many ranks make one large batch. At the learning rate that such a batch needs, plain SGD throws over
the layers whose gradients are long beside their weights; a trust ratio ``|w| / |step|`` for each
layer holds them back.

    optimizer = Lamb(model.named_parameters(), lr=0.01)         # Adam's sibling
    optimizer = Lars(model.named_parameters(), lr=8.0)          # that of SGD with momentum

Both are plain ``torch.optim.Optimizer``: schedulers, ``state_dict``, ``GradScaler`` and
``slipstream.accelerate`` work as with torch's own. They want a linear warm-up; their docstrings
show one.
"""

from slipstream.optim.lamb import Lamb
from slipstream.optim.lars import Lars

__all__ = ["Lamb", "Lars"]
