"""Checks of a trace file: whether its entries and its description are what ours are.

All else relies on these: who reads a `Trace` need not doubt its types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

MOST_RANKS = 2**20
_MOST = 2**53  # a float holds every whole number up to it
_COUNTS = {
    "segment",
    "bytes",
    "gradients",
    "collectives",
    "update",
    "stage",
    "micro_batch",
    "readers",
    "queued",
    "samples",
    "ranks",
}
"""Arguments of spans that are never negative."""
_NORMS = {"own_norm2", "average_norm2"}

Count = Annotated[int, Field(ge=0, le=_MOST)]


def mistake(entry: Any) -> str | None:
    """Find out why an entry of the file is no span, mark or label; None: it is one.

    Example:
        >>> mistake({"ph": "X", "name": "forward", "pid": 0, "ts": 1, "dur": -2, "args": {}})
        'dur: -2; allowed: a number >= 0'
    """
    if not isinstance(entry, dict):
        return f"{entry!r:.40}; allowed: an object"
    if not isinstance(entry.get("ph"), str):
        return _wrong("ph", entry, "text")
    if entry["ph"] != "X":
        return None
    if not isinstance(entry.get("name"), str):
        return _wrong("name", entry, "text")
    if not _is_count(entry.get("pid"), MOST_RANKS):
        return _wrong("pid", entry, f"a rank, 0 to {MOST_RANKS}")
    if not _is_number(entry.get("ts"), -_MOST):
        return _wrong("ts", entry, "a number of microseconds")
    if not _is_number(entry.get("dur"), 0):
        return _wrong("dur", entry, "a number >= 0")
    if not isinstance(args := entry.get("args"), dict):
        return _wrong("args", entry, "an object")
    return _wrong_argument(args)


def _wrong_argument(args: Mapping[str, Any]) -> str | None:
    if not _is_count(args.get("step"), _MOST):
        return _wrong("step", args, "a whole number >= 0", "args.")
    for name, value in args.items():
        if name in _COUNTS and not _is_number(value, 0):
            return _wrong(name, args, "a number >= 0", "args.")
        if name in _NORMS and not _is_number(value, 0, math.inf):
            return _wrong(name, args, "a number >= 0", "args.")
        if name == "loss" and not _is_number(value, -math.inf, math.inf):  # it may diverge
            return _wrong(name, args, "a number", "args.")
    if "ready" in args and not _is_number(args["ready"], -_MOST):
        return _wrong("ready", args, "a number of microseconds", "args.")
    ready = args.get("gradients_ready", [])
    if not isinstance(ready, list) or any(
        one is not None and not _is_number(one, -_MOST) for one in ready
    ):
        return _wrong("gradients_ready", args, "a list of seconds", "args.")
    return None


def _is_number(value: Any, least: float, most: float = _MOST) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and least <= value <= most


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _wrong(name: str, place: Mapping[str, Any], allowed: str, prefix: str = "") -> str:
    seen = f"{place[name]!r:.40}" if name in place else "missing"
    return f"{prefix}{name}: {seen}; allowed: {allowed}"


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Kind(_Part):
    kind: str


_OneOf = Annotated[_Kind, BeforeValidator(lambda v: {"kind": v} if isinstance(v, str) else v)]


class _Gradients(_Part):
    split: _OneOf | None = None
    transport: _OneOf | None = None
    codec: _OneOf | None = None
    overlap: bool = True
    accumulate: int = Field(default=1, ge=1, le=_MOST)


class _Tensor(_Part):
    ranks: Count


class _Stages(_Part):
    ranks: Count
    micro_batches: Count
    schedule: str


class _Parallel(_Part):
    tensor: _Tensor | None = None
    pipeline: _Stages | None = None


class _Strategy(_Part):
    gradients: _Gradients | None = None
    parallel: _Parallel | None = None
    precision: _OneOf | None = None
    compute: dict[str, Any] | None = None
    data: dict[str, Any] | None = None


class _Segment(_Part):
    bytes: Count
    wire_bytes: Count | None = None
    gradients: list[str]


class _Gradient(_Part):
    name: str
    layer: str
    bytes: Count
    dtype: str
    registered: int = Field(default=-1, ge=-1, le=_MOST)


class _Optimizer(_Part):
    bytes: Count = 0
    shardable: bool = False
    sgd: bool = True


class _Framework(_Part):
    name: str
    own_settings: dict[str, str] = {}


class _Meta(_Part):
    world_size: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    hosts: list[str] | None = None
    model: str | None = None
    strategy: _Strategy | None = None
    segments: list[_Segment] | None = None
    gradients: list[_Gradient] | None = None
    change_bytes: Count = 0
    optimizer: _Optimizer | None = None
    framework: _Framework | None = None
    versions: dict[str, str] | None = None
    clock_error: list[Annotated[float, Field(ge=0, le=_MOST)]] | None = None
    convolutions: float = Field(default=0.0, ge=0, le=1)
    compute: list[str] | None = None
    useful_compute: list[str] | None = None
    search: str | None = None
    predicted: bool | None = None


def wrong_description(meta: Mapping[str, Any]) -> str | None:
    """Find out why ``meta`` is not what ours has (see `Trace.meta`); None: it is.

    Example:
        >>> wrong_description({"world_size": 2, "hosts": ["a", 7]})
        'hosts.1: Input should be a valid string, not 7'
    """
    try:
        _Meta.model_validate(meta)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        place = ".".join(map(str, first["loc"]))
        seen = "" if first["type"] == "missing" else f", not {first['input']!r:.40}"
        more = f" (and {len(others)} more)" if others else ""
        return f"{place}: {first['msg']}{seen}{more}"
    return None
