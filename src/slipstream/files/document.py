"""Documents are data, read within bounds: bytes of a file, JSON and YAML as plain values.

[Note: Bounds]
A document is refused if it is longer than its reader allows, nested deeper than DEEPEST, or has a
value that none of ours has: a number that is not finite or does not fit 64 bits, half a character,
a control character, which would reach the terminal of who reads the error. Then nothing that walks
the document later meets an endless one.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

MIB = 2**20
DEEPEST = 64
"""Mappings and lists inside one another."""
LARGEST_NUMBER = 2**63
_UNWANTED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_MANY_DIGITS = re.compile(r"\d{4300,}")


class Unreadable(Exception):
    """A document that is refused: says where in it, but not in which file.

    Each reader makes an error of its own of it.
    """


def read_bytes(path: str | Path, limit: int) -> bytes:
    """Read a file of at most ``limit`` bytes.

    Raises:
        Unreadable: it is longer.
        OSError: there is none, or it cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(limit + 1)
    except ValueError as error:  # of a path with a zero byte
        raise Unreadable(f"not a path: {error}") from None
    return _within(data, limit, "long")


def unpacked(data: bytes, limit: int) -> bytes:
    """Unpack ``data``, if gzip has packed it, to at most ``limit`` bytes.

    Raises:
        Unreadable: it is longer, or damaged.
    """
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            return _within(packed.read(limit + 1), limit, "long when it is unpacked")
    except (EOFError, zlib.error, OSError) as error:
        raise Unreadable(f"truncated or damaged: gzip says {error!s:.80}") from None


def _within(data: bytes, limit: int, words: str) -> bytes:
    if len(data) > limit:
        raise Unreadable(f"more than {limit / MIB:g} MiB {words}, which is the most that is read")
    return data


def decoded(data: bytes) -> str:
    """Text in UTF-8, with or without a mark at its beginning.

    Raises:
        Unreadable: it is none; names the byte.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from None


def parse_json(text: str) -> Any:
    """Read one JSON document; None for an empty one.

    Raises:
        Unreadable: it is not valid, or not within bounds; names line and column, or the key.

    Example:
        >>> parse_json('{"a": [1, 1e999]}')
        Traceback (most recent call last):
        slipstream.files.document.Unreadable: a[1]: inf; allowed: finite numbers
    """
    if not text.strip():
        return None
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not valid JSON, {place_of(text, error.pos)}: {error.msg}") from None
    except RecursionError:
        at = next(_too_deep(text), len(text))
        raise Unreadable(f"not valid JSON, {place_of(text, at)}: {_nested()}") from None
    except ValueError as error:
        found = _MANY_DIGITS.search(text)
        words = f", {place_of(text, found.start())}: a number of too many digits" if found else ""
        raise Unreadable(f"not valid JSON{words or f': {error}'}") from None
    return checked(document)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; refuses duplicate keys."""
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in document if keys.count(key) > 1)
        raise Unreadable(
            f"not valid JSON: the key {twice!r:.80} is written twice; keep one of them"
        )
    return document


def place_of(text: str, index: int) -> str:
    """Line and column of a character.

    Example:
        >>> place_of("ab\\ncd", 4)
        'line 2, column 2'
    """
    before = text[:index]
    return f"line {before.count(chr(10)) + 1}, column {index - before.rfind(chr(10))}"


def _too_deep(text: str) -> Iterator[int]:
    """Places at which JSON becomes nested too deep."""
    depth = 0
    for found in _NESTING.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > DEEPEST:
            yield found.start()


def _nested() -> str:
    return f"nested deeper than {DEEPEST}"


def checked(document: Any) -> Any:
    """Give back a document of plain values that is within bounds (see the note above).

    It may share parts, but none may contain itself, and walking all of it must be affordable.

    Raises:
        Unreadable: it is not; names the key.
    """
    level: list[Any] = [[document]]
    for _ in range(DEEPEST + 2):
        inner = [*chain.from_iterable(map(_parts, level))]
        for value in level:
            for key in value if type(value) is dict else ():
                if type(key) is not str:
                    raise Unreadable(
                        f"{place_in(document, value)}: the key {key!r:.80}; allowed: text"
                    )
        for value in inner:
            if (problem := _problem(value)) is not None:
                raise Unreadable(f"{place_in(document, value)}: {problem}")
        level = [value for value in inner if type(value) in _CONTAINERS]
        if not level:
            return document
    raise Unreadable(f"{place_in(document, level[0])}: {_nested()}")


_CONTAINERS = (dict, list, tuple, set)


def _parts(value: Any) -> Iterator[Any]:
    return chain(value.keys(), value.values()) if isinstance(value, dict) else iter(value)


def _problem(value: Any) -> str | None:
    """Why none of our documents has such a value; None: some have."""
    kind = type(value)
    if kind is str:
        if value.isprintable() or (found := _UNWANTED.search(value)) is None:
            return None
        return f"text with the character {found[0]!a}; allowed: text without control characters"
    if kind is float:
        return None if math.isfinite(value) else f"{value}; allowed: finite numbers"
    if kind is int and not -LARGEST_NUMBER <= value < LARGEST_NUMBER:
        return "a number of more than 64 bits; allowed: smaller ones"
    return None


def place_in(document: Any, wanted: Any) -> str:
    """The first place of a container or value as a path of keys, from the left.

    Example:
        >>> wanted = [1]
        >>> place_in({"a": [0, wanted]}, wanted)
        'a[1]'
    """
    todo: list[tuple[Any, str, int]] = [(document, "", 0)]
    while todo:
        value, place, depth = todo.pop()
        if value is wanted:
            return _short(place.removeprefix(".")) or "(top level)"
        inner: list[tuple[Any, str]] = []
        if isinstance(value, dict):
            if any(key is wanted for key in value):
                return f"a key of {_short(place.removeprefix('.')) or 'the top level'}"
            inner = [(part, f".{_UNWANTED.sub('?', str(key))}") for key, part in value.items()]
        elif isinstance(value, _CONTAINERS):
            inner = [(part, f"[{number}]") for number, part in enumerate(value)]
        if depth <= DEEPEST:
            todo += [(part, place + step, depth + 1) for part, step in reversed(inner)]
    return "(somewhere)"


def _short(place: str) -> str:
    return place if len(place) <= 120 else f"{place[:60]}...{place[-57:]}"
