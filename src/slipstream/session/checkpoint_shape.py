"""The shape of a checkpoint: which kind of value stands where, checked before any of it is loaded.

Values of torch's own states are left to torch; here is what it would meet with a stack trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from slipstream.errors import StrategyError
from slipstream.local.model import KEY as LOCAL
from slipstream.optim.shard_state import MARK
from slipstream.strategy import Strategy
from slipstream.strategy.local import LocalConfig

MOST = 2**53
Mistakes = Iterator[str]
_SUMS = {"error", "momentum", "velocity"}
"""Entries of a codec's state with a number for each of the parameter's."""


def _wrong(place: str, value: object, allowed: str) -> str:
    seen = f"a {type(value).__name__}"
    if isinstance(value, str | int | float | None):
        seen = f"{value!r:.40}"
    return f"{place}: {seen}; allowed: {allowed}"


def is_count(value: object) -> bool:
    """Whether a value is a whole number from 0 on."""
    return type(value) is int and 0 <= value <= MOST


def _each(place: str, value: Any, check: Callable[[str, Any], Mistakes]) -> Mistakes:
    """Check the entries of a list."""
    if not isinstance(value, list | tuple):
        yield _wrong(place, value, "a list")
        return
    for number, entry in enumerate(value):
        yield from check(f"{place}[{number}]", entry)


def _named(place: str, value: Any, check: Callable[[str, Any], Mistakes]) -> Mistakes:
    """Check the values of a mapping whose keys are names."""
    if not isinstance(value, Mapping):
        yield _wrong(place, value, "a mapping")
        return
    for key, entry in value.items():
        if not isinstance(key, str):
            yield _wrong(f"a key of {place}", key, "text")
        else:
            yield from check(f"{place}.{key:.80}", entry)


def _dense(place: str, value: Any) -> Mistakes:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        yield _wrong(place, value, "a dense tensor")


def _count(place: str, value: Any) -> Mistakes:
    if not is_count(value):
        yield _wrong(place, value, "a whole number >= 0")


def mistakes(parts: Mapping[str, Any]) -> Mistakes:
    """Find out why these are not the model and the optimizer of a checkpoint."""
    if "model" in parts:
        yield from model_mistakes(parts["model"])
    optimizer = parts.get("optimizer", {"state": {}, "param_groups": []})
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get(LOCAL), list):
        yield from _each(f"optimizer.{LOCAL}", optimizer[LOCAL], part_mistakes)
    elif isinstance(optimizer, Mapping) and {"rank", "ranks", "optimizer"} <= optimizer.keys():
        yield from part_mistakes("optimizer", optimizer)
    else:
        yield from optimizer_mistakes("optimizer", optimizer)


# torch's states.


def model_mistakes(state: Any) -> Mistakes:
    """Find out why it is not the state of a model."""

    def check(place: str, value: Any) -> Mistakes:
        if not place.endswith("_extra_state") and not isinstance(value, torch.Tensor):
            yield _wrong(place, value, "a tensor")

    yield from _named("model", state, check)


def optimizer_mistakes(place: str, state: Any) -> Mistakes:
    """Find out why it is not the state of an optimizer, as torch has it."""
    if not isinstance(state, Mapping):
        yield _wrong(place, state, "a mapping")
        return
    groups, values = state.get("param_groups"), state.get("state")
    yield from _each(f"{place}.param_groups", groups, _group)
    if not isinstance(values, Mapping):
        yield _wrong(f"{place}.state", values, "a mapping")
        return
    for number, kept in values.items():
        if isinstance(number, str) and not number.isdigit():  # of no parameter, as a step counter
            continue
        if not is_count(number) or not isinstance(kept, Mapping):
            yield _wrong(f"{place}.state[{number!r:.40}]", kept, "a mapping, of a number")
        else:
            yield from _named(f"{place}.state[{number}]", kept, _anything)
    if MARK in state:
        yield from _mark(f"{place}.{MARK}", state[MARK])


def _anything(place: str, value: Any) -> Mistakes:
    yield from ()


def _group(place: str, value: Any) -> Mistakes:
    if not isinstance(value, Mapping):
        yield _wrong(place, value, "a mapping")
    else:
        yield from _named(place, value, _anything)
        yield from _each(f"{place}.params", value.get("params"), _count)


def _mark(place: str, value: Any) -> Mistakes:
    """Check the mark that says whose part of a state it is."""
    if not isinstance(value, Mapping):
        yield _wrong(place, value, "a mapping")
        return
    yield from _count(f"{place}.rank", value.get("rank"))
    if not is_count(value.get("ranks")) or not value["ranks"]:
        yield _wrong(f"{place}.ranks", value.get("ranks"), "a whole number >= 1")


def part_mistakes(place: str, part: Any) -> Mistakes:
    """Find out why it is not one rank's part of an optimizer's state."""
    yield from _mark(place, part)
    if not isinstance(part, Mapping):
        return
    yield from optimizer_mistakes(f"{place}.optimizer", part.get("optimizer"))
    if "island" in part:
        yield from _each(f"{place}.island", part["island"], _count)
    if LOCAL in part:
        yield from rank_mistakes(f"{place}.{LOCAL}", part[LOCAL])
    shapes = part.get("shapes")
    if not isinstance(shapes, Mapping):
        yield _wrong(f"{place}.shapes", shapes, "a mapping")
        return
    for number, shape in shapes.items():
        sizes = shape if isinstance(shape, tuple | list) and len(shape) == 2 else None
        if not is_count(number) or sizes is None:
            yield _wrong(f"{place}.shapes[{number!r:.40}]", shape, "sizes and strides")
            continue
        for numbers in sizes:
            yield from _each(f"{place}.shapes[{number}]", numbers, _count)


# The session's own state.


def session_mistakes(state: Mapping[str, Any], sizes: Mapping[str, int] | None) -> Mistakes:
    """Find out why it is not the state of a session; ``sizes``: values of each parameter here, None
    where ranks share a model."""
    yield from _count("steps", state["steps"])
    yield from _choices(state)
    yield from _speed(state.get("speed"))
    yield from _order(state["ready_order"])
    yield from _each("codecs", state["codecs"], lambda at, one: _codec(at, one, sizes))
    yield from _loss_scale("loss_scale", state.get("loss_scale"))
    yield from _position(state.get("data"))
    if (local := state.get("local")) is not None:
        yield from _local(local)


def _choices(state: Mapping[str, Any]) -> Mistakes:
    chosen = {name: state.get(name) for name in ("split", "transport", "overlap")}
    try:
        Strategy.load({"gradients": {n: v for n, v in chosen.items() if v is not None}})
    except StrategyError as error:
        yield str(error).rpartition("\n  gradients.")[2].replace("\n", "; ")


def _speed(value: Any) -> Mistakes:
    """Find out why it is not what the speed of updates was."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        yield _wrong("speed", value, "a mapping or None")
        return
    yield from _count("speed.patience", value.get("patience"))
    if (before := value.get("before")) is not None:
        if not isinstance(before, list | tuple) or len(before) != 4:
            yield _wrong("speed.before", before, "four numbers or None")
            return
        for number, seconds in enumerate(before):
            if type(seconds) is not float or not (math.isfinite(seconds) and seconds >= 0):
                yield _wrong(f"speed.before[{number}]", seconds, "a number from 0 on")


def _order(order: Any) -> Mistakes:
    if order is None:
        return
    if not isinstance(order, Mapping):
        yield _wrong("ready_order", order, "a mapping or None")
        return
    for column in ("names", "firings", "sparse_dims"):
        place, value = f"ready_order.{column}", order.get(column)
        yield from _each(place, value, _name if column == "names" else _count)
    lengths = {len(v) for v in order.values() if isinstance(v, list | tuple)}
    names = order.get("names")
    if len(lengths) > 1 or (
        isinstance(names, list | tuple) and len({*map(str, names)}) < len(names)
    ):
        yield "ready_order: its lists must be as long as one another, and no name there twice"


def _name(place: str, value: Any) -> Mistakes:
    if not isinstance(value, str):
        yield _wrong(place, value, "text")


def _codec(place: str, value: Any, sizes: Mapping[str, int] | None) -> Mistakes:
    """Find out why it is not what codecs keep on one rank."""

    def kept(place: str, values: Any) -> Mistakes:
        yield from _named(place, values, _dense)
        if not isinstance(values, Mapping) or sizes is None:
            return
        size = sizes.get(place.partition(".")[2])
        for key, tensor in values.items():
            if key in _SUMS and isinstance(tensor, torch.Tensor) and tensor.numel() != size:
                yield f"{place}.{key}: {tensor.numel()} numbers; allowed: {size}"
        yield from _served(place, values, size)

    yield from _named(place, value, kept)


def _served(place: str, values: Mapping[str, Any], size: int | None) -> Mistakes:
    """Check the piece of a parameter that a rank served."""
    if not {"served", "served_from"} & values.keys():
        return
    served, first = values.get("served"), values.get("served_from")
    if not isinstance(served, torch.Tensor) or served.dim() != 1:
        yield _wrong(f"{place}.served", served, "a vector")
    elif not isinstance(first, torch.Tensor) or first.numel() != 1:
        yield _wrong(f"{place}.served_from", first, "one number")
    elif "error" not in values:
        yield f"{place}.error: missing beside served"
    elif size is not None and not 0 <= float(first) <= size - len(served):
        yield f"{place}.served_from: {float(first):g}; allowed: 0 to {size - len(served)}"


def _loss_scale(place: str, value: Any) -> Mistakes:
    if value is None:
        return
    if not isinstance(value, list | tuple) or len(value) != 3:
        yield _wrong(place, value, "None, or a scale and two counts")
        return
    scale, *counts = value
    if type(scale) not in (int, float) or not (math.isfinite(scale) and scale > 0):
        yield _wrong(f"{place}[0]", scale, "a number above 0")
    for number, count in enumerate(counts, 1):
        yield from _count(f"{place}[{number}]", count)


_POSITIONS = (
    {"batches", "ranks"},
    {"batches", "ranks", "over"},
    {"epoch", "seed", "samples"},
)


def _position(value: Any) -> Mistakes:
    if value is None:
        return
    if not isinstance(value, Mapping):
        yield _wrong("data", value, "a mapping or None")
    elif {*value} in _POSITIONS:
        for key, count in value.items():
            if key == "seed":
                if type(count) is not int or abs(count) > 2**64:
                    yield _wrong("data.seed", count, "a whole number")
            else:
                yield from _count(f"data.{key}", count)
    elif {*value} in ({"own"}, {"own", "over"}):
        yield from _count("data.over", value.get("over", 0))
    else:
        names = ", ".join(sorted(map(str, value)))
        yield f"data: {names or 'nothing'}; allowed: own, or batches and ranks, or epoch, ..."


def _local(value: Any) -> Mistakes:
    if not isinstance(value, Mapping):
        yield _wrong("local", value, "a mapping or None")
        return
    yield from _count("local.updates", value.get("updates"))
    for key in ("settled", "tries"):
        if not isinstance(value.get(key, False), bool):
            yield _wrong(f"local.{key}", value[key], "true or false")
    config = value.get("config")
    if not isinstance(config, Mapping):
        yield _wrong("local.config", config, "a mapping")
    else:
        try:
            LocalConfig.model_validate(dict(config))
        except StrategyError as error:
            yield "local.config: " + " ".join(str(error).split())
    yield from _each("local.meetings", value.get("meetings"), _meeting)


def _meeting(place: str, value: Any) -> Mistakes:
    if not isinstance(value, Mapping):
        yield _wrong(place, value, "a mapping")
        return
    yield from _count(f"{place}.done", value.get("done"))
    yield from _count(f"{place}.counted", value.get("counted", 0))
    yield from _each(f"{place}.names", value.get("names", []), _name)
    in_flight = value.get("due") is not None
    if in_flight:
        yield from _count(f"{place}.due", value["due"])
    flying = ("mean", "mean_buffers", "totals") if in_flight else ()
    momentum = () if value.get("momentum") is None else ("momentum",)
    for key in ("outer", "buffers", *momentum, *flying):
        yield from _dense(f"{place}.{key}", value.get(key))
    if "momentum" not in value:
        yield f"{place}.momentum: missing"


def rank_mistakes(place: str, value: Any) -> Mistakes:
    """Find out why it is not what a rank has alone, where ranks train on their own."""
    if not isinstance(value, Mapping):
        yield _wrong(place, value, "a mapping")
        return
    yield from model_mistakes(value.get("model"))
    yield from _each(f"{place}.weights", value.get("weights"), _count)
    yield from _loss_scale(f"{place}.loss_scale", value.get("loss_scale"))
    yield from _each(f"{place}.meetings", value.get("meetings"), _own_meeting)


def _own_meeting(place: str, value: Any) -> Mistakes:
    if not isinstance(value, Mapping):
        yield _wrong(place, value, "a mapping")
        return
    yield from _count(f"{place}.done", value.get("done"))
    if not isinstance(value.get("lost"), bool):
        yield _wrong(f"{place}.lost", value.get("lost"), "true or false")
    if value.get("due") is not None:
        yield from _count(f"{place}.due", value["due"])
        yield from _dense(f"{place}.sent", value.get("sent"))
        if value.get("sent_buffers") is not None:
            yield from _dense(f"{place}.sent_buffers", value["sent_buffers"])
    yield from _each(f"{place}.codec", value.get("codec"), lambda at, one: _named(at, one, _dense))
