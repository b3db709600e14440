"""What was found in a trace, a strategy or a cluster: what was seen, what to do, what it brings.

Never looks for anything: other rooms find, this is the value they hand on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["good", "note", "warning", "problem"]
"""From "leave it as it is" to "this is what the run suffers from"."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    ``gain`` is the time that an iteration is expected to take less, in seconds; 0 means none or
    unknown. ``patch`` holds nested settings of a strategy, for ``merged``; it may be empty. Patches
    of the same setting are alternatives, and gains do not add up.

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
    """Settings with a patch over them; a variant, which is told by its ``kind``, is replaced whole.

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
