"""The base classes of all sections of the configuration.

Sections are frozen and strict. An integer is accepted where a number is wanted, but booleans and strings
are not numbers, and unknown keys are errors. The text below a field documents it: the first paragraph says
what the option does, the second one when to change it. ``options`` and the reference page read these texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from .validation_errors import validated

#: Upper limits for options that have none of their own: larger values overflow somewhere.
_LARGEST = {int: 2**48, float: 1e30}


class Section(BaseModel):
    """Base class of all sections."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),  # pydantic up to 2.9 warns about every key that begins with "model_"
    )

    #: Path of the section in the configuration, for error messages.
    section_path: ClassVar[str] = "dct"

    @field_validator("*")
    @classmethod
    def _within_reason(cls, value: Any) -> Any:
        numbers = value if isinstance(value, tuple) else (value,)
        if any(number > _LARGEST[type(number)] for number in numbers if type(number) in _LARGEST):
            raise PydanticCustomError("dct_limit", "at most 2^48 (integers) or 1e30 (numbers)")
        if isinstance(value, str) and "\0" in value:
            raise PydanticCustomError("dct_limit", "without the character NUL")
        return value

    @classmethod
    def of(cls, values: Mapping[str, Any] | None = None, /, **keys: Any) -> Self:
        """Return a validated section. Unlike the constructor, raise :class:`ConfigError` for errors."""
        return validated(cls, {**(values or {}), **keys}, cls.section_path)

    def short(self) -> Any:
        """Return the shortest JSON value that stands for this section."""
        return self.model_dump(mode="json", exclude_defaults=True)


class Variant(Section):
    """Base class of the objects of a union, one of which a key such as ``"kind"`` selects.

    In JSON the key's value alone stands for an object that has every setting at its default.
    """

    #: The key that selects the class.
    selector: ClassVar[str] = "kind"

    @classmethod
    def label(cls) -> str:
        """Return the value of the selecting key."""
        return str(cls.model_fields[cls.selector].default)

    def short(self) -> Any:
        settings = super().short()
        return settings if len(settings) > 1 else self.label()

    @model_serializer(mode="wrap")
    def _with_selector(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write the selecting key in any case, although its value is the field's default."""
        return {self.selector: self.label(), **dump(self)}


def written_short(selector: str) -> BeforeValidator:
    """Return the validator that accepts ``"name"`` in place of ``{selector: "name"}``."""
    return BeforeValidator(lambda value: {selector: value} if isinstance(value, str) else value)


#: Metadata of a section that is absent by default: ``false`` means the same as ``null``.
OR_FALSE = BeforeValidator(lambda value: None if value is False else value)


def conflict(message: str) -> PydanticCustomError:
    """Return the error that options of a section do not go together."""
    return PydanticCustomError("dct_conflict", "{message}", {"message": message})
