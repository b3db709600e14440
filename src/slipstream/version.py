"""The version of slipstream."""

__version__ = "0.1.0"
