"""YAML and JSON documents as plain mappings, from text and files and back.

Refuses documents that YAML or JSON would silently misread: a duplicate key, an empty document, text
that is not UTF-8.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import StrategyError


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                problem = f"the key {key.value!r} is written twice; keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    """Write 25.0 as 25, which reads back as the same number."""
    if value.is_integer() and abs(value) < 2**53:
        return dumper.represent_int(int(value))
    return yaml.SafeDumper.represent_float(dumper, value)


_Dumper.add_representer(float, _represent_float)
# PyYAML follows YAML 1.1, in which 1e3 is text; YAML 1.2 and JSON read it as a number.
_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
for _flavour in (_Loader, _Dumper):
    _flavour.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str) -> object:
    """Read one YAML document.

    Raises:
        StrategyError: the text is empty or not valid YAML; names line and column.
    """
    try:
        document = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise StrategyError(f"not valid YAML{place}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StrategyError(f"not valid YAML: {error}") from None
    return _nonempty(document)


def parse_json(text: str) -> object:
    """Read one JSON document.

    Raises:
        StrategyError: the text is empty or not valid JSON; names line and column.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique) if text.strip() else None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise StrategyError(f"not valid JSON, {place}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise StrategyError(f"not valid JSON: {error}") from None
    return _nonempty(document)


def _nonempty(document: object) -> object:
    """Refuse an empty document: more likely a mistake than a request for the defaults."""
    if document is None:
        raise StrategyError("the document is empty; allowed: a mapping; write {} for the defaults")
    return document


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; refuses duplicate keys."""
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is written twice; keep one of them")
    return document


def format_yaml(document: object) -> str:
    """Write a document; keys keep their order, values without mappings stay on one line."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


SUFFIXES = {".yaml": parse_yaml, ".yml": parse_yaml, ".json": parse_json}


def read(path: Path) -> object:
    """Read a file as YAML or JSON, by its suffix.

    Raises:
        StrategyError: an unknown suffix, an unreadable file or text that does not parse.
    """
    parse = SUFFIXES.get(path.suffix.lower())
    if parse is None:
        raise StrategyError(f"{path}: a strategy file ends in {', '.join(SUFFIXES)}; rename it")
    try:
        return parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise StrategyError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise StrategyError(f"{path}: not UTF-8 text: {error.reason}; save it as UTF-8") from None
    except StrategyError as error:
        raise StrategyError(f"{path}: {error}") from None
