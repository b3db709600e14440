"""Writes the strategy that a command has chosen."""

from __future__ import annotations

from pathlib import Path

from slipstream.files.write import write_whole
from slipstream.strategy import Strategy


def write_strategy(strategy: Strategy, output: Path) -> None:
    """Write YAML or JSON, by the suffix."""
    is_json = output.suffix.lower() == ".json"
    write_whole(output, strategy.to_json() if is_json else strategy.to_yaml())
