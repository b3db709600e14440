"""Error texts for a wrong strategy: every problem with its path, the values allowed, an example.

The fields of ``spec`` decide what is wrong; this file only words it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_TYPES = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "null",
}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The text of a StrategyError: a head line, then one line per problem of ``error``."""
    problems = error.errors(include_url=False)
    # pydantic also reports a list with a wrong item as too short.
    outer = {p["loc"][:depth] for p in problems for depth in range(len(p["loc"]))}
    problems = [p for p in problems if p["type"] != "too_short" or p["loc"] not in outer]
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return "\n  ".join([f"{model.__name__} has {count}:", *(_line(model, p) for p in problems)])


def did_you_mean(word: object, allowed: Iterable[str]) -> str:
    """``"; did you mean 'overlap'?"`` if a word of ``allowed`` is close, else ``""``."""
    near = difflib.get_close_matches(str(word), list(allowed), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """``repr(value)``, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _line(model: type[BaseModel], problem: ErrorDetails) -> str:
    """One problem as ``path: value seen; values allowed; example``."""
    owner, field, place = _locate(model, problem["loc"])
    seen = problem["input"]
    match problem["type"]:
        case "extra_forbidden" | "invalid_key":
            allowed = list(owner.model_fields)
            near = did_you_mean(field, allowed)
            return f"{place}: no such setting{near}; allowed: {', '.join(allowed)}"
        case "value_error":
            value = f"{shown(seen)}: " if problem["loc"] else ""  # else settings of two groups
            return f"{place}: {value}{problem['ctx']['error']}"
        case "missing":
            said = "missing"
        case "union_tag_not_found":
            place, said = f"{place}.kind", f"missing in {shown(seen)}"
        case "union_tag_invalid":
            tag = seen.get("kind") if isinstance(seen, Mapping) else problem["ctx"]["tag"]
            near = did_you_mean(tag, _inner(owner, field)) if isinstance(tag, str) else ""
            if str(tag).lower() == "none" and _may_be_null(owner, field):
                near = "; did you mean null?"
            place, said = f"{place}.kind", f"got {tag!r}{near}"
        case _:
            said = f"got {shown(seen)}"
    return f"{place}: {said}; allowed: {_allowed(owner, field)}"


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[type[BaseModel], str, str]:
    """The model that owns ``loc``, its field there (or "") and the dotted path."""
    owner, field, place = model, "", ""
    for part in loc:
        inner = _inner(owner, field)
        if isinstance(part, int) and _may_be_list(owner, field):
            place += f"[{part}]"
        elif len(inner) > 1 and part in inner:  # pydantic puts a variant's kind into the place
            owner, field = inner[part], ""
        elif field and not inner:  # pydantic names the member of a union: literal['auto']
            continue
        else:
            owner = next(iter(inner.values()), owner)
            field, place = str(part), f"{place}.{part}".removeprefix(".")
    return owner, field, place or "(top level)"


def _inner(owner: type[BaseModel], field: str) -> dict[str, type[BaseModel]]:
    """The models that a field may hold, by kind (a model without a kind: by its name)."""
    options = _options(owner.model_fields[field].annotation) if field in owner.model_fields else []
    models = [m for m in options if isinstance(m, type) and issubclass(m, BaseModel)]
    return {_kind(model) or model.__name__: model for model in models}


def _is_list(owner: type[BaseModel], field: str) -> bool:
    info = owner.model_fields.get(field)
    return info is not None and get_origin(info.annotation) is tuple


def _may_be_null(owner: type[BaseModel], field: str) -> bool:
    info = owner.model_fields.get(field)
    return info is not None and type(None) in _members(info.annotation)


def _may_be_list(owner: type[BaseModel], field: str) -> bool:
    info = owner.model_fields.get(field)
    members = [] if info is None else _members(info.annotation)
    return any(get_origin(member) is tuple for member in members)


def _members(annotation: Any) -> list[Any]:
    """The member types of a union, at any depth."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


def _options(annotation: Any) -> list[Any]:
    """The member types of a union, or the item types of a tuple, at any depth."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if isinstance(annotation, UnionType) or get_origin(annotation) in (Union, tuple):
        return [option for part in get_args(annotation) for option in _options(part)]
    return [annotation]


def _kind(model: type[BaseModel]) -> str | None:
    """The ``kind`` of a variant; None: not a variant."""
    return model.model_fields["kind"].default if "kind" in model.model_fields else None


def _allowed(owner: type[BaseModel], field: str) -> str:
    """The values that a field takes, with an example to copy."""
    inner = _inner(owner, field)
    group = next(iter(inner.values()), owner)
    off = " or null" * _may_be_null(owner, field)
    if not field or (inner and not _kind(group)):
        what = "a non-empty list of mappings" if _is_list(owner, field) else "a mapping"
        return f"{what} with the settings {', '.join(group.model_fields)}{off}"
    if inner:
        return f"the kinds {', '.join(inner)}{off}; e.g. {field}: {{kind: {next(iter(inner))}}}"
    info = owner.model_fields[field]
    words = _words(owner.model_json_schema()["properties"][field])
    if not info.examples and info.is_required():
        return words
    example = info.examples[0] if info.examples else info.default
    return f"{words}; e.g. {field}: {json.dumps(example)}"


def _words(schema: dict[str, Any]) -> str:
    """A field's JSON schema in words, so that message and schema cannot disagree."""
    if "anyOf" in schema:
        return " or ".join(_words(option) for option in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return " or ".join(
            str(value).lower() if isinstance(value, bool) else str(value)
            for value in schema["enum"]
        )
    if schema["type"] == "array":
        items = _words(schema["items"]).removeprefix("a ").replace("number", "numbers")
        return f"{'a non-empty list' if 'minItems' in schema else 'a list'} of {items}"
    words = _TYPES[schema["type"]]
    if "minLength" in schema:
        return f"non-empty {words}"
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([words, " and ".join(bounds)]) if bounds else words
