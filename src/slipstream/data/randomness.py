"""The random numbers of a rank: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

State = dict[str, Any]
"""What `state` finds, as data."""


def state() -> State:
    """The states of all generators that training draws from by default, as data."""
    version, numbers, gauss = random.getstate()
    found: State = {
        "torch": torch.get_rng_state(),
        "python": (version, list(numbers), gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, place, has_gauss, gauss = numpy.random.get_state()
        found["numpy"] = (name, torch.from_numpy(keys.astype("int64")), place, has_gauss, gauss)
    return found


def restore(saved: State) -> None:
    """Go on with the numbers of `state`."""
    torch.set_rng_state(saved["torch"])
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in saved:
        name, keys, *rest = saved["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
