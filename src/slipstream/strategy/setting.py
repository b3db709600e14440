"""``Setting``: the base of every configuration value, frozen and validated when it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
)

from slipstream.errors import StrategyError
from slipstream.strategy.validate import explain

Exactness = Literal["bitwise", "reordered", "lossy"]
"""How close gradients are to the plain mean, strongest first: the same bits; the same sum in
another floating-point order; an approximation."""


def first_line(text: str | None) -> str:
    """The first line of a docstring, without its full stop."""
    return (text or "").strip().partition("\n")[0].removesuffix(".")


def _publish(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Shorten a model's description to one line; require ``kind`` of a variant."""
    schema["description"] = first_line(model.__doc__)
    if "kind" in model.model_fields:
        schema["required"] = ["kind", *schema.get("required", [])]


class FrozenModel(BaseModel):
    """A frozen value that is checked when it is built.

    Values are not converted (``"yes"`` is no boolean, ``True`` no number), except an integer to a
    float and a list to a tuple. NaN and infinity are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Setting(FrozenModel):
    """A frozen group of settings, equal by value; all problems raise one StrategyError."""

    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_extra=_publish)

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise StrategyError(explain(error, type(self))) from None

    # Marks this __init__ as pydantic's own. Without the mark pydantic would build nested settings
    # by calling it, and errors inside them would lose their path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate as pydantic does, but raise StrategyError."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise StrategyError(explain(error, cls)) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy with some settings changed; unlike pydantic's, the copy is validated."""
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
        """False when the group is off, so that its settings have no effect."""
        return True

    def document(self, *, full: bool = False) -> dict[str, Any]:
        """Plain mappings, lists and scalars; only non-default settings unless ``full``.

        A variant with default settings is written as its kind alone.
        """
        fields = type(self).model_fields
        return {
            name: _plain(value, full=full)
            for name, value in self
            if full or name == "kind" or value != fields[name].default
        }


class Variant(Setting):
    """One of several alternatives; each is a type, told apart by ``kind``.

    Both words of the class line become attributes: ``class Single(Variant, kind="single", ...)``
    has the field ``kind: Literal["single"] = "single"``.
    """

    kind: str = ""
    exactness: ClassVar[Exactness]

    def __init_subclass__(cls, kind: str = "", exactness: Exactness | None = None) -> None:
        if kind:
            cls.__annotations__["kind"], cls.kind = Literal[kind], kind
        if exactness:
            cls.exactness = exactness


def from_kind(value: object) -> object:
    """Reads ``split: single`` as ``split: {kind: single}``; passes anything else on."""
    return {"kind": value} if isinstance(value, str) else value


class OneOf:
    """Annotates a union of variants: a kind may stand alone where the rest has defaults.

    Args:
        read: from what stands in the place of a variant to what pydantic reads.
        family: a base of the variants. Others of it, defined outside this package, are read, too:
            by their kind, or as they are.
    """

    def __init__(
        self,
        read: Callable[[object], object] = from_kind,
        family: type[Variant] | None = None,
    ) -> None:
        self._read, self._family = read, family

    def __get_pydantic_core_schema__(self, union: Any, handler: Any) -> Any:
        known = get_args(union)
        alone = tuple(
            variant.model_fields["kind"].default
            for variant in known
            if not any(field.is_required() for field in variant.model_fields.values())
        )
        read = BeforeValidator(self._read, json_schema_input_type=union | Literal[alone])
        others = WrapValidator(partial(self._from_elsewhere, known))
        inner = Annotated[union, Field(discriminator="kind"), read]
        return handler.generate_schema(Annotated[inner, others] if self._family else inner)

    def _from_elsewhere(
        self, known: Sequence[type[Variant]], value: Any, validate: Callable[[object], object]
    ) -> object:
        """A variant that is not of this package, or what pydantic makes of ``value``."""
        if self._family is not None and isinstance(value, self._family):
            return value if type(value) not in known else validate(value)
        read: Any = self._read(value)
        kind = read.get("kind") if isinstance(read, Mapping) else None
        kinds = {variant.model_fields["kind"].default for variant in known}
        for variant in _descendants(self._family):
            # a kind of this package stays its own, even where a class outside inherits it
            if (
                isinstance(kind, str)
                and kind not in kinds
                and variant.model_fields["kind"].default == kind
            ):
                return variant(**read)
        return validate(value)


def _descendants(base: type[Variant] | None) -> Iterator[type[Variant]]:
    for variant in base.__subclasses__() if base is not None else ():
        yield variant
        yield from _descendants(variant)


def _plain(value: object, *, full: bool) -> object:
    if isinstance(value, Setting):
        document = value.document(full=full)
        return document["kind"] if document.keys() == {"kind"} and not full else document
    if isinstance(value, tuple):
        return [_plain(inner, full=full) for inner in value]
    return value
