"""What a control may be set to, by its type and the metadata of its field."""

from __future__ import annotations

import re
from dataclasses import Field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


class ControlsError(ValueError):
    """A control that breaks a rule. `option` is its name, `rule` says what is allowed."""

    def __init__(self, option: str, rule: str):
        super().__init__(f"{option}: {rule}")
        self.option = option
        self.rule = rule


def check_value(control: Field[Any], annotation: Any, value: Any) -> None:
    """Raise `ControlsError` if a control can't have a value.

    Args:
        control: its field; metadata may hold "minimum", "maximum", and for text "pattern" and "accepted" (in words).
        annotation: its type.
        value: what it was set to.
    """
    if value is None and control.default is None:
        return
    accepted = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if not any(_is_one(kind, control, value) for kind in accepted if kind is not type(None)):
        raise ControlsError(control.name, f"must be {_described(accepted, control)}, but is {value!r}")


def _is_one(kind: Any, control: Field[Any], value: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        item_kind = get_args(kind)[0]
        return isinstance(value, tuple) and all(
            isinstance(item, str) if item_kind is str else _is_one(item_kind, control, item) for item in value
        )
    if kind is str:
        return isinstance(value, str) and re.fullmatch(control.metadata["pattern"], value) is not None
    if kind is int:
        # True is an int in Python; as a count it is a mistake.
        limits = control.metadata.get("minimum", value), control.metadata.get("maximum", value)
        return type(value) is int and limits[0] <= value <= limits[1]
    return isinstance(value, kind)


def _described(kinds: tuple[Any, ...], control: Field[Any]) -> str:
    words = []
    for kind in kinds:
        if kind is bool:
            words.append("True or False")
        elif kind is int:
            limits = control.metadata
            between = "maximum" in limits
            words.append(
                f"a whole number between {limits['minimum']} and {limits['maximum']}"
                if between
                else f"a whole number of at least {limits['minimum']}"
            )
        elif kind is str:
            words.append(control.metadata["accepted"])
        elif kind is Path:
            words.append("a pathlib.Path")
        elif get_origin(kind) is Literal:
            words += [repr(choice) for choice in get_args(kind)]
        elif get_origin(kind) is tuple:
            items = get_args(get_args(kind)[0])
            words.append("a tuple of " + (", ".join(map(repr, items)) if items else "texts"))
    return " or ".join(words)
