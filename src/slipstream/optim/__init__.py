"""Optimizers for large batches: LARS and LAMB scale each layer's step by the norm of its weights.

Many ranks make one large batch. At the learning rate that such a batch needs, plain SGD diverges in
layers whose gradients are large relative to their weights; a trust ratio ``|w| / |step|`` per layer
limits them.

    optimizer = Lamb(model.named_parameters(), lr=0.01)         # like Adam
    optimizer = Lars(model.named_parameters(), lr=8.0)          # like SGD with momentum

Both are plain ``torch.optim.Optimizer``: schedulers, ``state_dict``, ``GradScaler`` and
``slipstream.accelerate`` work as with torch's own. They need a linear warm-up; their docstrings
show one.
"""

from slipstream.optim.lamb import Lamb as Lamb
from slipstream.optim.lars import Lars as Lars
