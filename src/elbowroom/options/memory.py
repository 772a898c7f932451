"""The memory options, made from the fields of `elbowroom.memory.controls.Controls`, where each is defined.

The memory layer is a library of its own and knows nothing of pydantic, so its options live in a plain dataclass.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import Field, create_model

from elbowroom.memory.controls import Controls
from elbowroom.options.annotations import Matching, Separated, SizeInBytes
from elbowroom.options.group import Group

DESCRIPTION = "How the model is trained in less memory: what is recomputed, offloaded and streamed."


def group_from(controls: type, name: str, description: str) -> type[Group]:
    """A group of options with a field for every field of a dataclass such as `Controls`.

    A field's metadata holds its help text under "help", its limits under "minimum" and "maximum", "unit": "bytes" for a
    size that may be written as `16GiB`, "separator" for what stands between the items of a list, and for text "pattern"
    and "accepted", which says the pattern in words.
    """
    hints = typing.get_type_hints(controls)
    options: dict[str, Any] = {}
    for control in dataclasses.fields(controls):
        annotation = _with_markers(hints[control.name], control.metadata)
        default = ... if control.default is dataclasses.MISSING else control.default
        options[control.name] = (annotation, Field(default, description=control.metadata["help"]))
    model = create_model(f"{name.title()}Options", __base__=Group, __doc__=description, __module__=__name__, **options)
    model.group = name
    return model


def _with_markers(annotation: Any, metadata: types.MappingProxyType[Any, Any]) -> Any:
    """The annotation with its limits where pydantic can apply them: on the numbers in a union, not on the union."""
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(_with_markers(member, metadata) for member in get_args(annotation))]  # noqa: UP007
    if get_origin(annotation) is tuple and "separator" in metadata:
        return Annotated[annotation, Separated(metadata["separator"])]
    if annotation is str and "pattern" in metadata:
        return Annotated[annotation, Matching(metadata["pattern"], metadata["accepted"])]
    if annotation not in (int, float):
        return annotation
    markers: list[Any] = []
    if "minimum" in metadata:
        markers.append(Ge(metadata["minimum"]))
    if "maximum" in metadata:
        markers.append(Le(metadata["maximum"]))
    if metadata.get("unit") == "bytes":
        markers.append(SizeInBytes())
    return Annotated[annotation, *markers] if markers else annotation


MemoryOptions = group_from(Controls, "memory", DESCRIPTION)
