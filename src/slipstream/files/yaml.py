"""YAML as plain values, and back: no tags that make objects, no aliases that grow without end."""

from __future__ import annotations

import re
from typing import Any

import yaml

from slipstream.files.document import DEEPEST, Unreadable, checked, place_of

MOST_NODES = 200_000
"""Values of a document, each alias counted as all that it stands for."""


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Count as it goes, so that a document beyond the bounds is never built."""
        start = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias, before = self.check_event(yaml.AliasEvent), self._nodes
        self._depth += 1
        self._nodes += 1
        self._require(self._depth <= DEEPEST + 1, f"nested deeper than {DEEPEST}", start)
        node = super().compose_node(parent, index)
        if is_alias:
            size = self._sizes.get(id(node))
            self._require(size is not None, "an alias stands inside of what it names", start)
            self._nodes += size or 0
        else:
            self._sizes[id(node)] = self._nodes - before
        self._require(self._nodes <= MOST_NODES, f"more than {MOST_NODES:,} values", start)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            twice = isinstance(key, yaml.ScalarNode) and key.value in keys
            self._require(
                not twice,
                f"the key {key.value!r:.80} is written twice; keep one of them",
                key.start_mark,
            )
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # of a scalar that is not what its tag says, or looks like: 2026-13-45, !!int ""
            name = node.tag.rpartition(":")[2]
            self._require(
                False, f"not a value of the kind {name:.20}: {error!s:.80}", node.start_mark
            )
            raise

    def _require(self, holds: bool, problem: str, mark: yaml.Mark) -> None:
        if not holds:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


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


def parse_yaml(text: str) -> Any:
    """Read one YAML document; None for an empty one.

    Raises:
        Unreadable: it is not valid, or not within bounds; names line and column, or the key.

    Example:
        >>> parse_yaml("a: &a [1, *a]")
        Traceback (most recent call last):
        slipstream.files.document.Unreadable: not valid YAML, line 1, column 11: an alias stands ...
    """
    try:
        document = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context).split())
        raise Unreadable(f"not valid YAML{place}: {problem:.200}") from None
    except yaml.reader.ReaderError as error:
        place = place_of(text, error.position)
        raise Unreadable(
            f"not valid YAML, {place}: unacceptable character #x{error.character:04x}"
        ) from None
    return checked(document)


def format_yaml(document: object) -> str:
    """Write a document; keys keep their order, values without mappings stay on one line."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)
