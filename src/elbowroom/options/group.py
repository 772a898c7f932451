"""The base of all groups of options: converts what it is given, is frozen, and refuses what it doesn't know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from elbowroom.options.annotations import Families, kind_of
from elbowroom.options.values import UNSET, Kind, ValueProblem, convert

ENVIRONMENT_PREFIX: Final = "ELBOWROOM_"


class Group(BaseModel):
    """Options that belong together. The class's docstring describes the group; the one under a field is its help text.

    A field is a plain pydantic field. Its type, limits and markers say which values it takes (see `annotations.py`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    group: ClassVar[str]
    """The name of the group: of the table in a file, and of the panel in the help."""

    @field_validator("*", mode="before")
    @classmethod
    def _convert(cls, raw: object, info: ValidationInfo) -> object:
        option = Option(str(info.field_name), cls.model_fields[str(info.field_name)])
        value = convert(option.kind, raw, Path.cwd())
        if value is not UNSET:
            return value
        if option.required:
            raise ValueProblem("is required")
        return option.default_from(Path.cwd())


@dataclass(frozen=True)
class Option:
    """One option, seen as the command line, the files and the documentation need it."""

    name: str
    field: FieldInfo
    group: str = ""

    @property
    def kind(self) -> Kind:
        return kind_of(self.field.annotation, self.field.metadata)

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> Any:
        """The value where nothing is given; None where that means "unset", and for a required option."""
        return None if self.required else self.field.default

    def default_from(self, folder: Path) -> Any:
        """The default, where a relative path in it is taken from `folder`."""
        return None if self.default is None else self.kind.convert(self.default, folder)

    @property
    def help(self) -> str:
        """What the option does, in one paragraph."""
        return " ".join((self.field.description or "").split())

    @property
    def families(self) -> tuple[str, ...]:
        """The model families that have this option; empty for all."""
        return next((marker.names for marker in self.field.metadata if isinstance(marker, Families)), ())

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


def options_in(group: type[Group]) -> Iterator[Option]:
    """The options of one group, in the order in which they are defined."""
    return (Option(name, field, group.group) for name, field in group.model_fields.items())
