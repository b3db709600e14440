"""What must have a row, read off the package: each setting of a strategy, kernel and hook."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

import slipstream.fusion
import slipstream.kernels
import slipstream.optim
from slipstream.strategy import Setting, Strategy
from slipstream.strategy.codec import PlainCodecConfig
from tests.conformance.sides import UnderDdp
from tests.conformance.techniques import Technique

BY_SETTINGS = {"compile_blocks", "fuse_optimizer", "fuse_patterns", "graph_blocks"}
"""Functions of ``slipstream.fusion`` that settings of ``compute`` call."""


def required() -> set[str]:
    """Names of all that must have a row."""
    found = set(_settings(Strategy, ""))
    for room in (slipstream.kernels, slipstream.fusion):
        short = room.__name__.rpartition(".")[2]
        public = [n for n, v in vars(room).items() if inspect.isfunction(v) and n[0] != "_"]
        found |= {f"{short}.{name}" for name in public if name not in BY_SETTINGS}
    optimizers = [n for n, v in vars(slipstream.optim).items() if inspect.isclass(v)]
    found |= {f"optim.{name}" for name in optimizers}
    return found | {f"DdpCodec={_kind(codec)}" for codec in get_args(PlainCodecConfig)}


def covered(technique: Technique) -> set[str]:
    """What a row stands for."""
    strategy = Strategy.load(dict(technique.strategy))
    if technique.loop is UnderDdp:
        return {f"DdpCodec={strategy.gradients.codec.kind}"}
    return {*_used(strategy, ""), *technique.public}


def _settings(model: type[BaseModel], path: str) -> Iterator[str]:
    """Every kind of every variant, every switch and word that is not the default."""
    for name, field in model.model_fields.items():
        place = f"{path}.{name}".lstrip(".")
        options = [*_options(field.annotation)]
        kinds = [o for o in options if _is(o, BaseModel)]
        if len(kinds) > 1:
            yield from (f"{place}={_kind(kind)}" for kind in kinds)
        elif kinds and type(None) not in options:
            yield from _settings(kinds[0], place)
        elif kinds:
            yield place
        else:
            words = [w for o in options for w in ((True, False) if o is bool else get_args(o))]
            given = [w for w in words if w != field.default]
            yield from (f"{place}={word}" for word in given) if words else (place,)


_WITHOUT_EFFECT_ON_NUMBERS = {"trace.skip", "trace.folder", "trace.norms=True", "checks.folder"}


def _used(setting: Setting, path: str) -> Iterator[str]:
    """The same names for the settings that differ from the defaults."""
    for name, value in setting:
        place = f"{path}.{name}".lstrip(".")
        field = type(setting).model_fields[name]
        options = [*_options(field.annotation)]
        kinds = [o for o in options if _is(o, BaseModel)]
        if len(kinds) > 1 and value is not None:
            yield f"{place}={value.kind}"
        elif kinds and type(None) not in options:
            yield from _used(value, place)
        elif value != field.default:
            yield f"{place}={value}" if isinstance(value, bool | str) else place


def _options(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is None or get_origin(annotation) is Literal:
        yield annotation
        return
    for part in get_args(annotation):
        yield from _options(part)


def _is(value: object, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)


def _kind(model: type[BaseModel]) -> str:
    return str(model.model_fields["kind"].default)


def missing(techniques: tuple[Technique, ...]) -> list[str]:
    """Settings, kernels and hooks without a row."""
    have = {name for technique in techniques for name in covered(technique)}
    return sorted(required() - have - _WITHOUT_EFFECT_ON_NUMBERS)


Found = Mapping[str, object]
