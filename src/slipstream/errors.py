"""Every error that slipstream raises on purpose; messages name the value seen and the fix.

    SlipstreamError
    |-- StrategyError   (ValueError)    a strategy that cannot be built, or does not fit this model
    |-- ModelError      (ValueError)    a model, optimizer or loader that cannot be accelerated
    |-- TraceError      (ValueError)    a trace that cannot be read or is empty
    |-- UsageError      (RuntimeError)  a method of the session called in the wrong order
    |-- ClusterError    (RuntimeError)  the environment does not describe a usable set of ranks
    |-- MismatchError   (RuntimeError)  ranks disagree about the model or the strategy
    |-- CommError       (ValueError)    an operator of comm got invalid arguments
    |-- ExchangeError   (RuntimeError)  an exchange failed: names rank, step, segment and parameters
    |   `-- HangError                   because another rank hangs or has left: names it
    |-- NonFiniteError  (RuntimeError)  gradients are infinite or NaN: names rank, step, parameter
    |-- ProofError      (RuntimeError)  ranks have drifted apart, or averaged wrongly: names both
    |-- DataError       (RuntimeError)  samples could not be read; names them
    |-- CheckpointError (RuntimeError)  a checkpoint was not written, or none can be read
    |-- OffloadError    (RuntimeError)  activations cannot be offloaded or fetched back
    |-- LaunchError     (RuntimeError)  a script could not be started
    `-- TestbedError    (RuntimeError)  hosts and links cannot be emulated on this machine

Mistakes of the user are errors of this tree; broken invariants of slipstream are ``assert``.
Warnings go through `warn`.
"""

import sys
import warnings


class SlipstreamError(Exception):
    """Root of the tree: ``except slipstream.SlipstreamError`` catches every error listed above."""


class StrategyError(SlipstreamError, ValueError):
    """A strategy that cannot be built, or that does not fit this model."""


class ModelError(SlipstreamError, ValueError):
    """A model, optimizer or loader that cannot be accelerated."""


class TraceError(SlipstreamError, ValueError):
    """A trace that cannot be read, or that contains nothing to summarise."""


class UsageError(SlipstreamError, RuntimeError):
    """A method of the session called in the wrong order."""


class ClusterError(SlipstreamError, RuntimeError):
    """The environment does not describe a usable set of ranks."""


class MismatchError(SlipstreamError, RuntimeError):
    """Ranks disagree about the model or the strategy; raised on every rank alike."""


class CommError(SlipstreamError, ValueError):
    """An operator of ``slipstream.comm`` got invalid arguments; raised before data moves."""


class ExchangeError(SlipstreamError, RuntimeError):
    """An exchange between ranks failed; names rank, step, segment and parameters."""


class HangError(ExchangeError):
    """Another rank hangs, or has left; names rank, host, step and the line of its script."""


class NonFiniteError(SlipstreamError, RuntimeError):
    """Gradients are infinite or NaN; names the rank that had them, step and first parameter."""


class ProofError(SlipstreamError, RuntimeError):
    """Ranks have drifted apart, or an average is wrong; names rank, update and tensor."""


class DataError(SlipstreamError, RuntimeError):
    """Samples could not be read: a worker died or hangs, no memory; names the samples."""


class CheckpointError(SlipstreamError, RuntimeError):
    """A checkpoint was not written, or none that is there can be read; names path and rank."""


class OffloadError(SlipstreamError, RuntimeError):
    """Activations cannot be offloaded or fetched: no memory, no disk; names rank and module."""


class LaunchError(SlipstreamError, RuntimeError):
    """A script could not be started."""


class TestbedError(SlipstreamError, RuntimeError):
    """Hosts and links cannot be emulated on this machine."""

    __test__ = False  # pytest: not a test class, whatever its name


_BETWEEN = ("slipstream", "torch", "contextlib")
"""Packages whose frames lie between a warning and the script: hooks, decorators, with blocks."""


def warn(text: str) -> None:
    """Warn at the line of the script, or of the framework, from which slipstream was called."""
    level, frame = 2, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN and frame.f_back:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
