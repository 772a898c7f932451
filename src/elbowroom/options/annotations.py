"""Type annotations of options: the markers that say what a plain type can't, and the kind that an annotation means."""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from elbowroom.options.kinds import (
    Boolean,
    ByteSize,
    Choice,
    Either,
    FilePath,
    Items,
    ModelReference,
    Number,
    Range,
    Text,
    WholeNumber,
)  # fmt: skip
from elbowroom.options.values import Kind


@dataclass(frozen=True)
class Matching:
    """Text that must match a regular expression as a whole; `accepted` says so in words."""

    pattern: str
    accepted: str
    spellings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Separated:
    """What stands between the items of a list where it is written as one text."""

    by: str


@dataclass(frozen=True)
class SizeInBytes:
    """A whole number of bytes, which may be written with a unit: `16GiB`."""


@dataclass(frozen=True)
class FolderOrHubId:
    """The path of a folder, or the id of a repository on the Hugging Face hub."""


@dataclass(frozen=True)
class Families:
    """Only these model families have the option."""

    names: tuple[str, ...]


def kind_of(annotation: Any, metadata: Iterable[object] = ()) -> Kind:
    """The kind of an option whose type is annotated so.

    Understands bool, int, float, str, Path, Literal, `tuple[X, ...]` and unions of them, and the markers above and the
    limits of `annotated_types` in `metadata` or in `Annotated`. None in a union only says that the option can be unset.

    Raises:
        TypeError: no kind is known for the annotation.
    """
    metadata = tuple(metadata)
    origin = get_origin(annotation)
    if origin is Annotated:
        return kind_of(get_args(annotation)[0], (*get_args(annotation)[1:], *metadata))
    if origin in (Union, types.UnionType):
        kinds = [kind_of(member, metadata) for member in get_args(annotation) if member is not types.NoneType]
        # Named values first: where one of several kinds takes everything, such as text, they would never be reached.
        kinds.sort(key=lambda kind: not isinstance(kind, Choice))
        return kinds[0] if len(kinds) == 1 else Either(tuple(kinds))
    if origin is Literal:
        return Choice(get_args(annotation))
    if origin is tuple:
        separators = [marker.by for marker in metadata if isinstance(marker, Separated)]
        return Items(kind_of(get_args(annotation)[0]), *separators)
    if annotation is bool:
        return Boolean()
    if annotation is int:
        return (ByteSize if SizeInBytes() in metadata else WholeNumber)(_range(metadata))
    if annotation is float:
        return Number(_range(metadata))
    if annotation is str:
        if FolderOrHubId() in metadata:
            return ModelReference()
        return next((Text(**asdict(marker)) for marker in metadata if isinstance(marker, Matching)), Text())
    if annotation is Path:
        return FilePath()
    raise TypeError(f"no kind of option value is known for the type {annotation!r}")


def _range(metadata: Iterable[object]) -> Range:
    limits: dict[str, Any] = {}
    for marker in metadata:
        if isinstance(marker, (Ge, Gt, Le, Lt)):
            limits |= asdict(marker)
    return Range(**limits)
