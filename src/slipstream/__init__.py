"""slipstream: data-parallel training for PyTorch that is faster, and says why."""

__version__ = "0.1.0"
