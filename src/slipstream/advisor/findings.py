"""The value that a rule or a check returns: what was seen, what to do, what it gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["good", "note", "warning", "problem"]
"""In ascending order: "good" needs no action, a "problem" dominates the run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        severity: How grave it is.
        where: The setting, rank or part of the iteration.
        evidence: What was seen.
        advice: What to do.
        gain: Expected saving in seconds of an iteration; 0: none or unknown. Gains of several
            findings do not add up.
        patch: Nested settings to merge into a strategy with ``merged``; may be empty. Patches of
            the same setting are alternatives.

    Example:
        >>> Finding("warning", "gradients.overlap", "it is off", "turn it on", gain=0.1).patch
        {}
    """

    severity: Severity
    where: str
    evidence: str
    advice: str
    gain: float = 0.0
    patch: Mapping[str, Any] = field(default_factory=dict)


def merged(settings: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """The settings updated with a patch, recursively; a variant (with ``kind``) is replaced whole.

    Example:
        >>> merged({"split": {"kind": "by_layers", "layers": 5}, "overlap": False},
        ...        {"split": {"kind": "single"}})
        {'split': {'kind': 'single'}, 'overlap': False}
    """
    result = dict(settings)
    for name, value in patch.items():
        old = result.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and "kind" not in value:
            value = merged(old, value)
        result[name] = value
    return result
