"""Damage to documents: values swapped and odd, keys gone and doubled, bytes flipped and cut.

All choices come from one source of chance, which hypothesis or a seed may be.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from random import Random
from typing import Any

import torch

Make = Callable[[Random], Any]


class Twice(dict):
    """A mapping that is written with its last key twice."""


ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**70), 10**30,
    10**400, 0.5, -0.0, 1e-320, 1e18, 1e300, float("nan"), float("inf"), float("-inf"),
    "", " ", "x", "0", "1e999", "true", "null", "flat", "single", "half", "sharded", "a" * 5000,
    "[/x]", "[bold", "[red]x[/red]", "<script>alert(1)</script>", "%s{0}", "../../x", "/dev/zero",
    "\0", "\x1b[31m", "\x85", "\ud800", "\u202e", "\U0001f642", "\n", "a: b",
    [], {}, [[]], [None], {"": {}}, {"kind": "x"}, {"kind": None}, {"kind": {}}, [1, "a", None],
)  # fmt: skip
TENSORS = (
    torch.ones(0), torch.ones(3), torch.ones(()), torch.ones(2, 2, dtype=torch.complex64),
    torch.ones(3, 4).to_sparse(), torch.full((4,), float("nan")), torch.ones(1).expand(10**12),
    torch.ones(4, 3, dtype=torch.int8), torch.tensor(-5), torch.tensor(10**18),
)  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _places(document: Any) -> list[tuple[Any, Any]]:
    """All containers with a key of each value in them."""
    found, todo = [], [document]
    while todo:
        value = todo.pop()
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            found.append((value, key))
            if isinstance(inner, dict | list):
                todo.append(inner)
    return found


def _as_lists(value: Any) -> Any:
    """A copy without tuples, so that every value can be replaced."""
    if isinstance(value, dict):
        return {key: _as_lists(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [_as_lists(inner) for inner in value]
    return value


def damaged(chance: Random, good: Any, odd: tuple[Any, ...] = ODD) -> Any:
    """A copy of a document with some values that are others."""
    document = [_as_lists(good)]
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        places = _places(document) or [(document := [None], 0)]
        deep = places[1:] or places
        where, key = chance.choice(deep if chance.random() < 0.98 else places)
        _damage(chance, where, key, odd, places)
    return document[0] if document else None


def _damage(chance: Random, where: Any, key: Any, odd: tuple[Any, ...], places: list[Any]) -> None:
    value = where[key]
    match chance.randrange(12):
        case 0 | 1 | 2:
            where[key] = copy.deepcopy(chance.choice(odd))
        case 3:
            del where[key]
        case 4 if isinstance(where, dict):
            name = chance.choice((*map(str, where), "x", "", "kind", "\x1b", 7, "a" * 300))
            where[name] = where.pop(key)
        case 5:  # another type for the same
            if isinstance(value, dict):
                where[key] = [*value.values()]
            elif isinstance(value, list):
                where[key] = {str(number): inner for number, inner in enumerate(value)}
            else:
                where[key] = chance.choice(
                    (lambda v: [v], str, lambda v: {"kind": v}, lambda v: v is not None)
                )(value)
        case 6 if isinstance(value, int | float) and abs(value) < 1e300:
            where[key] = value * chance.choice((-1, 0, 10, 1000, 1e-9, 1e30))
        case 7:
            there, other = chance.choice(places)
            if not isinstance(there[other], dict | list) or not isinstance(value, dict | list):
                where[key], there[other] = there[other], value
        case 8 if isinstance(value, list) and value:
            where[key] = [copy.deepcopy(v) for _ in range(chance.choice((2, 50))) for v in value]
        case 9 if isinstance(value, dict):
            where[key] = Twice(value)
        case 10:
            where[key] = nested(chance.choice((5, 40, 100)))
        case _ if isinstance(value, list) and value:
            value.insert(chance.randrange(len(value) + 1), copy.deepcopy(chance.choice(value)))
        case _:
            where[key] = copy.deepcopy(chance.choice(odd))


def as_json(value: Any) -> str:
    """JSON, with all that no writer would write."""
    if isinstance(value, dict):
        pairs = [f"{json.dumps(str(key))}: {as_json(inner)}" for key, inner in value.items()]
        pairs += pairs[-1:] if isinstance(value, Twice) else []
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_json, value)) + "]"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        return "9" * 5000
    return json.dumps(value)


BOMBS = (
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"a: &a [1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
    + b"".join(
        b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % (n, n, *([n - 1] * 9))
        for n in range(ord("c"), ord("m"))
    ),
    b"&a [*a]",
    b"a: &a {<<: *a}",
    b"!!python/object/apply:os.system ['touch HACKED']",
    b"gradients: !!python/name:os.system",
    b"trace: !!timestamp x",
    b"trace: {steps: !!int ''}",
    b"trace: {steps: !!bool 3}",
    b"trace: !!binary '===='",
    b"{1: 2, true: 3, 2020-01-01: 4, null: 5}",
    b"? {a: b}\n: c",
    b"%YAML 9.9\n---\n{}",
    b"a: 0x" + b"f" * 9000,
    b"a: " + b"1:" * 5000 + b"1",
    b"\x1f\x8b\x08\x00",
    gzip.compress(b"\0" * 5_000_000),
    gzip.compress(b"[" * 100_000),
    b"PK\x03\x04" + b"\0" * 60,
    b"\x80\x04cos\nsystem\n(S'touch HACKED'\ntR.",
    b"",
    b"\n",
    b"\xff\xfe{\x00}\x00",
)


def broken_bytes(chance: Random, data: bytes) -> bytes:
    """Bytes with some that are others."""
    if chance.random() < 0.1:
        return chance.choice(BOMBS)
    at = chance.randrange(len(data) + 1)
    to = min(len(data), at + chance.choice((1, 1, 2, 8, 100)))
    noise = bytes(chance.randrange(256) for _ in range(chance.choice((1, 2, 16))))
    match chance.randrange(9):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[to:]
        case 2:
            return data[:at] + noise + data[at:]
        case 3:
            return data[:at] + noise + data[to:]
        case 4:
            return data[:to] + data[at:]
        case 5:
            return data[at:] + data[:at]
        case 6 if at < len(data):
            return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
        case 7:
            word = chance.choice(
                (b"{", b"}", b"[", b"]", b'"', b":", b",", b"-", b"\t", b"&a ", b"*a")
            )
            return data[:at] + word + data[at:]
        case _:
            packed = gzip.compress(data, mtime=0)
            return packed[: chance.choice((len(packed), len(packed) // 2, len(packed) - 4))]
