"""Writes the strategy that a command has chosen."""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import StrategyError
from slipstream.files.write import write_whole
from slipstream.strategy import Strategy


def write_strategy(strategy: Strategy, output: Path) -> None:
    """Write YAML or JSON, by the suffix.

    Raises:
        StrategyError: it cannot be written; has the strategy in its words, so that it is not lost.
    """
    is_json = output.suffix.lower() == ".json"
    text = strategy.to_json() if is_json else strategy.to_yaml()
    try:
        write_whole(output, text)
    except OSError as error:
        raise StrategyError(
            f"{output} cannot be written: {error.strerror}; the strategy is\n\n{text}"
        ) from error
