"""Numbers of the turns that choices take while a training runs. Imports no torch, as the command
line says them, too."""

from __future__ import annotations

SETTLING = 2
"""Updates after a change that are not measured: new buckets, cold connections."""
TURNS = 2
"""Windows of each choice, in turn, so that a drift of the machine affects all alike."""
MOST = 4
"""Choices that are measured, where splits are among them."""
