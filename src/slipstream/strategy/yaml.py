"""Strategy files as plain mappings: YAML or JSON, within bounds.

Refuses documents that YAML or JSON would silently misread: a duplicate key, an empty document, text
that is not UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slipstream.errors import StrategyError
from slipstream.files import document, yaml
from slipstream.files.document import MIB, Unreadable
from slipstream.files.yaml import format_yaml as format_yaml

LONGEST = MIB
"""Bytes of a strategy file."""


def parse_yaml(text: str) -> object:
    """Read one YAML document.

    Raises:
        StrategyError: the text is empty, not valid YAML or not within bounds; names the place.
    """
    return _parsed(yaml.parse_yaml, text)


def parse_json(text: str) -> object:
    """Read one JSON document.

    Raises:
        StrategyError: the text is empty, not valid JSON or not within bounds; names the place.
    """
    return _parsed(document.parse_json, text)


def _parsed(parse: Callable[[str], object], text: str) -> object:
    """Refuse an empty document, too: more likely a mistake than a request for the defaults."""
    try:
        found = parse(text)
    except Unreadable as error:
        raise StrategyError(str(error)) from None
    if found is None:
        raise StrategyError("the document is empty; allowed: a mapping; write {} for the defaults")
    return found


def _is_trace(path: Path) -> bool:
    """Whether it looks like one, which is longer than any strategy is read. A pipe is none: what is
    read of it is gone."""
    with suppress(OSError, ValueError):
        if path.is_file() and path.name.lower().endswith(".json.gz"):
            return True
        if path.is_file():
            with path.open("rb") as file:
                return file.read(64).lstrip().startswith(b'{"traceEvents"')
    return False


SUFFIXES = {".yaml": parse_yaml, ".yml": parse_yaml, ".json": parse_json}


def read(path: Path) -> object:
    """Read a file as YAML or JSON, by its suffix.

    Raises:
        StrategyError: an unknown suffix, an unreadable file, text that does not parse, or a trace.
    """
    if _is_trace(path):
        raise StrategyError(
            f"{path}: this is a trace that a run has recorded, not a strategy; slipstream trace "
            f"summary {path} shows it"
        )
    parse = SUFFIXES.get(path.suffix.lower())
    if parse is None:
        raise StrategyError(f"{path}: a strategy file ends in {', '.join(SUFFIXES)}; rename it")
    try:
        return parse(document.decoded(document.read_bytes(path, LONGEST)))
    except OSError as error:
        raise StrategyError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    except (StrategyError, Unreadable) as error:
        raise StrategyError(f"{path}: {error}") from None
