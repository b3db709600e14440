"""Settings of ``local``, and its rivals, by the names that the tables of local.py show."""

from __future__ import annotations

from typing import Any

import yaml

CODECS: dict[str, Any] = {
    "int8": "int8",
    "int4": "int4",
    "onebit": {"kind": "onebit", "start_step": 0},
    "topk": {"kind": "topk", "decay": 0.95},
}
TORCHFT = {"torchft DiLoCo, 16 steps": 0, "torchft DiLoCo, 16 steps, delay 4": 4}
"""Updates that hide an exchange, by name."""


def settings_of(name: str) -> dict[str, Any]:
    """Read a name of settings: ``16 steps, 4 fragments, delay 2, int4``."""
    found: dict[str, Any] = {}
    for part in name.split(", "):
        first, _, second = part.partition(" ")
        if part in CODECS:
            found["codec"] = CODECS[part]
        elif first.isdigit():
            found[second] = int(first)
        else:
            found[first] = yaml.safe_load(second)
    return found
