"""What every setting is: a frozen value that is checked when it is built.

Never names a single setting: those are in ``spec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.errors import StrategyError
from slipstream.strategy.validate import explain

Exactness = Literal["bitwise", "reordered", "lossy"]
"""How near gradients come to the plain mean: the same bits; the same sum in another floating-point
order; an approximation. From strongest to weakest."""


def first_line(text: str | None) -> str:
    """The first line of a docstring, without its full stop."""
    return (text or "").strip().partition("\n")[0].removesuffix(".")


def _publish(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """JSON schema: one line about a model, and a variant is known by its kind."""
    schema["description"] = first_line(model.__doc__)
    if "kind" in model.model_fields:
        schema["required"] = ["kind", *schema.get("required", [])]


class FrozenModel(BaseModel):
    """A frozen value that is checked when it is built.

    Nothing is converted (``"yes"`` is no boolean, ``True`` no number), except a whole number where
    a float is wanted and a list where a tuple is. NaN and infinity are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Setting(FrozenModel):
    """A frozen value with named settings: equal by value, hashable, checked when it is built.

    Whatever is wrong raises one StrategyError.
    """

    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_extra=_publish)

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise StrategyError(explain(error, type(self))) from None

    # Tells pydantic that this __init__ validates as its own does. Without the mark it would build
    # nested settings through it, and lose the place of what is wrong inside them.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """As pydantic's, raising StrategyError."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise StrategyError(explain(error, cls)) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some settings changed; unlike pydantic's, it is checked like any other."""
        return type(self)(**{**dict(self), **(update or {})})

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise StrategyError(
            f"{type(self).__name__}.{name} cannot be set to {value!r}: a strategy is frozen; "
            f"build another, e.g. .model_copy(update={{{name!r}: {value!r}}})"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise StrategyError(
            f"{type(self).__name__}.{name} cannot be deleted: a strategy is frozen; "
            "build another without it"
        )

    @property
    def active(self) -> bool:
        """False where the settings inside have no effect, because what they describe is off."""
        return True

    def document(self, *, full: bool = False) -> dict[str, Any]:
        """Plain mappings, lists and scalars; only what differs from the defaults unless ``full``.

        A variant that differs from its own defaults in nothing is written as its kind alone.
        """
        fields = type(self).model_fields
        return {
            name: _plain(value, full=full)
            for name, value in self
            if full or name == "kind" or value != fields[name].default
        }


class Variant(Setting):
    """One of several ways to do a thing; the ways are types, told apart by ``kind``."""

    kind: str
    exactness: ClassVar[Exactness]


def from_kind(value: object) -> object:
    """Reads ``split: single`` as ``split: {kind: single}``; passes anything else on."""
    return {"kind": value} if isinstance(value, str) else value


def _plain(value: object, *, full: bool) -> object:
    if isinstance(value, Setting):
        document = value.document(full=full)
        return document["kind"] if document.keys() == {"kind"} and not full else document
    if isinstance(value, tuple):
        return [_plain(inner, full=full) for inner in value]
    return value
